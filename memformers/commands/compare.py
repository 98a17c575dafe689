"""``memformers compare``: several models, trained alike."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from memformers.commands.groups import GROUPS
from memformers.commands.places import new_folder, say_report
from memformers.common.errors import UserError
from memformers.comparison import CompareConfig, compare


@dataclass(frozen=True)
class Compare:
    """Train several models with the same settings, one after the other, and write a report.

    Example: memformers compare --scale 0.1

    Example: memformers compare --seeds 5 --out runs/seeds
    """

    first: ClassVar = ("data", "scale", "seeds", "models", "out")
    groups: ClassVar = GROUPS
    config: CompareConfig = field(default_factory=CompareConfig)
    out: Path | None = None
    """The folder of the comparison; by default a new folder in runs/ with the date and "compare" in its
    name."""
    resume: bool = False
    """Continue the comparison in --out with the same settings: finish the runs that were stopped, and add
    arms and seeds that it doesn't have."""
    dashboard: str = ""
    """Where to show the runs live: the address of a labml server, such as
    http://localhost:5005/api/v1/default, or off. Empty: the server in $labml_app_url, else a dashboard that
    runs on this machine, if there is one."""

    def folder(self) -> Path:
        """Where the comparison goes, or is."""
        if self.resume and self.out is None:
            raise UserError("name the comparison to resume as --out.")
        return self.out or new_folder("compare")

    def compare(self) -> Path:
        """Compare; returns the report's page."""
        return compare(self.config, self.folder(), self.dashboard, resume=self.resume)

    def run(self) -> None:
        """Compare, then say where the report is."""
        say_report(self.compare())
