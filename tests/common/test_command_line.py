"""What a command line means, what its help shows, what ends a program, and what it says."""

import io
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import ClassVar

import pytest

from memformers.common.command_line import cli_errors, command_as_given, parse_arguments
from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count
from tests.processes import ended, start


@pytest.mark.parametrize(
    ("error", "code", "end"),
    [(UserError("d_model=1 is odd"), 2, "error: d_model=1 is odd\n"),
     (OSError("the disk is full"), 2, "error: the disk is full\n"),
     (MemoryError(), 2, "(out of memory)\n"),
     (KeyboardInterrupt(), 130, "interrupted\n"),
     *((error, 1, "report the traceback above.\n") for error in (ValueError("x"), RuntimeError("y")))],
)  # fmt: skip
def test_an_error_is_one_line_and_a_bug_shows_its_traceback(error, code, end):
    def program():
        with cli_errors():
            raise error

    result = ended(program)
    assert result.code == code
    assert result.err.endswith(end)
    assert ("Traceback" in result.err) == (code == 1)
    assert len(result.err.splitlines()) == 1 or code == 1


def test_a_program_ends_without_a_word_when_its_reader_has_gone():
    program = (
        "from memformers.common.command_line import cli_errors as c\nwith c():\n  while True: print('x')"
    )
    with start([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE


@dataclass(frozen=True)
class Inner(Checked):
    width: Count = 3
    """How wide
    it is."""
    cutoffs: tuple[int, ...] = ()
    lengths: int | tuple[int, ...] = 0
    depth: int | None = None
    pair: tuple[int, int] = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Base:
    color: str = ""
    """Which color."""


@dataclass(frozen=True)
class Outer(Base):
    """What it is for."""

    first: ClassVar = ("name", "width")
    inner: Inner = field(default_factory=Inner)
    """How large it is."""
    name: str = ""
    """What it is called."""
    scale: float = 1.0
    folder: Path | None = None
    bound: bool = False


def test_a_file_gets_utf8_where_a_terminal_would_be_narrow(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with cli_errors():
        print("Ω", flush=True)
    assert sys.stdout.buffer.getvalue() == "Ω\n".encode()


def test_a_command_line_is_nested_configs(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    for word, bound in {"--bound": True, "--bound=True": True, "--bound=false": False}.items():
        made = parse_arguments(Outer, ["--folder=~/x", word, "--name=True"])
        assert made == Outer(name="True", folder=Path("/home/ada/x"), bound=bound)
    args = ["--width", "1.5e1", "--cutoffs", "1e3", "20", "--depth", "1e6", "--scale", "1e-1", "--name", "x"]
    made = Outer(Inner(15, (1000, 20), 0, 1_000_000), "x", 0.1)
    assert parse_arguments(Outer, args) == made
    assert parse_arguments(Outer, ["--color", "red"], default=made).inner.width == 15
    for words in (["64", "64", "832"], ["64,64,832"]):
        assert parse_arguments(Outer, ["--lengths", *words]).inner.lengths == (64, 64, 832)
    for words in ("--cutoffs 1 2 --name x --cutoffs 3", "--cutoffs=1 --cutoffs 2 --name=x --cutoffs=3"):
        assert parse_arguments(Outer, words.split()) == Outer(Inner(cutoffs=(1, 2, 3)), "x")
    # A length, or one for each layer; the last one counts.
    layers = Outer(Inner(lengths=(5, 6)))
    assert parse_arguments(Outer, ["--lengths=7", "--lengths=8"], default=layers).inner.lengths == 8
    words = ["--pair", "3", "4", "--pair", "5", "6"]
    assert parse_arguments(Outer, words).inner.pair == (5, 6)
    with pytest.raises(UserError, match=r"got width=0\.$"):
        parse_arguments(Outer, ["--width", "0"])


@pytest.mark.parametrize(
    "words", ["--width 1.5", "--width x", "--width inf", "--width 1e999999999", "--lengths", "--lengths="]
)
def test_what_is_no_whole_number_is_said_and_an_example_given(words, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(Outer, words.split())
    assert "not a whole number; write one such as 1000" in " ".join(capsys.readouterr().err.split())


def test_help_shows_the_first_options_of_each_group_first(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    shown = ended(lambda: parse_arguments(Outer, ["--help"], prog="it")).out
    assert re.search(
        r"What it is for\..*─ options.*--name STR.*What it is called\..*--color STR.*--scale.*─ inner options"
        r".*How large it is\..*--width INT.*How wide it is\. \(default: 3\).*--cutoffs \[INT \[INT \.\.\.\]\]"
        r".*--lengths INT \[INT \.\.\.\].*--depth INT",
        shown,
        re.DOTALL,
    )


@pytest.mark.parametrize(
    ("arguments", "module", "shown"),
    [("/home/me/bin/memformers compare --data /me/b.txt", "", "memformers compare --data /me/b.txt"),
     ("experiments/compare.py --data=my$b.txt", "", "python experiments/compare.py '--data=my$b.txt'"),
     ("memformers train --dashboard http://me:me@host/ --out runs/x", "", "memformers train --out runs/x"),
     ("memformers train --dashboard=http://secret/ --seed 1", "", "memformers train --seed 1"),
     ("/home/me/training/__main__.py run", "memformers.x.__main__", "python -m memformers.x run")],
)  # fmt: skip
def test_a_command_is_shown_as_it_runs_again_without_addresses(arguments, module, shown, monkeypatch):
    monkeypatch.setattr(sys, "argv", arguments.split())
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(module, None) if module else None)
    assert command_as_given() == shown
