"""``memformers compare``: several models, trained alike."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from memformers.commands.options import GROUPS, ExperimentCommand
from memformers.comparison.text import CompareConfig, compare


@dataclass(frozen=True)
class Compare(ExperimentCommand):
    """Train several models with the same settings, one after the other, and write a report.

    Example: memformers compare --scale 0.1

    Example: memformers compare --seeds 5 --out runs/seeds
    """

    name: ClassVar = "compare"
    first: ClassVar = ("data", "scale", "seeds", "models", "out")
    groups: ClassVar = GROUPS
    config: CompareConfig = field(default_factory=CompareConfig)

    def experiment(self, folder: Path) -> Path:
        """Compare; returns the report's page."""
        return compare(self.config, folder, self.dashboard, resume=self.resume)
