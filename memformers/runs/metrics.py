"""The metrics of a run, ``metrics.jsonl``: one JSON object per line, appended while the run trains."""

import contextlib
import json
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memformers.common.errors import UserError
from memformers.runs.folder import METRICS

TOKENS = "tokens"
SECONDS = "seconds"
"""The horizontal axes of curves, which every record has."""
LARGEST_EXACT_INT = 1 << 53
"""Up to here, a float holds every whole number."""

Points = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
"""Tokens, places on the horizontal axis, and values of a curve, ``[n]`` each."""
EMPTY: Points = (np.empty(0), np.empty(0), np.empty(0))


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """All records of a run but a last line that a crash truncated; UserError for a broken one."""
    metrics = Metrics(folder / METRICS)
    records = metrics.read()
    metrics.check()
    return records


class Metrics:
    """The curves of the ``metrics.jsonl`` at ``path``; each [`read`][] adds the new records. A line without
    its end is read later, one without ``tokens`` is skipped, and values that are not exact numbers are left
    out. A file that was shortened or replaced is read again from its start."""

    def __init__(self, path: Path):
        self.path = path
        self.forget(None)

    def forget(self, inode: tuple[int, int] | None) -> None:
        """Start at the first line of the file with this ``inode``; None if there is none."""
        self.inode = inode
        self.offset = 0
        """How many bytes have been read."""
        self.n_lines = 0
        self.n_records = 0
        self.columns: dict[str, NDArray[np.float64]] = {}
        """The value of each metric, the axes included, in each record, ``[n_records]``; NaN where it is
        missing."""
        self.changed = 0.0
        """When the file changed last, in seconds since 1970."""
        self.broken = ""
        """What is wrong with the first broken line."""
        self.known_points: dict[tuple[str, str], Points] = {}

    def read(self) -> list[dict[str, float]]:
        """The records that were appended since the last call."""
        if not self.path.is_file():
            self.forget(None)
            return []
        records = []
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            inode = (status.st_dev, status.st_ino)
            if self.inode != inode or status.st_size < self.offset:
                self.forget(inode)
            self.changed = status.st_mtime
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    continue
                record = self.parse(line)
                if TOKENS in record:
                    records.append(record)
        if records:
            self.append(records)
        return records

    def check(self) -> None:
        """Raise UserError if a line is broken."""
        if self.broken:
            raise UserError(self.broken)

    def parse(self, line: bytes) -> dict[str, float]:
        """The exact numbers in the next line."""
        self.offset += len(line)
        self.n_lines += 1
        data: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            data = json.loads(line)
        if not isinstance(data, dict):
            data = {}
        record = {name: value for name, value in data.items() if is_exact(value)}
        if (TOKENS not in record or len(record) < len(data)) and not self.broken:
            text = reprlib.repr(line.decode(errors="replace"))
            self.broken = (
                f"{self.path}, line {self.n_lines:,}: expected a record, got {text}; remove the line."
            )
        return record

    def append(self, records: Sequence[Mapping[str, float]]) -> None:
        """Add ``records`` to the columns."""
        names = set(self.columns).union(*records)
        missing = np.full(self.n_records, np.nan)
        for name in names:
            values = [record.get(name, math.nan) for record in records]
            self.columns[name] = np.append(self.columns.get(name, missing), values)
        self.n_records += len(records)
        self.known_points.clear()

    @property
    def names(self) -> set[str]:
        """The names of all metrics, without the axes."""
        return self.columns.keys() - {TOKENS, SECONDS}

    def points(self, name: str, over: str = TOKENS) -> Points:
        """The curve of a metric ``over`` an axis: finite values, the last record of each number of tokens."""
        known = self.known_points.get((name, over))
        if known:
            return known
        if not {TOKENS, over, name} <= self.columns.keys():
            return EMPTY
        columns = [self.columns[axis] for axis in (TOKENS, over, name)]
        is_point = np.isfinite(columns).all(axis=0)
        tokens, places, values = (column[is_point] for column in columns)

        # In order of tokens, and of records where tokens are the same, of which the last one counts
        order = np.argsort(tokens, kind="stable")
        tokens = tokens[order]
        is_last = np.ones(len(tokens), bool)
        is_last[:-1] = tokens[1:] > tokens[:-1]
        points = (tokens[is_last], places[order][is_last], values[order][is_last])
        self.known_points[name, over] = points
        return points


def is_exact(value: Any) -> bool:
    """Whether ``value`` is a number that a float holds exactly; True and False are none."""
    return isinstance(value, float) or (type(value) is int and abs(value) < LARGEST_EXACT_INT)
