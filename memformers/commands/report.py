"""``memformers report``: what runs came to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from memformers.commands.options import say_report
from memformers.common.errors import UserError
from memformers.report.document import write_report
from memformers.runs.plan import read_plan


@dataclass(frozen=True)
class Report:
    """Write the report of a run, a comparison or a recall experiment, or write it again.

    Example: memformers report runs/…
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The folder of the run, or a folder whose sub-folders are runs."""

    def run(self) -> None:
        """Write it, then say where it is."""
        if (plan := read_plan(self.folder.parent)) and plan.task != "text":
            raise UserError(
                f"{self.folder} is a part of a {plan.task} experiment; name {self.folder.parent} instead."
            )
        say_report(write_report(self.folder))
