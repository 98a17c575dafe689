"""``memformers report`` and ``memformers probe``: what runs came to."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from memformers.commands.places import say_report
from memformers.probing.probe import ProbeConfig, probe
from memformers.report import write_report
from memformers.training.run import choose_device


@dataclass(frozen=True)
class Probe:
    """Measure what context and memory are worth to trained models, and add it to their report.

    Example: memformers probe runs/…
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A run's folder, or a comparison's."""
    config: tyro.conf.OmitArgPrefixes[ProbeConfig] = field(default_factory=ProbeConfig)
    device: str = "auto"
    """Where to run, such as cpu or cuda:1; auto takes a GPU if there is one."""

    def run(self) -> None:
        """Measure, write the report again, say where it is."""
        probe(self.folder, self.config, choose_device(self.device))
        say_report(write_report(self.folder))


@dataclass(frozen=True)
class Report:
    """Write the report of a run or a comparison, again or for the first time.

    Example: memformers report runs/…
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The run's folder, or the one whose sub-folders are runs."""

    def run(self) -> None:
        """Write it, then say where it is."""
        say_report(write_report(self.folder))
