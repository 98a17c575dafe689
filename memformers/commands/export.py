"""``memformers export``: runs in other trackers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from memformers.common.console import counted
from memformers.common.fields import Checked
from memformers.tracking.export import export


@dataclass(frozen=True)
class Export(Checked):
    """Copy runs to TensorBoard, wandb or trackio.

    Example: memformers export runs/… --to tensorboard
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folders of runs or comparisons."""
    to: Literal["tensorboard", "wandb", "trackio"]
    """The tracker, which must be installed; wandb reads its settings from its environment variables."""
    out: Path | None = None
    """Where the files go, a folder for each run; by default into the runs' folders."""

    def run(self) -> None:
        number = export(self.runs, self.to, self.out)
        print(f"exported to {self.to}: {counted(number, 'run')}")
