"""A run is a folder that holds everything about one training, and this is how its files are read back:

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
import reprlib
import secrets
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.common.fields import fits
from memformers.common.files import check_utf8_name, config_from_dict, read_json, write_json

CONFIG, FACTS, METRICS, CARD, LOG = "config.json", "run.json", "metrics.jsonl", "labml.json", "labml.log"
CHECKPOINTS, SAMPLE, RESULT, PROBE = "checkpoints", "sample.txt", "result.json", "probe.json"
EXPERIMENT = "experiment.json"
"""The plan of an experiment, in its folder."""
REPORT, PAGE, FIGURES = "report.md", "report.html", "figures"
RUNS = Path("runs")
"""Where new runs go."""
RESULTS, TABLE, TEX = "results.json", "results.csv", "results.tex"
"""The results of an experiment: over seeds, of each training, and the table of its report for LaTeX."""
OF_A_RUN = (CONFIG, FACTS, CARD, LOG, SAMPLE, RESULT, PROBE, REPORT, PAGE, TABLE, TEX)
OF_AN_EXPERIMENT = (PROBE, REPORT, PAGE, RESULTS, TABLE, TEX)


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
    path = folder / METRICS
    if not path.exists():
        return []
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = enumerate(file, 1)
        return [record_of(line, f"{path}, line {n}") for n, line in lines if line.endswith("\n")]


def record_of(line: str, source: str) -> dict[str, float]:
    """The record in a ``line`` of metrics; UserError, with its ``source``, for anything else."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if fits(record, dict[str, float]) and "tokens" in record:
            return dict(record)
    raise UserError(f"{source}: expected a record of a training, got {reprlib.repr(line)}; remove the line.")


@dataclass(frozen=True)
class Card:
    """What a dashboard shows of a run besides its metrics: ``labml.json`` in its folder."""

    run: str
    """Its id: the same in every session of the run, so that all sessions form one curve."""
    comment: str
    """The line below the name, which the search also covers."""
    compare_with: str = ""
    """The id of the run with which labml's comparison shows this one; empty for none."""
    name: str = ""
    """Empty until the training chooses one."""
    started: float = 0.0
    """In seconds since 1970, as are all times here; 0 before it starts."""
    config: dict[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    """Of its settings, those that the user chose."""
    status: str = ""
    """How it ended, such as "completed"; empty while it runs."""
    ended: float = 0.0


def new_run_id() -> str:
    """An id that no other run has."""
    return uuid.uuid4().hex


def plan_run(folder: Path, run: str, comment: str, compare_with: str, name: str = "") -> None:
    """Write how the dashboard will show a training before it starts, which may choose the ``name`` itself."""
    write_json(folder / CARD, asdict(Card(run, comment, compare_with, name)))


def open_card(folder: Path, name: str, config: Mapping[str, Any], given: Sequence[str] = ()) -> Card:
    """The card of a training that starts or goes on in ``folder``; the user chose the ``given`` settings."""
    card = known_card(folder) or Card(new_run_id(), folder.resolve().name)
    card = replace(
        card,
        name=card.name or name,
        started=card.started or time.time(),
        config=dict(config),
        given=tuple(given),
        status="",
    )
    write_json(folder / CARD, asdict(card))
    return card


def close_card(folder: Path, status: str) -> None:
    """Write how the run in ``folder`` ended."""
    write_json(folder / CARD, asdict(replace(read_card(folder), status=status, ended=time.time())))


def read_card(folder: Path) -> Card:
    """The card of the run in ``folder``; ValueError if it can't be read."""
    return config_from_dict(Card, read_json(folder / CARD), str(folder / CARD))


def known_card(folder: Path) -> Card | None:
    """The card of the run in ``folder``; None if it has none, or one that can't be read, which is a warning,
    since only a dashboard needs it."""
    try:
        return read_card(folder) if (folder / CARD).exists() else None
    except UserError as error:
        warnings.warn(f"{error} The run is another one for dashboards.", stacklevel=2)
        return None


def run_folders(folder: Path) -> list[Path]:
    """All folders with a run's metrics: ``folder``, those in it, and those in these."""
    patterns = (METRICS, f"*/{METRICS}", f"*/*/{METRICS}")
    return [path.parent for pattern in patterns for path in sorted(folder.glob(pattern))]


def find_runs(folder: Path) -> list[Path]:
    """All runs in ``folder``, be it a run, a comparison, or a folder of these, in the order in which they
    were started; ValueError if none."""
    if runs := run_folders(folder):
        cards = {run: known_card(run) for run in runs}
        return sorted(runs, key=lambda run: card.started if (card := cards[run]) else 0.0)
    raise UserError(f"{folder} holds no run: no {METRICS} in it or in its sub-folders.")
