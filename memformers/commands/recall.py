"""``memformers recall``: what each memory recalls, by distance."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import tyro

from memformers.commands.options import ExperimentCommand
from memformers.comparison.recall import RecallConfig, recall


@dataclass(frozen=True)
class Recall(ExperimentCommand):
    """Train models with different memories on a stream that sets values and asks for them, from several
    seeds, and write a report of how accurately each memory recalls, by distance. With --resume, a training
    that was stopped begins again.

    Example: memformers recall --quick

    Example: memformers recall --seeds 5 --out runs/recall
    """

    name: ClassVar = "recall"
    config: tyro.conf.OmitArgPrefixes[RecallConfig] = field(default_factory=RecallConfig)

    def experiment(self, folder: Path) -> Path:
        """Train and measure; returns the report's page."""
        return recall(self.config, folder, self.dashboard, resume=self.resume)
