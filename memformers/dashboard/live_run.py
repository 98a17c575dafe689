"""One run, read from its folder while it is trained; each poll reads only what is new."""

import json
import math
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memformers.common.fields import fits
from memformers.runs.folder import CARD, CONFIG, FACTS, METRICS, RESULT, flatten
from memformers.runs.plan import Planned
from memformers.runs.settings import unused

Numbers = NDArray[np.float64]
TOKENS, SECONDS = "tokens", "seconds"
POINTS = 500
"""About the number of points that a chart can show."""
WAITING, RUNNING, FINISHED, STOPPED, FAILED, SILENT = (
    "waiting", "running", "finished", "stopped", "failed", "silent",
)  # fmt: skip
SILENT_SECONDS = 900.0
"""The time without a new record after which a run that has not ended may have died with its machine."""
STOPS = ("killed", "crashed: KeyboardInterrupt", "crashed: SystemExit")
"""The statuses on the card of a run that someone ended."""


@dataclass(frozen=True)
class Curve:
    """Points in the order of their tokens."""

    tokens: Numbers
    x: Numbers
    """The horizontal axis: the tokens, or the seconds."""
    y: Numbers


class LiveRun:
    """The run ``name`` of a comparison, in ``folder``, which may still be empty."""

    def __init__(self, folder: Path, name: str):
        self.name = name
        self.metrics = FollowedMetrics(folder / METRICS)
        self.files = {file: FollowedJson(folder / file) for file in (CARD, CONFIG, FACTS, RESULT)}
        self.version: tuple[Any, ...] = ()
        """A value that changes whenever anything that is shown changes."""
        self.values: dict[str, float] = {}
        self.curves: dict[tuple[str, str], Curve] = {}

    def update(self, planned: Planned | None) -> None:
        """Read the new contents; ``planned`` comes from the comparison."""
        self.metrics.update()
        for file in self.files.values():
            file.read()
        self.settings = self._settings()
        seed = planned.seed if planned else self.settings.get("seed")
        self.seed = seed if isinstance(seed, int) else None
        self.arm = planned.arm if planned else self.name
        self.state, self.why = self._state()
        seen = [json.seen for json in self.files.values()]
        version = (self.metrics.file, self.metrics.offset, self.state, self.arm, self.seed, *seen)
        if version != self.version:
            self.version, self.values, self.curves = version, self._values(), {}

    def _settings(self) -> dict[str, Any]:
        """Its settings by their dotted names, as they are used: None for those that its model doesn't use,
        without those that only a run that has begun can know."""
        config, facts = dict(flatten(self.files[CONFIG].data)), self.files[FACTS].data
        if not facts:
            known = [name for name in config if config[name] is not None and name != "model.vocab_size"]
            config = {name: config[name] for name in known}
        decided = facts.get("decided")
        used = config | (decided if isinstance(decided, dict) else {})
        return {name: used[name] for name in config} | dict.fromkeys(unused(config) & config.keys())

    @property
    def identity(self) -> str:
        """Its id in labml; empty before it has one."""
        return str(self.files[CARD].data.get("run", ""))

    @property
    def changed(self) -> float:
        """When it recorded last, or else began, in seconds since 1970; 0 if it has not begun."""
        return self.metrics.changed or number(self.files[CARD].data.get("started")) or 0.0

    def _state(self) -> tuple[str, str]:
        status = str(self.files[CARD].data.get("status", "")).strip()
        if status.startswith(STOPS):
            return STOPPED, status
        if status.startswith("crashed"):
            return FAILED, status.removeprefix("crashed: ")
        if status == "completed" or self.files[RESULT].data:
            return FINISHED, ""
        if not self.changed:
            return WAITING, ""
        if time.time() - self.changed > SILENT_SECONDS:
            return SILENT, "It was not ended, and it has recorded nothing for a long time."
        return RUNNING, ""

    def _values(self) -> dict[str, float]:
        """The numbers of its row in the table, as far as they exist."""
        facts, result = self.files[FACTS].data, self.files[RESULT].data
        names = ("loss.valid", "loss.train", "tokens_per_second")
        valid, train, speed = (self.metrics.points(name)[2] for name in names)
        last = {name: self.metrics.column(name)[-1:] for name in (TOKENS, SECONDS)}
        found = {
            "held_out": result.get("loss"),
            "bits_per_character": result.get("bits_per_character"),
            "valid": valid[-1] if len(valid) else None,
            "best": valid.min() if len(valid) else None,
            "train": train[-1] if len(train) else None,
            **{name: column[0] if len(column) else None for name, column in last.items()},
            "tokens_per_second": median_high(speed) if len(speed) else None,
            "parameters": facts.get("parameters"),
            "keys": facts.get("keys"),
            "peak_memory": result.get("peak_memory_bytes"),
        }
        return {name: value for name, said in found.items() if (value := number(said)) is not None}

    def curve(self, metric: str, over: str) -> Curve:
        """The ``metric`` over "tokens" or "seconds"."""
        if (metric, over) not in self.curves:
            tokens, seconds, values = self.metrics.points(metric)
            budget = number(self.settings.get(TOKENS)) or 0.0
            self.curves[metric, over] = thinned(
                Curve(tokens, seconds if over == SECONDS else tokens, values), budget
            )
        return self.curves[metric, over]

    def row(self, differing: Mapping[str, str]) -> dict[str, Any]:
        """Its row in the table, with the ``differing`` settings."""
        budget = number(self.settings.get(TOKENS))
        return {
            "name": self.name,
            "arm": self.arm,
            "seed": self.seed,
            "state": self.state,
            "why": self.why,
            "changed": self.changed,
            "progress": min(self.values.get(TOKENS, 0.0) / budget, 1.0) if budget else None,
            "values": self.values,
            "settings": {name: self.settings.get(name) for name in differing},
        }


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
        if not isinstance(record, dict) or not is_exact(record.get(TOKENS)):
            return
        for name, value in record.items():
            if is_exact(value):
                column = self.columns.setdefault(name, array("d"))
                column.extend([math.nan] * (self.rows - len(column)))
                column.append(value)
        self.rows += 1

    @property
    def names(self) -> list[str]:
        """The metrics, without those of the horizontal axes."""
        return [name for name in self.columns if name not in (TOKENS, SECONDS)]

    def column(self, name: str) -> Numbers:
        """A metric in every record, NaN if a record doesn't have it."""
        values = self.columns.get(name, array("d"))
        return np.pad(np.array(values, float), (0, self.rows - len(values)), constant_values=math.nan)

    def points(self, name: str) -> tuple[Numbers, Numbers, Numbers]:
        """Tokens, seconds and finite values of a metric: the last record of each number of tokens."""
        tokens, seconds, values = self.column(TOKENS), self.column(SECONDS), self.column(name)
        order = np.flatnonzero(np.isfinite(values) & np.isfinite(tokens))[::-1]
        kept = order[np.unique(tokens[order], return_index=True)[1]]
        return tokens[kept], seconds[kept], values[kept]


class FollowedJson:
    """The JSON object in ``path``, read again when it has changed; empty if it is missing or broken."""

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


def thinned(curve: Curve, budget: float) -> Curve:
    """About [`POINTS`][] points at most: each the mean of an interval, drawn at its last point.

    The intervals have the same length for all runs with the same number of tokens, the ``budget``, so that
    seeds which record at the same tokens keep points at the same tokens.
    """
    if len(curve.y) <= POINTS:
        return curve
    width = max(budget, float(curve.tokens[-1])) / POINTS
    stretch = np.ceil(curve.tokens / width)
    first = np.flatnonzero(np.diff(stretch, prepend=-1.0))
    last = np.append(first[1:], len(stretch)) - 1
    y = np.add.reduceat(curve.y, first) / (last - first + 1)
    return Curve(curve.tokens[last], curve.x[last], y)


def is_exact(value: Any) -> bool:
    """Whether a value from JSON is a number that a float can hold."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 53)


def number(value: Any) -> float | None:
    """A finite number; None for any other value, since a file may contain anything."""
    return float(value) if fits(value, float) and math.isfinite(value) else None
