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
    """Train memories on streams in which values are set and asked for, several seeds each, and write a report
    of what each of them recalls, by distance.

    Example: memformers recall --quick

    Example: memformers recall --seeds 5 --out runs/recall
    """

    config: tyro.conf.OmitArgPrefixes[RecallConfig] = field(default_factory=RecallConfig)
    out: Path | None = None
    """Folder of the experiment; by default runs/, the date and "recall"."""
    resume: bool = False
    """Go on with the experiment in --out, of the same settings: finished trainings are kept, one that was
    stopped begins again, and arms or seeds that it doesn't have are added."""
    dashboard: str = ""
    """Where to show it live: the address of a labml server, such as http://localhost:5005/api/v1/default,
    or off. Empty: labml's own $labml_app_url, else a dashboard that runs on this machine, if one does."""

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
