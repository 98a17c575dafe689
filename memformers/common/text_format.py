"""What people read in a terminal, a log or a report: numbers with nouns, safe text, progress."""

import os
import sys
import unicodedata
from typing import Any

from tqdm import tqdm


def counted(number: int, noun: str) -> str:
    """The number with its ``noun``, whose plural ends in s: "1 document", "2,000 documents"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def printable(text: str) -> str:
    """``text`` without control characters other than line breaks, which could write to a terminal at will."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def fitting(text: str, columns: int) -> str:
    """The beginning of ``text`` that a terminal shows in this many ``columns``; some characters take two."""
    for end, character in enumerate(text):
        columns -= 1 + (unicodedata.east_asian_width(character) in "WF")
        if columns < 0:
            return text[:end]
    return text


class Progress(tqdm):  # type: ignore[type-arg]
    """A progress bar; where standard error is a log, a line for each tenth of the total instead."""

    tenth = 0

    def __init__(self, **options: Any):
        self.in_log = not sys.stderr.isatty()
        if self.in_log:
            options["file"] = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            options["bar_format"] = "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt}{postfix}"
        super().__init__(**options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Draw the bar, or write the line if it is due."""
        tenth = int(10 * self.n / self.total) if self.total else 0
        if not self.in_log:
            super().display(msg, pos)
        elif tenth > self.tenth:
            self.tenth = tenth
            print(self, file=sys.stderr, flush=True)
