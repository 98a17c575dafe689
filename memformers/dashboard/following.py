"""Reads a run's files while they grow; each poll reads only the new part."""

import json
import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
STEP, SECONDS = "tokens", "seconds"


class FollowedMetrics:
    """The records of ``metrics.jsonl`` at ``path``, in columns.

    A last line without its end is read later, and a line that is not a record is left out. A file that was
    shortened or replaced, as by a resumed training, is read again from its beginning.
    """

    def __init__(self, path: Path):
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.file: tuple[int, int] | None = None
        """The device and the inode of the file that was read."""
        self.offset = 0
        self.changed = 0.0
        """The time of the last change of the file, in seconds since 1970."""
        self.rows = 0
        self.columns: dict[str, array[float]] = {}

    def update(self) -> None:
        """Read what was appended since the last call; a file that is missing has no records."""
        try:
            with open(self.path, "rb") as file:
                status = self.path.stat()
                if self.file != (status.st_dev, status.st_ino) or status.st_size < self.offset:
                    self._forget()
                    self.file = (status.st_dev, status.st_ino)
                self.changed = status.st_mtime
                file.seek(self.offset)
                new = file.read()
        except OSError:
            self._forget()
            return
        whole = new[: new.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.splitlines():
            self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(record, dict) or not _is_number(record.get(STEP)):
            return
        for name, value in record.items():
            if _is_number(value):
                column = self.columns.setdefault(name, array("d"))
                column.extend([math.nan] * (self.rows - len(column)))
                column.append(value)
        self.rows += 1

    @property
    def names(self) -> list[str]:
        """The metrics, without those of the horizontal axes."""
        return [name for name in self.columns if name not in (STEP, SECONDS)]

    def column(self, name: str) -> Numbers:
        """A metric in every record, NaN if a record doesn't have it."""
        values = self.columns.get(name, array("d"))
        return np.pad(np.array(values, float), (0, self.rows - len(values)), constant_values=math.nan)

    def points(self, name: str) -> tuple[Numbers, Numbers, Numbers]:
        """Tokens, seconds and values of the records in which the metric ``name`` is finite; the last record
        of each number of tokens."""
        tokens, seconds, values = self.column(STEP), self.column(SECONDS), self.column(name)
        order = np.flatnonzero(np.isfinite(values) & np.isfinite(tokens))[::-1]
        kept = order[np.unique(tokens[order], return_index=True)[1]]
        return tokens[kept], seconds[kept], values[kept]


class FollowedJson:
    """The JSON object in ``path``, read again when the file has changed; empty if the file is missing or
    broken."""

    def __init__(self, path: Path):
        self.path = path
        self.seen: tuple[int, int, int] | None = None
        self.data: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """The current contents of the file."""
        try:
            status = self.path.stat()
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            if seen != self.seen:
                data = json.loads(self.path.read_text(encoding="utf-8"))
                self.seen, self.data = seen, data if isinstance(data, dict) else {}
        except (OSError, ValueError, RecursionError):
            self.seen, self.data = None, {}
        return self.data


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 53)
