"""Options and messages that several commands share."""

import os
import shlex
import sys
from abc import abstractmethod
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from memformers.common.command_line import (
    cli_errors,
    command_here,
    is_clone,
    parse_arguments,
    resume_command,
)
from memformers.common.errors import TrainingsFailed
from memformers.common.fields import Checked
from memformers.runs.folder import is_experiment, new_folder, newest_experiment
from memformers.tracking.trackers import TRACK

if TYPE_CHECKING:
    from memformers.report.rendering import Report

FIRST_OF_TRAINING = (
    "data", "tokenizer", "vocab_size", "max_tokens", "batch_size", "seed", "learning_rate", "model",
    "n_layers", "d_model", "segment_len", "mem_len", "c_mem_len", "evaluations", "device",
)  # fmt: skip
"""The options of a training run that help shows first."""


def dashboard_here() -> str:
    """How to start the dashboard in this terminal, and what it still needs."""
    if find_spec("labml_app"):
        return command_here("dashboard")
    if is_clone():
        return "make dashboard"
    return f"{command_here('dashboard')}, after pip install '.[dashboard]' in a clone of the repository"


def say_report(report: "Report", answer: str = "") -> None:
    """Print the answer of a report, or another one, and where the report is."""
    page = report.page
    print(f"\n{answer or report.answer}\n\nreport: {page}\n        {page.with_suffix('.md')}")
    print(f"open it: python -m webbrowser -t {shlex.quote(str(page))}")


@dataclass(frozen=True, kw_only=True)
class TrackedCommand(Checked):
    dashboard: str = ""
    """Where to show the runs live: the address of a labml server, such as
    http://localhost:5005/api/v1/default; or off, and then labml isn't used at all. Empty: the server in
    $labml_app_url, else a dashboard that runs on this machine, if there is one."""
    track: str = ""
    """Other trackers that show the runs live, with commas between them: tensorboard, wandb or trackio, which
    must be installed. Empty: those in $MEMFORMERS_TRACK."""


@dataclass(frozen=True)
class ExperimentCommand(TrackedCommand):
    """The options of a command that trains arms and compares them."""

    name: ClassVar[str]
    """The end of the names of new folders."""
    out: Path | None = None
    """The folder of the experiment; by default a new folder in runs/ with the date and the command in its
    name."""
    resume: bool = False
    """Continue the experiment in --out, else the newest one of this command in runs/, with the same settings:
    finish the training runs that were stopped, and add the arms and seeds that are missing."""

    @abstractmethod
    def experiment(self, folder: Path) -> "Report":
        """Train and measure in ``folder``, and write the report."""

    def run(self) -> None:
        if self.track:  # trainings are separate processes, which read it
            os.environ[TRACK] = self.track
        # Advice at the end says how to continue what has begun.
        folder = self.out or (newest_experiment(self.name) if self.resume else new_folder(self.name))
        try:
            report = self.experiment(folder)
        except TrainingsFailed as error:
            raise TrainingsFailed(f"{error} To try them again: {resume_command(folder, self.name)}") from None
        except (KeyboardInterrupt, SystemExit):
            if is_experiment(folder):
                print(f"to continue: {resume_command(folder, self.name)}", file=sys.stderr)
            raise
        say_report(report)
        print(f"watch the next one: {dashboard_here()}")

    @classmethod
    def main(cls) -> None:
        with cli_errors():
            parse_arguments(cls).run()
