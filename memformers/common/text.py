"""What people read: errors, numbers with their nouns, text that is safe in a terminal, and progress."""

import os
import sys
from typing import Any, TextIO

from tqdm import tqdm

USER_MODULES: set[str] = set()
"""The names of the modules with a user's classes: an exception from there is no bug of memformers."""


class UserError(ValueError):
    """An error that the user can correct, in one line: what was expected, what was received, how to fix it.
    Any other ValueError that reaches the command line is a bug, and shows its traceback."""


class TrainingsFailed(UserError):
    """Some trainings of an experiment failed, which the message names. The others finished and are in the
    report."""


def counted(number: int, noun: str) -> str:
    """The number with its ``noun``, whose plural ends in s: "1 document", "2,000 documents"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """Seconds in words: "90 s", "12 min", "3.5 h"."""
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"


def printable(text: str) -> str:
    """``text`` with U+FFFD instead of control characters other than line breaks, which could control a
    terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def stream() -> TextIO:
    """Where progress goes: standard error, or in a notebook, which shows that as errors, standard output."""
    return sys.stdout if type(sys.stderr).__module__.startswith("ipykernel") else sys.stderr


class Progress(tqdm):  # type: ignore[type-arg]
    """A progress bar; where standard error is a log, a line for each tenth of the total instead."""

    tenth = 0

    def __init__(self, **options: Any):
        self.in_log = not stream().isatty()
        if self.in_log:
            options["file"] = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            options["bar_format"] = "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt}{postfix}"
        super().__init__(miniters=0, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        tenth = int(10 * self.n / self.total) if self.total else 0
        if not self.in_log:
            super().display(msg, pos)
        elif tenth > self.tenth:
            self.tenth = tenth
            print(self, file=stream(), flush=True)

    def show(self, words: str, done: float | None = None) -> None:
        """Show ``words`` behind the bar, and how much is ``done``; drawn a few times a second at most."""
        self.set_postfix_str(words, refresh=False)
        self.update(0 if done is None else min(done, self.total or done) - self.n)

    def say(self, line: str) -> None:
        if not self.disable:
            self.write(line, file=stream())
