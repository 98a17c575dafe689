"""Commands for runs that were trained: ``memformers report``, ``dashboard`` and ``export``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from memformers.commands.options import say_report
from memformers.common.console import counted
from memformers.common.errors import UserError
from memformers.common.fields import Checked, Range
from memformers.tracking.export import export


@dataclass(frozen=True)
class Report:
    """Write the report of a run, a comparison or a recall experiment, or write it again.

    Example: memformers report runs/…
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The folder of the run, or a folder whose sub-folders are runs."""

    def run(self) -> None:
        from memformers.report.document import write_report  # not above: the others do without it

        say_report(write_report(self.folder))


@dataclass(frozen=True)
class Dashboard(Checked):
    """Watch runs in a browser: labml's dashboard, with nothing to set up. Ctrl-C ends it.

    Example: memformers dashboard --open
    """

    folder: Path | None = None
    """The folder of its records; by default in the user's folder for data."""
    host: str = "127.0.0.1"
    """The address to listen on. There is no login: with another address, everyone who can reach it sees all
    runs."""
    port: Annotated[int, Range(0, 65535)] = 5005
    """The port to listen on; 0 takes any free port."""
    import_: Annotated[tuple[Path, ...], tyro.conf.arg(name="import", metavar="RUNS")] = ()
    """Folders of runs or comparisons to import, which were trained while no dashboard ran."""
    open: bool = False
    """Whether to open the page in the browser."""

    def run(self) -> None:
        try:
            from memformers.dashboard.pages import serve
        except ImportError as error:
            install = "pip install '.[dashboard]' in a clone of the repository"
            raise UserError(f"the dashboard needs {error.name}, which is not installed: {install}") from None
        serve(self.folder, self.host, self.port, self.import_, self.open)


@dataclass(frozen=True)
class Export(Checked):
    """Copy runs to TensorBoard, wandb or trackio.

    Example: memformers export runs/… --to tensorboard
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folders of runs or comparisons."""
    to: Literal["tensorboard", "wandb", "trackio"]
    """The tracker, which must be installed; wandb reads its settings from its environment variables."""
    out: Path | None = None
    """Where the files go, a folder for each run; by default into the runs' folders."""

    def run(self) -> None:
        number = export(self.runs, self.to, self.out)
        print(f"exported to {self.to}: {counted(number, 'run')}")
