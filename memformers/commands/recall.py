"""``memformers recall``: what each memory recalls, by distance."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from memformers.commands.options import ExperimentCommand
from memformers.comparison.experiment import run_experiment
from memformers.comparison.recall.setup import RecallConfig
from memformers.comparison.recall.shown import read_stream, terminal_text, write_stream_page
from memformers.report.rendering import Report


@dataclass(frozen=True)
class Recall(ExperimentCommand):
    """Train models with different memories on a stream that sets values and asks for them, from several
    seeds, and write a report of how accurately each memory recalls, by distance. With --resume, an
    interrupted training run restarts.

    Example: memformers recall --quick

    Example: memformers recall --seeds 5 --out runs/recall

    Example: memformers recall --show runs/recall
    """

    name: ClassVar = "recall"
    show: Path | None = None
    """Instead of training, show the trained models of this experiment: question by question, what each still
    remembers and what it answers, here and in a page."""
    config: RecallConfig = field(default_factory=RecallConfig)
    """What is trained and asked."""

    def run(self) -> None:
        if not self.show:
            super().run()
            return
        shown = read_stream(self.show)
        print(terminal_text(shown, colours=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
        print(f"\npage: {write_stream_page(shown, self.show)}")

    def experiment(self, folder: Path) -> Report:
        return run_experiment(self.config.experiment(), folder, self.dashboard, resume=self.resume)
