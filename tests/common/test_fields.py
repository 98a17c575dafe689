"""Values that are checked against the annotations of a config's fields and of a function's arguments."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest

from memformers.common.command_line import Group, parse_arguments
from memformers.common.errors import UserError
from memformers.common.fields import (
    Count,
    NonNegativeInt,
    Positive,
    Range,
    Share,
    check_arguments,
    check_fields,
)
from memformers.common.files import config_from_dict

Lengths = NonNegativeInt | tuple[NonNegativeInt, ...]


@dataclass(frozen=True)
class Inner:
    """What is inside."""

    width: Count = 3
    """How wide it is."""
    lengths: Lengths = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Config:
    """What it is for."""

    first: ClassVar = ()
    groups: ClassVar = {"size": Group("How large it is.", ("width", "lengths"))}
    norm: Literal["pre", "post"] = "pre"
    names: tuple[Literal["a", "b"], ...] = ("a",)
    share: Share = 0.0
    rate: Positive | None = None
    scale: Annotated[float, Range(above=0, below=math.inf)] = 1.0
    inner: Inner = field(default_factory=Inner)
    text: str = ""
    folder: Path | None = None
    bound: bool = False
    other: Any = None

    def __post_init__(self) -> None:
        check_fields(self)


def test_values_in_their_range_are_taken():
    Config("post", ("a", "b"), 1, 1e300, 2.0, Inner(1, (0, 3)), "x", Path("y"), True, object())
    Config(share=0.5, rate=math.inf)


@pytest.mark.parametrize(
    ("kind", "setting", "value", "expected"),
    [(Inner, "width", 0, "a whole number, at least 1"),
     *((Inner, "width", value, "a whole number") for value in (1.0, "3", True, None, np.int64(4))),
     (Inner, "lengths", (3, -1), "a whole number, at least 0, or a tuple of such numbers"),
     (Inner, "lengths", [3, 1], "a whole number, at least 0, or a tuple of such numbers"),
     (Config, "norm", "between", "one of 'pre', 'post'"),
     (Config, "names", ("a", "c"), "a tuple, each one of 'a', 'b'"),
     (Config, "share", 1.5, "a number, at least 0 and at most 1"),
     (Config, "share", math.nan, "a number"),
     (Config, "rate", 0, "a number, above 0, or None"),
     (Config, "scale", math.inf, "a number, above 0 and finite"),
     (Config, "inner", {"width": 3}, "of type Inner"),
     (Config, "text", 3, "a text"),
     (Config, "folder", "y", "of type Path, or None"),
     (Config, "bound", 1, "True or False")],
)  # fmt: skip
def test_any_other_value_is_an_error_that_says_what_was_expected_and_what_came(
    kind, setting, value, expected
):
    with pytest.raises(UserError) as error:
        kind(**{setting: value})
    said = str(error.value)
    assert said.startswith(f"expected {setting} to be {expected}")
    assert f"got {setting}={value!r}" in said
    assert (setting == "inner") or f"the default is {getattr(kind(), setting)!r}" in said


def test_annotations_with_ranges_leave_the_command_line_and_files_as_they_are(capsys, monkeypatch):
    config = Config(inner=Inner(10, (3, 4)), share=0.5)
    given = ["--width", "1e1", "--lengths", "3", "4", "--share", ".5"]
    assert parse_arguments(Config, given) == config
    assert config_from_dict(Config, asdict(config), "it") == config
    with pytest.raises(UserError, match=r"expected width to be .*, got width=0; the default is 3\.$"):
        parse_arguments(Config, ["--width", "0"])
    with pytest.raises(UserError, match="share=2"):
        config_from_dict(Config, asdict(config) | {"share": 2}, "it")
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        parse_arguments(Config, ["--help"])
    assert "How wide it is. (default: 3)" in capsys.readouterr().out


@check_arguments
def made(size: Count, share: Share = 0.5, *, norm: Literal["pre", "post"] = "pre", more: Any = None) -> str:
    """What it makes."""
    return f"{size} {share} {norm} {more}"


def test_a_functions_arguments_are_checked_in_the_same_way():
    assert made(3, more=4) == "3 0.5 pre 4"
    assert made.__doc__ == "What it makes."
    with pytest.raises(UserError, match=r"^expected size to be a whole number, at least 1, got size=0\.$"):
        made(0)
    with pytest.raises(UserError, match=r"got norm='x'; the default is 'pre'\.$"):
        made(1, norm="x")
    with pytest.raises(TypeError, match="size"):
        made()
