"""Values that are checked against the annotations of a config's fields and of a function's arguments."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest

from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count, NonNegativeInt, Positive, Range, Share, check_arguments
from memformers.common.files import config_from_dict

Lengths = NonNegativeInt | tuple[NonNegativeInt, ...]


@dataclass(frozen=True)
class Inner(Checked):
    width: Count = 3
    lengths: Lengths = 0


@dataclass(frozen=True)
class Config(Checked):
    norm: Literal["pre", "post"] = "pre"
    names: tuple[Literal["a", "b"], ...] = ("a",)
    share: Share = 0.0
    rate: Positive | None = None
    scale: Annotated[float, Range(above=0, below=math.inf)] = 1.0
    inner: Inner = field(default_factory=Inner)
    text: str = ""
    folder: Path | None = None
    bound: bool = False


def test_values_in_their_range_are_taken_and_read_back():
    config = Config("post", ("b", "a"), 1, math.inf, 2.0, Inner(10, (0, 3)), "x", None, True)
    assert config_from_dict(Config, asdict(config), "it") == config


@pytest.mark.parametrize(
    ("kind", "setting", "value", "expected"),
    [(Inner, "width", 0, "a whole number, at least 1"),
     *((Inner, "width", value, "a whole number") for value in (1.0, True, np.int64(4))),
     (Inner, "lengths", (3, -1), "a whole number, at least 0, or a tuple of these, got"),
     (Config, "norm", "between", "one of 'pre', 'post'"),
     (Config, "names", ("a", "c"), "a tuple, each one of 'a', 'b'"),
     (Config, "share", 1.5, "a number, at least 0 and at most 1"), (Config, "share", math.nan, "a number"),
     (Config, "rate", 0, "a number, above 0, or None"), (Config, "scale", math.inf, "a number, above 0 and"),
     (Config, "inner", {"width": 3}, "of type Inner"), (Config, "text", 3, "a text"),
     (Config, "bound", 1, "True or False")],
)  # fmt: skip
def test_a_wrong_value_is_an_error_with_what_was_expected(kind, setting, value, expected):
    with pytest.raises(UserError, match=f"^expected {setting} to be {expected}") as error:
        kind(**{setting: value})
    assert f"got {setting}={value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("data", "word"),
    [({"share": 2}, "share=2"),
     ({"inner": {"widht": 3}}, "it: unknown key 'widht'; did you mean 'width'"),
     ({"zzzzzz": 3}, "unknown key 'zzzzzz'\\.$"),
     ({"text": 3}, "it: expected text to be a text, got 3"),
     ({"names": 3}, "it: ")],
)  # fmt: skip
def test_what_a_file_has_wrong_is_said_with_its_name(data, word):
    with pytest.raises(UserError, match=word):
        config_from_dict(Config, data, "it")


@check_arguments
def made(size: Count, *, norm: Literal["pre", "post"] = "pre") -> str:
    return f"{size} {norm}"


def test_a_functions_arguments_are_checked_in_the_same_way():
    assert made(3) == "3 pre"
    with pytest.raises(UserError, match=r"^expected size .*, got size=0\.$"):
        made(0)
    with pytest.raises(UserError, match=r"got norm='x'\.$"):
        made(1, norm="x")
    with pytest.raises(TypeError, match="size"):
        made()
