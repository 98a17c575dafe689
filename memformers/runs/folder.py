"""A run is a folder that holds everything about one training; ``docs/quick-start.md`` lists its files. An
experiment is a folder with a plan, ``experiment.json``, and the folders of its runs.
"""

import contextlib
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from memformers.common.errors import UserError
from memformers.common.files import locked

# The files of a run
CONFIG = "config.json"
FACTS = "run.json"
METRICS = "metrics.jsonl"
COLUMNS = ".metrics.safetensors"
"""The numbers in a long ``metrics.jsonl``, which load faster."""
CARD = "labml.json"
LOG = "labml.log"
CHECKPOINTS = "checkpoints"
SAMPLE = "sample.txt"
RESULT = "result.json"
PROBE = "probe.json"
LOCK = ".lock"

# The files of an experiment, and of reports
EXPERIMENT = "experiment.json"
REPORT = "report.md"
PAGE = "report.html"
FIGURES = "figures"
RESULTS = "results.json"
TABLE = "results.csv"
REPORTED = ".report"
"""An empty file that marks a folder's report as memformers' own, so that it may be replaced."""
RUNS = Path("runs")
"""Where new runs go."""

OF_A_RUN = (CONFIG, FACTS, CARD, LOG, SAMPLE, RESULT, PROBE, REPORT, PAGE, RESULTS, TABLE)
OF_AN_EXPERIMENT = (PROBE, REPORT, PAGE, RESULTS, TABLE)
UNTOUCHED = "untouched"
"""The name of the unmodified memory beside those of controls, in results."""
PLACES = ("segment", "memory", "slots", "beyond")
"""Where a value of a recall stream can be when it is asked for: in the segment that is read, in the memory,
in a slot, or beyond what one layer sees. If layers have different lengths, the longest memory counts."""


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
    last_parts = {name: name.rpartition(".")[2] for name in names}
    counts = Counter(last_parts.values())
    return {name: last if counts[last] == 1 else name for name, last in last_parts.items()}
