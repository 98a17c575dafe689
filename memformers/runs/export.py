"""Runs, copied from their folders to TensorBoard and wandb, which are imported only here."""

import importlib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.runs.folder import TOKENS, read_metrics
from memformers.runs.reader import Run, find_runs, finite_number


def start_copy(to: str, run: Run, folder: Path) -> tuple[Callable[..., object], Callable[[], object]]:
    """What adds values at a number of tokens to the tracker ``to``, and what ends it."""
    try:
        tracker: Any = importlib.import_module("wandb" if to == "wandb" else "tensorboard.summary")
    except ImportError as error:
        raise UserError(f"{to} is not installed ({error}): pip install {to}") from None
    if to == "tensorboard":
        writer = tracker.Writer(str(folder))
        return lambda values, step: [writer.add_scalar(n, x, step) for n, x in values.items()], writer.close
    folder.mkdir(parents=True, exist_ok=True)  # where WANDB_MODE=offline keeps it
    copy = tracker.init(
        project="memformers", name=run.folder.name, group=run.folder.parent.name, id=run.identity or None,
        config=run.settings, dir=str(folder), resume="allow", reinit="create_new",
    )  # fmt: skip
    return copy.log, copy.finish


def export(folders: Sequence[Path], to: str, out: Path | None = None) -> int:
    """Copy the runs in ``folders`` to a tracker, into a folder of its name in each run's, or into one per run
    in ``out``; returns their number."""
    runs = [Run(path) for path in dict.fromkeys(p.resolve() for f in folders for p in find_runs(f))]
    shared = Path(os.path.commonpath([run.folder.parent for run in runs]))
    copies = {run: out / run.folder.relative_to(shared) if out else run.folder / to for run in runs}
    if to == "tensorboard" and (existing := [copy for copy in copies.values() if copy.exists()]):
        raise UserError(f"{existing[0]} exists already; remove it, or name another --out.")
    for run, copy in copies.items():
        log, finish = start_copy(to, run, copy)
        for record in read_metrics(run.folder):
            log({n: v for n, v in record.items() if n != TOKENS and math.isfinite(v)}, int(record[TOKENS]))
        final = {name: finite_number(value) for name, value in (run.result or {}).items()}
        log({f"final.{n}": v for n, v in final.items() if v is not None}, int(run.last(TOKENS) or 0))
        finish()
    return len(runs)
