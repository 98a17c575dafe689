"""What several commands share: options, and their groups in ``--help-all``."""

import shlex
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from memformers.common.command_line import Group, parse_arguments, plain_errors
from memformers.common.errors import UserError
from memformers.common.fields import Checked
from memformers.common.progress import Progress
from memformers.runs.folder import new_folder

if TYPE_CHECKING:
    from memformers.data.tokenizer import Tokenizer
    from memformers.models.config import ModelConfig
    from memformers.models.language_model import MemoryLM
    from memformers.report.markdown import Report

GROUPS: dict[str, Group] = {
    "model": ("network", "The layers, which are the same for every model."),
    "segment_len": ("memory", "What is remembered between segments."),
    "compression": ("compression", "What makes compressed slots of old memories, and what it learns from."),
    "own": ("own", "The settings of a memory of your own."),
    "vocab_size": ("embedding", "How tokens become vectors, and vectors predictions."),
    "data": ("text", "What is read, and what a token is."),
    "tokens": ("training", "How much is learned from, in which order, and through how much memory."),
    "optimizer": ("optim", "How the weights are learned."),
    "evaluations": ("evaluation", "What is measured during training."),
    "checkpoint_every": ("checkpoint", "What is kept for --resume, and which steps may fail."),
    "device": ("step", "Where and in which precision a step is computed, and how it is shared."),
    "models": ("comparison", "What is compared, in addition to the models."),
}
"""The groups in which ``--help-all`` shows the options of training runs and comparisons, by the field with
which each begins; it goes on to the field with which the next one begins."""


def given_to(option: str, arguments: list[str]) -> str:
    """What ``arguments``, which are not parsed yet, give to ``option`` last; empty for nothing."""
    pairs = pairwise([*arguments, ""])
    given = [word.partition("=")[2] or after for word, after in pairs if word.split("=")[0] == option]
    return given[-1] if given and not given[-1].startswith("-") else ""


def with_own_memory(config: "ModelConfig", arguments: list[str]) -> "ModelConfig":
    """``config`` with the memory of the user's own that ``--model`` names among the ``arguments``, if any, so
    that its settings are options too."""
    own = given_to("--model", arguments)
    return replace(config, model=own) if ":" in own else config


def say_report(report: "Report", answer: str = "") -> None:
    """Print the answer of a report, or another one, and where the report is."""
    page = report.page
    print(f"\n{answer or report.answer}\n\nreport: {page}\n        {page.with_suffix('.md')}")
    print(f"open it: python -m webbrowser -t {shlex.quote(str(page))}")


def reading_bar(doing: str, tokens: int, model: "MemoryLM") -> Progress:
    """A bar of the ``tokens`` that a model reads, for more of them than are read in a moment."""
    is_short = tokens <= 50 * model.config.segment_len
    return Progress(total=tokens, unit="tok", unit_scale=True, desc=doing, disable=is_short)


@dataclass(frozen=True, kw_only=True)
class TrackedCommand(Checked):
    """The option of a command that trains."""

    dashboard: str = ""
    """Where to show the runs live: the address of a labml server, such as
    http://localhost:5005/api/v1/default, or off. Empty: the server in $labml_app_url, else a dashboard that
    runs on this machine, if there is one."""


@dataclass(frozen=True)
class ExperimentCommand(TrackedCommand):
    """The options of a command that trains arms and compares them."""

    name: ClassVar[str]
    """The end of the names of new folders."""
    out: Path | None = None
    """The folder of the experiment; by default a new folder in runs/ with the date and the command in its
    name."""
    resume: bool = False
    """Continue the experiment in --out with the same settings: finish the training runs that were stopped,
    and add arms and seeds that it doesn't have."""

    @abstractmethod
    def experiment(self, folder: Path) -> "Report":
        """Train and measure in ``folder``, and write the report."""

    def run(self) -> None:
        """Train and measure, then say where the report is."""
        if self.resume and self.out is None:
            raise UserError("name the experiment to resume as --out.")
        say_report(self.experiment(self.out or new_folder(self.name)))
        print("watch the next one: memformers dashboard")

    @classmethod
    def main(cls) -> None:
        """Run what the command line asks for."""
        with plain_errors():
            parse_arguments(cls).run()


@dataclass(frozen=True, kw_only=True)
class OwnCode:
    """The options that name classes of the user's own, which trained models have."""

    model: tuple[str, ...] = ()
    """The memory of your own that it was trained with, such as my_memory.py:Averages: a checkpoint never runs
    a file by itself."""
    gate: tuple[str, ...] = ()
    """Its gate of your own, such as my.py:Gate."""
    compression: tuple[str, ...] = ()
    """Its compression of your own, such as my.py:Gated."""
    compression_loss: tuple[str, ...] = ()
    """Its compression loss of your own, such as my.py:Loss."""

    def import_own(self) -> None:
        """Import them; UserError for what can't be."""
        from memformers.models.registry import PARTS, name_of  # not above: other commands do without

        for setting in ("model", *PARTS):
            for place in getattr(self, setting):
                name_of(place, setting)

    def check_own(self, models: Sequence[Mapping[str, Any]]) -> None:
        """Raise UserError for what none of the ``models``, given by their settings, was trained with."""
        from memformers.models.registry import PARTS, name_of

        for setting in ("model", *PARTS):
            for place in getattr(self, setting):
                if name_of(place, setting) not in (trained := [model[setting] for model in models]):
                    raise UserError(
                        f"{setting}={place} was given, but what is read was trained with {setting}="
                        f"{' or '.join(dict.fromkeys(trained))}; leave it out."
                    )


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Checked, OwnCode):
    """The options of a command that uses a trained model."""

    checkpoint: Path | None = None
    """The folder of a run, or a folder that contains the files of save_pretrained and a tokenizer.json."""
    pretrained: str = ""
    """A model that comes with the package, in place of --checkpoint: compressive-shakespeare or
    transformer-xl-shakespeare."""
    device: str = "auto"
    """Where to run, such as cpu or cuda:1; auto takes a GPU if there is one."""

    def load(self) -> "tuple[MemoryLM, Tokenizer]":
        """The model of ``--checkpoint`` or of ``--pretrained``, and its tokenizer. Raises UserError unless
        exactly one of the two is given."""
        # Not above: commands that need no model do without PyTorch.
        from memformers.common.machine import choose_device
        from memformers.convert.load import load_checkpoint, load_packaged
        from memformers.models.io import packaged_names

        if (self.checkpoint is None) == (not self.pretrained):
            raise UserError(
                f"give one model: --checkpoint with the folder of a run, or --pretrained with one of "
                f"{', '.join(packaged_names())}."
            )
        device = choose_device(self.device)
        self.import_own()
        place = self.checkpoint
        loaded = load_checkpoint(place, device) if place else load_packaged(self.pretrained, device)
        self.check_own([vars(loaded[0].config)])
        return loaded
