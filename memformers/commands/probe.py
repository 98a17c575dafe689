"""``memformers probe``: how much its memory helps a trained model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from memformers.commands.options import say_report
from memformers.commands.trained import CustomMemories, MovedText
from memformers.common.fields import Count
from memformers.common.machine import choose_device
from memformers.evaluation.probe import probe
from memformers.runs.reader import read_runs


@dataclass(frozen=True)
class Probe(CustomMemories, MovedText):
    """Measure how much memory helps trained models, and add the result to their report.

    Example: memformers probe runs/…
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The folder of a run or of a comparison."""
    tokens: Count = 65_536
    """The approximate number of held-out tokens to predict, with the unmodified memory and with each changed
    part; more tokens give narrower intervals."""
    device: str = "auto"
    """Where to run, such as cpu or cuda:1; auto uses a GPU if there is one."""

    def run(self) -> None:
        from memformers.report.document import probe_answer, write_report  # not above: it takes 30 MiB

        self.check_memories([run.config["model"]["model"] for run in read_runs(self.folder)])
        probe(self.folder, self.tokens, choose_device(self.device), **self.moved)
        say_report(write_report(self.folder), probe_answer(self.folder))
