"""A run is a folder that holds everything about one training; ``docs/quick-start.md`` lists its files. An
experiment is a folder with a plan, ``experiment.json``, and the folders of its runs.
"""

import contextlib
import json
import math
import os
import reprlib
import secrets
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from memformers.common.errors import UserError
from memformers.common.files import config_from_dict, locked, read_json, write_json

CONFIG, FACTS, METRICS, CARD, LOG = "config.json", "run.json", "metrics.jsonl", "labml.json", "labml.log"
CHECKPOINTS, SAMPLE, RESULT, PROBE, LOCK = "checkpoints", "sample.txt", "result.json", "probe.json", ".lock"
EXPERIMENT = "experiment.json"
REPORT, PAGE, FIGURES = "report.md", "report.html", "figures"
REPORTED = ".report"
"""An empty file in a folder whose report may be replaced, since memformers wrote it."""
RUNS = Path("runs")
"""Where new runs go."""
RESULTS, TABLE = "results.json", "results.csv"
OF_A_RUN = (CONFIG, FACTS, CARD, LOG, SAMPLE, RESULT, PROBE, REPORT, PAGE, RESULTS, TABLE)
OF_AN_EXPERIMENT = (PROBE, REPORT, PAGE, RESULTS, TABLE)
UNTOUCHED = "untouched"
"""The name of the unmodified memory beside those of controls, in results."""
PLACES = ("segment", "memory", "slots", "beyond")
"""Where a value of a recall stream can be when it is asked for: in the segment that is read, in the memory,
in a slot, or beyond what one layer sees. Of layers with other lengths, those that remember most count."""
TOKENS, SECONDS = "tokens", "seconds"
"""The horizontal axes of curves, which every record has."""


def new_folder(name: str) -> Path:
    return RUNS / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(4)}-{name}"


def is_experiment(folder: Path) -> bool:
    """Whether ``folder`` holds an experiment, or several in its sub-folders."""
    return any(folder.glob(EXPERIMENT)) or any(folder.glob(f"*/{EXPERIMENT}"))


def newest_experiment(name: str) -> Path:
    """The experiment in ``runs/`` that began or continued last, of those in folders for this ``name``."""
    plans = [*RUNS.glob(f"*-{name}/{EXPERIMENT}"), *RUNS.glob(f"*-{name}/*/{EXPERIMENT}")]
    if not plans:
        raise UserError(f"{RUNS} holds no {name} to resume; name the experiment to resume as --out.")
    newest = max(plans, key=lambda plan: plan.stat().st_mtime)
    return RUNS / newest.relative_to(RUNS).parts[0]


def check_named(folder: Path) -> None:
    str(folder).encode()  # UnicodeError for a name in which safetensors can write files, but not read them
    if folder == Path():
        raise UserError("out is the current folder; name a folder for the run.")


def refuse_overwrite(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        if (folder / name).exists():
            raise UserError(
                f"{folder} has a {name} that memformers didn't write and that would be overwritten; rename "
                f"it, or name a new folder."
            )


def check_report(folder: Path) -> None:
    if not (folder / REPORTED).exists():
        refuse_overwrite(folder, (REPORT, PAGE, FIGURES, RESULTS, TABLE))


@contextlib.contextmanager
def alone_in(folder: Path, seconds: float = 1.0) -> Iterator[None]:
    """A block in which no other process trains in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = locked(folder / LOCK, seconds)
    except Timeout:
        raise UserError(f"{folder} is being trained by another process.") from None
    with lock:
        yield


def in_use(folder: Path) -> bool:
    """Whether a process trains in ``folder``. However it ends, the system frees its lock."""
    try:
        if (folder / LOCK).exists():
            with FileLock(folder / LOCK, timeout=0):
                pass
    except (Timeout, NotImplementedError):  # it is locked, or the file system has no locks that would tell
        return True
    except OSError:
        pass
    return False


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and plain values of nested dicts."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Dotted names, each shortened to its last part where no other name ends in the same."""
    names = list(names)
    last = Counter(name.rpartition(".")[2] for name in names)
    return {name: name if last[end := name.rpartition(".")[2]] > 1 else end for name in names}


@dataclass(frozen=True)
class Card:
    """What a dashboard shows of a run besides its metrics: ``labml.json`` in its folder. Times are in seconds
    since 1970, and 0 before the run starts."""

    comment: str
    """The line below the name, which the search also covers."""
    name: str = ""
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The id, the same in every session of the run, so that all sessions form one curve."""
    launched: float = 0.0
    """When an experiment started its process for the first time; 0 if none did."""
    started: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)
    status: str = ""
    """How the run ended, such as "completed"; empty while it runs."""
    ended: float = 0.0


def open_card(folder: Path, name: str, config: Mapping[str, Any]) -> Card:
    """The card of a training that starts or continues, without settings that its model doesn't use."""
    card, unused = known_card(folder) or Card(folder.resolve().name), ["unused", *config.get("unused", ())]
    used = {name: value for name, value in config.items() if name not in unused}
    started = card.started or time.time()
    card = replace(card, name=card.name or name, started=started, config=used, status="")
    write_json(folder / CARD, card)
    return card


def note_launch(folder: Path) -> None:
    """Note that an experiment starts the process of the run in ``folder`` now, unless it has begun before."""
    card = known_card(folder)
    if card and not card.started:
        write_json(folder / CARD, replace(card, launched=time.time()))


def close_card(folder: Path, status: str) -> None:
    write_json(folder / CARD, replace(read_card(folder), status=status, ended=time.time()))


def read_card(folder: Path) -> Card:
    return config_from_dict(Card, read_json(folder / CARD), str(folder / CARD))


def known_card(folder: Path) -> Card | None:
    """The card of the run in ``folder``; None, with a warning if it is broken, where there is none."""
    try:
        return read_card(folder) if (folder / CARD).exists() else None
    except UserError as error:
        warnings.warn(f"{error} Dashboards will show this run as a new one.", stacklevel=2)
        return None


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """All records of a run but a last line that a crash truncated; UserError for a broken one."""
    metrics = Metrics(folder / METRICS)
    metrics.read()
    metrics.check()
    return metrics.records


Points = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]


class Metrics:
    """The records of the ``metrics.jsonl`` at ``path``; each [`read`][] adds what is new. A line without its
    end is read later, one without ``tokens`` is skipped, and values that are not exact numbers are left out.
    A file that was shortened or replaced is read again from its start."""

    def __init__(self, path: Path):
        self.path = path
        self._forget(None)

    def _forget(self, file: tuple[int, int] | None) -> None:
        self._file, self.offset, self.lines = file, 0, 0
        self.records: list[dict[str, float]] = []
        self.changed = 0.0
        """When the file changed last, in seconds since 1970."""
        self.broken = ""
        """What is wrong with the first broken line."""
        self._points: dict[tuple[str, str], Points] = {}

    def read(self) -> list[dict[str, float]]:
        """The records that were appended since the last call."""
        if not self.path.is_file():
            self._forget(None)
            return []
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            inode = status.st_dev, status.st_ino
            if self._file != inode or status.st_size < self.offset:
                self._forget(inode)
            self.changed, before = status.st_mtime, len(self.records)
            file.seek(self.offset)
            for line in file:
                if line.endswith(b"\n"):
                    self._add(line)
        return self.records[before:]

    def check(self) -> None:
        if self.broken:
            raise UserError(self.broken)

    def _add(self, line: bytes) -> None:
        self.offset, self.lines = self.offset + len(line), self.lines + 1
        data: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            data = json.loads(line)
        data = data if isinstance(data, dict) else {}
        exact = (k for k, v in data.items() if isinstance(v, float) or (type(v) is int and abs(v) < 1 << 53))
        record = {name: data[name] for name in exact}
        if TOKENS not in record or len(record) < len(data):
            text = reprlib.repr(line.decode(errors="replace"))
            where = f"{self.path}, line {self.lines:,}"
            self.broken = self.broken or f"{where}: expected a record, got {text}; remove the line."
        if TOKENS in record:
            self.records.append(record)
            self._points.clear()

    @property
    def names(self) -> set[str]:
        return {name for record in self.records for name in record} - {TOKENS, SECONDS}

    def points(self, name: str, over: str = TOKENS) -> Points:
        """Tokens, places on the axis ``over``, and finite values of a metric: the last record of each number
        of tokens."""
        if known := self._points.get((name, over)):
            return known
        rows = [[record.get(n, math.nan) for n in (TOKENS, over, name)] for record in self.records]
        newest = {row[0]: row for row in rows if all(map(math.isfinite, row))}
        table = np.array(sorted(newest.values()), float).reshape(-1, 3)
        return self._points.setdefault((name, over), (table[:, 0], table[:, 1], table[:, 2]))
