"""Runs, copied from their folders to other trackers, once or as they grow; each is imported only here."""

import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.common.files import csv_text, write_text
from memformers.runs.folder import METRICS, TOKENS, Metrics
from memformers.runs.reader import PLANNED, RUNNING, Run, find_runs, number

POLL_SECONDS = 2.0
PROJECT = "memformers"
"""What wandb and Trackio call the place of all runs."""
Values = Mapping[str, float]
Copy = Any
"""A run in another tracker: ``log(values, step)`` adds values at a number of tokens, ``finish()`` ends it."""


class TensorBoard:
    """Event files in a folder called ``tensorboard`` in the run's, or of the run's name in ``out``."""

    def __init__(self, run: Run, out: Path | None):
        folder = out / run.folder.name if out else run.folder / "tensorboard"
        if folder.exists():
            raise UserError(f"{folder} is there already; remove it, or name another --out.")
        self.writer = imported("tensorboard.summary").Writer(str(folder))

    def log(self, values: Values, step: int) -> None:
        """Add values at a step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """End the file."""
        self.writer.close()


class Csv:
    """A table with a row for each number of tokens: ``metrics.csv`` in the run's folder, or of the run's name
    in ``out``."""

    def __init__(self, run: Run, out: Path | None):
        self.path = out / f"{run.folder.name}.csv" if out else run.folder / "metrics.csv"
        self.rows: dict[int, dict[str, float]] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, values: Values, step: int) -> None:
        """Add values at a step."""
        self.rows.setdefault(step, {}).update(values)

    def finish(self) -> None:
        """Write the table."""
        names = sorted({name for row in self.rows.values() for name in row})
        rows = [[step, *(row.get(name) for name in names)] for step, row in sorted(self.rows.items())]
        write_text(self.path, csv_text([TOKENS, *names], rows))


def wandb(run: Run, out: Path | None) -> Copy:
    """A run of wandb's, under the id that the run has in labml; ``WANDB_MODE=offline`` keeps it here."""
    group = run.folder.resolve().parent.name
    return imported("wandb").init(
        project=PROJECT, name=run.folder.name, id=run.identity or None, group=group, config=run.settings,
        dir=out and str(out), resume="allow", reinit="create_new",
    )  # fmt: skip


def trackio(run: Run, out: Path | None) -> Copy:
    """A run in Trackio's local database, which ``TRACKIO_DIR`` may place."""
    config = {name: value for name, value in run.settings.items() if value is not None}
    group = run.folder.resolve().parent.name
    return imported("trackio").init(project=PROJECT, name=run.folder.name, group=group, config=config)


TRACKERS: dict[str, Callable[[Run, Path | None], Copy]] = {
    "tensorboard": TensorBoard, "wandb": wandb, "trackio": trackio, "csv": Csv,
}  # fmt: skip


def imported(name: str) -> Any:
    """The module of a tracker; UserError where it isn't installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"{package} is not installed ({error}): pip install {package}") from None


def export(folders: Sequence[Path], to: str, out: Path | None = None, *, follow: bool = False) -> int:
    """Copy the runs in ``folders`` to a tracker, with ``follow`` until all of them have ended; returns their
    number. UserError for a folder without runs, a tracker that isn't installed, and event files that are
    there already."""
    runs = [Run(place) for folder in folders for place in find_runs(folder)]
    waiting = [(run, Metrics(run.folder / METRICS), TRACKERS[to](run, out)) for run in runs]
    while waiting:
        for each in list(waiting):
            run, metrics, copy = each
            run.update()
            is_over = not follow or run.state[0] not in (PLANNED, RUNNING)
            for record in metrics.read():
                values = {n: v for n, v in record.items() if n != TOKENS and math.isfinite(v)}
                copy.log(values, int(record[TOKENS]))
            if is_over:
                final = {f"final.{n}": value for n, v in (run.result or {}).items() if (value := number(v))}
                copy.log(final, int(run.last(TOKENS) or 0))
                copy.finish()
                waiting.remove(each)
        if waiting:
            time.sleep(POLL_SECONDS)
    return len(runs)
