"""Where runs are, where a report is, and the options that all experiments share."""

from abc import abstractmethod
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from memformers.common.errors import UserError
from memformers.runs.atomic_dir import has_manifest
from memformers.runs.folder import CONFIG

RUNS = Path("runs")


def new_folder(name: str) -> Path:
    """A folder under runs/ that no other run has."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    folder, n = RUNS / stem, 1
    while folder.exists():
        folder, n = RUNS / f"{stem}-{n}", n + 1
    return folder


def newest_run() -> Path:
    """The run under runs/ that was begun or resumed last; ValueError if there is none."""
    configs = list(RUNS.glob(f"*/{CONFIG}"))
    if not configs:
        raise UserError(f"{RUNS} holds no run to resume; name its folder after --resume.")
    return max(configs, key=lambda path: path.stat().st_mtime).parent


def resumable(folder: Path) -> Path:
    """The folder, if a run was begun in it; else ValueError."""
    if not (folder / CONFIG).is_file() or has_manifest(folder):
        raise UserError(f"{folder} is not the folder of a run; name the run to resume.")
    return folder


def say_report(page: Path) -> None:
    """Print where a report is."""
    print(f"report: {page}\n        {page.with_suffix('.md')}")


@dataclass(frozen=True)
class ExperimentCommand:
    """The options of a command that trains arms and compares them."""

    name: ClassVar[str]
    """The end of the names of new folders."""
    out: Path | None = None
    """The folder of the experiment; by default a new folder in runs/ with the date and the command in its
    name."""
    resume: bool = False
    """Continue the experiment in --out with the same settings: finish the trainings that were stopped, and
    add arms and seeds that it doesn't have."""
    dashboard: str = ""
    """Where to show the runs live: the address of a labml server, such as
    http://localhost:5005/api/v1/default, or off. Empty: the server in $labml_app_url, else a dashboard that
    runs on this machine, if there is one."""

    def folder(self) -> Path:
        """Where the experiment goes, or is."""
        if self.resume and self.out is None:
            raise UserError("name the experiment to resume as --out.")
        return self.out or new_folder(self.name)

    @abstractmethod
    def experiment(self, folder: Path) -> Path:
        """Train and measure in ``folder``; returns the report's page."""

    def run(self) -> None:
        """Train and measure, then say where the report is."""
        say_report(self.experiment(self.folder()))
