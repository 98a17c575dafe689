"""``memformers probe``: what context and memory are worth to trained models."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from memformers.commands.places import say_report
from memformers.common.machine import choose_device
from memformers.evaluation.probe import ProbeConfig, probe
from memformers.report.document import write_report


@dataclass(frozen=True)
class Probe:
    """Measure how much context and memory help trained models, and add the result to their report.

    Example: memformers probe runs/…
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The folder of a run or of a comparison."""
    config: tyro.conf.OmitArgPrefixes[ProbeConfig] = field(default_factory=ProbeConfig)
    device: str = "auto"
    """Where to run, such as cpu or cuda:1; auto takes a GPU if there is one."""

    def run(self) -> None:
        """Measure, write the report again, say where it is."""
        probe(self.folder, self.config, choose_device(self.device))
        say_report(write_report(self.folder))
