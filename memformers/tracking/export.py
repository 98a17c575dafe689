"""Finished runs, copied from their folders to other trackers."""

import os
from collections.abc import Sequence
from pathlib import Path

from memformers.common.errors import UserError
from memformers.runs.metrics import TOKENS, read_metrics
from memformers.runs.reader import Run, find_runs, finite_number
from memformers.tracking.trackers import TRACKERS, Tracker, split_record


def export(folders: Sequence[Path], to: str, out: Path | None = None) -> int:
    """Copy the runs in ``folders`` to a tracker, into a folder of its name in each run's, or into one per run
    in ``out``; returns their number."""
    # Which runs
    paths: dict[Path, None] = {}  # an ordered set
    for folder in folders:
        for path in find_runs(folder):
            paths[path.resolve()] = None
    runs = [Run(path) for path in paths]

    # Where to
    shared = Path(os.path.commonpath([run.folder.parent for run in runs]))
    copies: dict[Run, Path] = {}
    for run in runs:
        copies[run] = out / run.folder.relative_to(shared) if out else run.folder / to
        if to == "tensorboard" and copies[run].exists():
            raise UserError(f"{copies[run]} exists already; remove it, or name another --out.")

    for run, copy in copies.items():
        group = run.folder.parent.name
        copy_run(run, TRACKERS[to](run.folder.name, group, run.identity, run.settings, copy))
    return len(runs)


def copy_run(run: Run, tracker: Tracker) -> None:
    """Every record of a run, and its result at the last one's tokens."""
    for record in read_metrics(run.folder):
        tracker.log(*split_record(record))
    final = {}
    for name, value in (run.result or {}).items():
        number = finite_number(value)
        if number is not None:
            final[f"final.{name}"] = number
    tracker.log(final, int(run.last(TOKENS) or 0))
    tracker.finish()
