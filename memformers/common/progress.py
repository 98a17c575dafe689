"""How far a long work is."""

import os
import sys
from typing import Any, TextIO

from tqdm import tqdm


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
        """Draw the bar, or write the line if it is due."""
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
        """Print a line above the bar; nothing if the bar isn't shown."""
        if not self.disable:
            self.write(line, file=stream())
