"""Options in groups are the options of the configs, with their values, defaults and texts."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from memformers.common.command_line import parse_arguments
from memformers.common.errors import UserError
from memformers.common.option_groups import Group, field_docstrings
from tests.processes import ended


@dataclass(frozen=True)
class Inner:
    width: int = 3
    """How wide
    it is."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise UserError(f"width={self.width} is too small; use at least 1.")


@dataclass(frozen=True)
class Outer:
    """What it is for."""

    first: ClassVar = ("name",)
    groups: ClassVar = {"size": Group("How large it is.", ("width", "height"))}
    inner: Inner = field(default_factory=Inner)
    name: str = ""
    """What it is called."""


def test_values_reach_the_configs_that_have_them():
    assert parse_arguments(Outer, []) == Outer()
    given = ["--width", "1e1", "--name", "x", "--seed", "7"]
    assert parse_arguments(Outer, given) == Outer(Inner(10, 7), "x")


def test_values_stand_on_top_of_those_that_are_given_as_defaults():
    default = Outer(Inner(5, 6), "y")
    assert parse_arguments(Outer, ["--seed", "7"], default=default) == Outer(Inner(5, 7), "y")


def test_what_a_config_refuses_is_raised():
    with pytest.raises(UserError, match=r"^width=0 is too small; use at least 1\.$"):
        parse_arguments(Outer, ["--width", "0"])


def test_help_shows_the_first_options_then_the_groups_then_all_others(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    said = ended(lambda: parse_arguments(Outer, ["--help"])).out
    parts = [
        *("─ options", "--name", "What it is called."),
        *("─ size options", "How large it is.", "--width", "How wide it is. (default: 3)"),
        *("─ other options", "--seed"),
    ]
    usage, _, boxes = said.partition("╭")
    assert "What it is for." in usage
    places = [boxes.index(part) for part in parts]
    assert places == sorted(places)
    assert "height" not in said


def test_the_docstring_of_a_field_is_one_line():
    assert field_docstrings(Inner) == {"width": "How wide it is."}
