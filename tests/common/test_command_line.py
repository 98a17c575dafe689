"""What ends a program, and what it says."""

import io
import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import ClassVar

import pytest

from memformers.common.command_line import (
    Group,
    command_as_given,
    parse_arguments,
    plain_errors,
    whole_number,
)
from memformers.common.errors import UserError
from tests.processes import ended


def failing(error):
    def program():
        with plain_errors():
            raise error

    return ended(program)


@pytest.mark.parametrize("error", [UserError("d_model=1 is odd"), OSError("the disk is full")])
def test_what_the_user_can_mend_is_one_line(error):
    assert failing(error).err == f"error: {error}\n"
    assert failing(error).code == 2


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("y"), KeyError("z"), AssertionError()])
def test_a_mistake_of_ours_shows_its_traceback_and_asks_to_be_reported(error):
    said = failing(error)
    assert said.code == 1
    assert "Traceback" in said.err
    assert said.err.endswith("please report the lines above.\n")


def test_a_stream_that_cannot_show_a_character_shows_another(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with plain_errors():
        print("a → b", flush=True)
    assert raw.getvalue() == b"a ? b\n"


@dataclass
class Options:
    tokens: int = 1
    top_k: int | None = None
    cutoffs: tuple[int, ...] = ()
    scale: float = 1.0


def test_a_whole_number_may_be_written_with_an_exponent():
    given = ["--tokens", "1e6", "--top-k", "1.5e1", "--cutoffs", "1e3", "20", "--scale", "1e-1"]
    assert parse_arguments(Options, given) == Options(1_000_000, 15, (1000, 20), 0.1)
    assert whole_number("9007199254740993e0") == 9007199254740993, "which no float is"


@pytest.mark.parametrize("text", ["1.5", "1e-1", "x", "", "inf", "1e999999999", "1/2", "0x10", "."])
def test_what_is_no_whole_number_is_said_and_an_example_given(text, capsys):
    with pytest.raises(ValueError, match="is not a whole number; write one such as 1000 or 1e6"):
        whole_number(text)
    with pytest.raises(SystemExit):
        parse_arguments(Options, ["--tokens", text])
    assert "is not a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [("/home/me/bin/memformers compare --data /home/me/b.txt", "memformers compare --data b.txt"),
     ("experiments/compare.py --data=/home/me/b.txt", "python experiments/compare.py --data=b.txt"),
     ("memformers train --dashboard http://me:secret@host/ --out runs/x", "memformers train --out runs/x"),
     ("memformers train --dashboard=http://secret/ --seed 1", "memformers train --seed 1")],
)  # fmt: skip
def test_a_command_is_shown_without_places_and_addresses(arguments, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", arguments.split())
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert command_as_given() == said


def test_a_module_that_runs_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/memformers/training/__main__.py", "run"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec("memformers.training.__main__", None))
    assert command_as_given() == "python -m memformers.training run"


@dataclass(frozen=True)
class Inner:
    width: int = 3
    """How wide
    it is."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise UserError(f"width={self.width} is too small; use at least 1.")


@dataclass(frozen=True, kw_only=True)
class Base:
    """What several have."""

    color: str = ""
    """Which color."""


@dataclass(frozen=True)
class Outer(Base):
    """What it is for."""

    first: ClassVar = ("name",)
    groups: ClassVar = {"size": Group("How large it is.", ("width", "height"))}
    inner: Inner = field(default_factory=Inner)
    name: str = ""
    """What it is called."""


def test_help_shows_the_first_options_then_the_groups_then_all_others(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    said = ended(lambda: parse_arguments(Outer, ["--help"])).out
    parts = [
        *("─ options", "--name", "What it is called."),
        *("─ size options", "How large it is.", "--width", "How wide it is. (default: 3)"),
        *("─ other options", "--color", "Which color.", "--seed"),
    ]
    usage, _, boxes = said.partition("╭")
    assert "What it is for." in usage
    places = [boxes.index(part) for part in parts]
    assert places == sorted(places)
    assert "height" not in said
