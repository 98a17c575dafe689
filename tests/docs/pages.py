"""The pages of the documentation, and the files that their tests read beside them."""

from pathlib import Path

from docs.building.results import ROOT
from memformers.common.intervals import Mean


def page_id(path: Path) -> str:
    """The path of a file from the root of the repository, which names the file in a test's id."""
    return path.relative_to(ROOT).as_posix()


def read_file(path: str | Path) -> str:
    """The text of a file, whose path starts at the root of the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


def in_one_line(text: str) -> str:
    """The text with one space in place of each line break, so that a sentence is found in it."""
    return " ".join(text.split())


def prose(path: str | Path) -> str:
    """A page in one line."""
    return in_one_line(read_file(path))


def as_written(value: Mean) -> str:
    return f"{value.mean:.3f} ± {value.half_width:.3f}"


def points(difference: Mean) -> str:
    """A difference of shares, in points."""
    return f"{100 * difference.mean:.1f} ± {100 * difference.half_width:.1f}"
