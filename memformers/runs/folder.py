"""A run is a folder that holds everything about one training; its files, and its metrics read back:

config.json      the TrainConfig
run.json         corpus, parameters, hardware, versions, command, git commit
metrics.jsonl    every record, as it came
labml.json       what a dashboard knows it by
labml.log        what labml said
checkpoints/     from which it goes on after whatever happened; see memformers.training.checkpoints
sample.txt       text written at the end
result.json      the last evaluation, time, peak memory and the prompt of the sample
probe.json       what a probe measured; a comparison's is beside its runs' folders
"""

import contextlib
import json
import math
import os
import reprlib
import secrets
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memformers.common.errors import UserError
from memformers.common.files import check_utf8_name

CONFIG, FACTS, METRICS, CARD, LOG = "config.json", "run.json", "metrics.jsonl", "labml.json", "labml.log"
CHECKPOINTS, SAMPLE, RESULT, PROBE = "checkpoints", "sample.txt", "result.json", "probe.json"
EXPERIMENT = "experiment.json"
"""The plan of an experiment, in its folder."""
REPORT, PAGE, FIGURES = "report.md", "report.html", "figures"
RUNS = Path("runs")
"""Where new runs go."""
RESULTS, TABLE = "results.json", "results.csv"
"""The results of an experiment: over seeds, and of each training."""
OF_A_RUN = (CONFIG, FACTS, CARD, LOG, SAMPLE, RESULT, PROBE, REPORT, PAGE, RESULTS, TABLE)
OF_AN_EXPERIMENT = (PROBE, REPORT, PAGE, RESULTS, TABLE)
TOKENS, SECONDS = "tokens", "seconds"
"""The horizontal axes of curves: what is in every record of a run's metrics."""


def new_folder(name: str) -> Path:
    """A folder under runs/ that no other run has, even one that begins in the same second."""
    return RUNS / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(4)}-{name}"


def check_named(folder: Path) -> None:
    """Raise UserError for an empty name, which means the current folder, and for one that is not UTF-8."""
    check_utf8_name(folder)
    if folder == Path():
        raise UserError("out='' is the current folder; name a folder for the run.")


def check_nothing_is_lost(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError if ``folder`` already contains files with these ``names`` that no run has written."""
    if taken := [name for name in names if (folder / name).exists()]:
        raise UserError(
            f"{folder} has a {taken[0]} that no run wrote and that would be overwritten; name a new folder."
        )


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested dicts as pairs of dotted names and plain values, for labml's flat configs."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Dotted names as a reader sees them: the last part alone, where no other name ends in it."""
    names = list(names)
    last = Counter(name.rpartition(".")[2] for name in names)
    return {name: name if last[end := name.rpartition(".")[2]] > 1 else end for name in names}


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """All complete records of a run; a last line that a crash truncated is skipped. UserError for one that is
    broken."""
    metrics = Metrics(folder / METRICS)
    found = list(metrics.read())
    metrics.check()
    return found


Points = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]


class Metrics:
    """The records of the ``metrics.jsonl`` at ``path``, in columns; each [`read`][] adds what is new.

    A last line without its end is read later. Of a line, what is no exact number is left out, and a line
    without ``tokens`` altogether. A file that was shortened or replaced is read again from its beginning.
    """

    def __init__(self, path: Path):
        self.path = path
        self._forget(None)

    def _forget(self, file: tuple[int, int] | None) -> None:
        self._file, self.offset, self.lines, self.rows = file, 0, 0, 0
        self.changed = 0.0
        """The time of the last change of the file, in seconds since 1970."""
        self.broken = ""
        """What is wrong with the first line of which something was left out."""
        self._columns: dict[str, array[float]] = {}
        self._points: dict[tuple[str, str], Points] = {}

    def read(self) -> Iterator[dict[str, float]]:
        """The records that were appended since the last call, to be read to their end."""
        if not self.path.is_file():
            return self._forget(None)
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            place = status.st_dev, status.st_ino
            if self._file != place or status.st_size < self.offset:
                self._forget(place)
            self.changed = status.st_mtime
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return None
                self.lines += 1
                record = self._add(line)
                self.offset += len(line)
                if record is not None:
                    yield record

    def update(self) -> None:
        """Add what is new to the columns."""
        for _ in self.read():
            pass

    def check(self) -> None:
        """Raise UserError if a line was broken."""
        if self.broken:
            raise UserError(self.broken)

    def _add(self, line: bytes) -> dict[str, float] | None:
        data: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            data = json.loads(line)
        record = {k: v for k, v in data.items() if is_exact(v)} if isinstance(data, dict) else {}
        if TOKENS not in record or len(record) < len(data):
            text = reprlib.repr(line.decode(errors="replace"))
            place = f"{self.path}, line {self.lines:,}"
            self.broken = self.broken or f"{place}: expected a record, got {text}; remove the line."
        if TOKENS not in record:
            return None
        for name, value in record.items():
            column = self._columns.setdefault(name, array("d"))
            column.extend([math.nan] * (self.rows - len(column)))
            column.append(value)
        self.rows += 1
        self._points.clear()
        return record

    @property
    def names(self) -> list[str]:
        """The metrics, without those of horizontal axes."""
        return [name for name in self._columns if name not in (TOKENS, SECONDS)]

    def column(self, name: str) -> NDArray[np.float64]:
        """A metric in every record, NaN where a record doesn't have it."""
        values = np.array(self._columns.get(name, ()), float)
        return np.pad(values, (0, self.rows - len(values)), constant_values=math.nan)

    def points(self, name: str, over: str = TOKENS) -> Points:
        """Tokens, places on the axis ``over``, and finite values of a metric: the last record of each number
        of tokens."""
        if found := self._points.get((name, over)):
            return found
        tokens, places, values = self.column(TOKENS), self.column(over), self.column(name)
        order = np.flatnonzero(np.isfinite(values) & np.isfinite(tokens) & np.isfinite(places))[::-1]
        kept = order[np.unique(tokens[order], return_index=True)[1]]
        return self._points.setdefault((name, over), (tokens[kept], places[kept], values[kept]))


def is_exact(value: Any) -> bool:
    """Whether a value from JSON is a number that a float can hold."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 53)
