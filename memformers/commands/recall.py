"""``memformers recall``: what each memory recalls, by distance."""

from dataclasses import dataclass, field
from pathlib import Path

import tyro

from memformers.commands.places import new_folder, say_report
from memformers.common.errors import UserError
from memformers.recall.config import RecallConfig
from memformers.recall.experiment import recall


@dataclass(frozen=True)
class Recall:
    """Train models with different memories on a stream that sets values and asks for them, from several
    seeds, and write a report of how accurately each memory recalls, by distance.

    Example: memformers recall --quick

    Example: memformers recall --seeds 5 --out runs/recall
    """

    config: tyro.conf.OmitArgPrefixes[RecallConfig] = field(default_factory=RecallConfig)
    out: Path | None = None
    """The folder of the experiment; by default a new folder in runs/ with the date and "recall" in its
    name."""
    resume: bool = False
    """Continue the experiment in --out with the same settings: finished trainings are kept, a stopped one
    begins again, and arms or seeds that it doesn't have are added."""
    dashboard: str = ""
    """Where to show the runs live: the address of a labml server, such as
    http://localhost:5005/api/v1/default, or off. Empty: the server in $labml_app_url, else a dashboard that
    runs on this machine, if there is one."""

    def folder(self) -> Path:
        """Where the experiment goes, or is."""
        if self.resume and self.out is None:
            raise UserError("name the experiment to resume as --out.")
        return self.out or new_folder("recall")

    def recall(self) -> Path:
        """Train and measure; returns the report's page."""
        return recall(self.config, self.folder(), self.dashboard, resume=self.resume)

    def run(self) -> None:
        """Train and measure, then say where the report is."""
        say_report(self.recall())
