"""``memformers compare``: several models, trained alike."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from memformers.commands.options import FIRST_OF_TRAINING, ExperimentCommand
from memformers.comparison.text import CompareConfig, compare
from memformers.report.rendering import Report


@dataclass(frozen=True)
class Compare(ExperimentCommand):
    """Train several models with the same settings, one after the other, and write a report.

    Example: memformers compare --scale 0.1

    Example: memformers compare --seeds 5 --out runs/seeds
    """

    name: ClassVar = "compare"
    first: ClassVar = (
        "out", "resume", "scale", "seeds", "models", "arms",
        *(name for name in FIRST_OF_TRAINING if name != "model"),
    )  # fmt: skip
    config: CompareConfig = field(default_factory=CompareConfig)
    """What is compared."""

    def experiment(self, folder: Path) -> Report:
        return compare(self.config, folder, self.dashboard, resume=self.resume)
