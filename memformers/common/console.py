"""Text for a terminal: numbers with their nouns, durations, safe characters, and progress."""

import sys
import threading
from typing import Any, TextIO

from tqdm import tqdm


def counted(number: int, noun: str) -> str:
    """The number with its ``noun``, whose plural ends in s: "1 document", "2,000 documents"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """Seconds in words: "90 s", "12 min", "3.5 h"."""
    if seconds / 60 < 2:
        return f"{seconds:.0f} s"
    if seconds / 3600 < 2:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def printable(text: str) -> str:
    """``text`` with U+FFFD instead of characters that could control a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def stream() -> TextIO:
    """Where progress goes: standard error, or in a notebook, which shows that as errors, standard output."""
    return sys.stdout if type(sys.stderr).__module__.startswith("ipykernel") else sys.stderr


REDRAWN_SECONDS = 0.5
"""Between two drawings of a bar whose work reports nothing: its clock then moves at least once a second."""


class Progress(tqdm):  # type: ignore[type-arg]
    """A progress bar, in a terminal; a log gets only what ``say`` says, unless it is ``hidden``. Close it, or
    use it as a context."""

    def __init__(self, hidden: bool = False, **options: Any):
        self.hidden = hidden
        self.is_closing = threading.Event()
        self.clock: threading.Thread | None = None
        super().__init__(miniters=0, disable=hidden or not stream().isatty(), **options)
        # tqdm draws only at a call that reports progress.
        if not self.disable:
            self.clock = threading.Thread(target=self.keep_drawing, daemon=True)
            self.clock.start()

    def keep_drawing(self) -> None:
        while not self.is_closing.wait(REDRAWN_SECONDS):
            self.refresh()

    def refresh(self, nolock: bool = False, lock_args: Any = None) -> Any:
        """Draw the bar. tqdm's own method leaves its lock locked, for all bars of other threads, if a signal
        raises an exception while it draws."""
        if nolock or lock_args or self.disable:
            return super().refresh(nolock, lock_args)
        with self.get_lock():
            self.display()
        return True

    def close(self) -> None:
        self.is_closing.set()
        if self.clock:
            self.clock.join(timeout=1.0)  # so that it draws nothing below the finished bar
        super().close()

    def show(self, words: str, done: float | None = None) -> None:
        """Show ``words`` behind the bar, and how much is ``done``; drawn a few times a second at most."""
        self.set_postfix_str(words, refresh=False)  # move_to draws
        self.move_to(self.n if done is None else done)

    def move_to(self, done: float) -> None:
        """Show how much is ``done``, with the same words."""
        self.update(min(done, self.total or done) - self.n)

    def say(self, line: str) -> None:
        if not self.hidden:
            self.write(line, file=stream())
