"""How far a long work is."""

import os
import sys
from typing import Any

from tqdm import tqdm


class Progress(tqdm):  # type: ignore[type-arg]
    """A progress bar; where standard error is not a terminal but a log, a line for each tenth of the total
    instead, or one line at the end if the total is not known."""

    def __init__(self, **options: Any):
        self.in_log = not sys.stderr.isatty()
        self.tenth = 10
        if self.in_log:
            options["file"] = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            if options.get("total"):
                options["bar_format"] = "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt}{postfix}"
        super().__init__(**options)
        self.tenth = self._tenths()

    def _tenths(self) -> int:
        return int(10 * self.n / self.total) if self.total else 0

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Draw the bar, or write the line if it is due."""
        if not self.in_log:
            super().display(msg, pos)
        elif self._tenths() > self.tenth:
            self.tenth = self._tenths()
            print(self, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the bar, where it stands."""
        if self.in_log and not self.disable and not self.total:
            print(self, file=sys.stderr, flush=True)
        super().close()
