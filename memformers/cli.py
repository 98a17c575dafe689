"""The ``memformers`` command: train, compare, generate, report."""

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated

import tyro

from memformers.command_line import parse_arguments, plain_errors
from memformers.comparison import CompareConfig, compare
from memformers.generation import continue_text, load_checkpoint
from memformers.report import write_report
from memformers.training.config import TrainConfig
from memformers.training.run import choose_device, train_run

RUNS = Path("runs")


@dataclass(frozen=True)
class Train:
    """Train one model on a text.

    Example: memformers train --model compressive --data my_book.txt
    """

    config: tyro.conf.OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    out: Path | None = None
    """Folder of the run; by default runs/, the date and the model."""
    dashboard: str = ""
    """The labml server's address, such as http://localhost:5005/api/v1/default. Empty: labml's own
    $labml_app_url, or no dashboard."""

    def folder(self) -> Path:
        """Where the run goes."""
        return self.out or new_folder(self.config.model.model)

    def run(self) -> None:
        """Train, then say where the run is."""
        print(f"run: {train_run(self.config, self.folder(), self.dashboard)}")


@dataclass(frozen=True)
class Compare:
    """Train several models alike, one after the other, and write a report.

    Example: memformers compare --scale 0.1
    """

    config: tyro.conf.OmitArgPrefixes[CompareConfig] = field(default_factory=CompareConfig)
    out: Path | None = None
    """Folder of the comparison; by default runs/, the date and "compare"."""
    dashboard: str = ""
    """The labml server's address, such as http://localhost:5005/api/v1/default. Empty: labml's own
    $labml_app_url, or no dashboard."""

    def folder(self) -> Path:
        """Where the comparison goes."""
        return self.out or new_folder("compare")

    def run(self) -> None:
        """Compare, then say where the report is."""
        report = compare(self.config, self.folder(), self.dashboard)
        print(f"report: {report}\n        {report.with_suffix('.md')}")


@dataclass(frozen=True)
class Generate:
    """Continue a text with a trained model.

    Example: memformers generate --checkpoint runs/… --prompt "ROMEO:"
    """

    checkpoint: Path
    """Folder of a run, or a folder that save_pretrained wrote with its tokenizer."""
    prompt: str = "\n"
    """The text to go on from."""
    tokens: int = 400
    """How many tokens to write."""
    temperature: float = 0.8
    """Below 1 safer, above 1 wilder; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Draw among the k likeliest tokens only."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together reach this probability."""
    seed: int | None = None
    """The same seed writes the same text; by default each call differs."""
    device: str = "auto"
    """Where to run, such as cpu or cuda:1; auto takes a GPU if there is one."""

    def run(self) -> None:
        """Print the prompt and what the model makes of it."""
        model, tokenizer = load_checkpoint(self.checkpoint, choose_device(self.device))
        text = continue_text(
            model,
            tokenizer,
            self.prompt,
            self.tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
        )
        print(self.prompt + text)


@dataclass(frozen=True)
class Report:
    """Write the report of a run or a comparison, again or for the first time.

    Example: memformers report runs/…
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The run's folder, or the one whose sub-folders are runs."""

    def run(self) -> None:
        """Write it, then say where it is."""
        report = write_report(self.folder)
        print(f"report: {report}\n        {report.with_suffix('.md')}")


def new_folder(name: str) -> Path:
    """A folder under runs/ that no other run has."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    folder, n = RUNS / stem, 1
    while folder.exists():
        folder, n = RUNS / f"{stem}-{n}", n + 1
    return folder


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    with plain_errors():
        parse_arguments(Train | Compare | Generate | Report, arguments, prog="memformers").run()


if __name__ == "__main__":
    main()
