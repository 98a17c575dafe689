"""``memformers export``: runs in other trackers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from memformers.common.fields import Checked
from memformers.runs.export import export


@dataclass(frozen=True)
class Export(Checked):
    """Copy runs to TensorBoard, wandb, Trackio or CSV, afterwards or while they are trained.

    Example: memformers export runs/… --to tensorboard
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folders of runs or comparisons."""
    to: Literal["tensorboard", "wandb", "trackio", "csv"]
    """The tracker, which must be installed; wandb's own settings are taken from its environment variables."""
    out: Path | None = None
    """Where TensorBoard's, wandb's or the CSV files go; by default into the runs' folders, and for wandb into
    the current one."""
    follow: bool = False
    """Stay, and copy what is recorded, until all runs have ended."""

    def run(self) -> None:
        """Copy them, then say how many."""
        number = export(self.runs, self.to, self.out, follow=self.follow)
        print(f"exported to {self.to}: {number} run{'s' * (number != 1)}")
