"""``memformers report``: the report of runs that were trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from memformers.commands.options import say_report


@dataclass(frozen=True)
class Report:
    """Write the report of a run, a comparison or a recall experiment, or write it again.

    Example: memformers report runs/…
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The folder of the run, or a folder whose sub-folders are runs."""

    def run(self) -> None:
        from memformers.report.document import write_report  # not above: it takes 30 MiB

        say_report(write_report(self.folder))
