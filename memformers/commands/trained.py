"""Options of the commands that use a trained model."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from memformers.common.console import Progress, counted
from memformers.common.errors import UserError
from memformers.common.fields import Checked
from memformers.common.machine import choose_device
from memformers.data.tokenizer import Tokenizer
from memformers.models.io import packaged_names
from memformers.models.language_model import MemoryLM
from memformers.models.registry import import_memory
from memformers.runs.load import load_checkpoint, load_pretrained


@dataclass(frozen=True, kw_only=True)
class CustomMemories:
    first: ClassVar = (
        "checkpoint", "pretrained", "prompt", "prompt_file", "text", "split", "tokens", "temperature",
    )  # fmt: skip
    model: tuple[str, ...] = ()
    """The custom memory that it was trained with, such as my_memory.py:Averages. A checkpoint never runs a
    file by itself."""

    def check_memories(self, trained: Collection[str]) -> None:
        """Raise UserError for a memory that no model was ``trained`` with."""
        for name in map(import_memory, self.model):
            if name not in trained:
                names = " or ".join(dict.fromkeys(trained))
                raise UserError(f"the checkpoint was trained with model={names}, not {name}.")


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Checked, CustomMemories):
    """The options of a command that uses a trained model."""

    checkpoint: Path | None = None
    """Where the model is: the folder of a run, of one of its checkpoints, of save_pretrained with a
    tokenizer.json, or of Hugging Face's Transformer-XL."""
    pretrained: str = ""
    """A model that comes with the package, in place of --checkpoint: compressive-shakespeare or
    transformer-xl-shakespeare; or one on Hugging Face's hub, as OWNER/NAME."""
    device: str = "auto"
    """Where to run, such as cpu or cuda:1; auto uses a GPU if there is one."""

    def load(self) -> tuple[MemoryLM, Tokenizer]:
        """The model, of exactly one of ``--checkpoint`` and ``--pretrained``, and its tokenizer."""
        if (self.checkpoint is None) == (not self.pretrained):
            raise UserError(
                f"name one model: --checkpoint with the folder of a run, or --pretrained with one of "
                f"{', '.join(packaged_names())}, or with OWNER/NAME on the hub."
            )
        device = choose_device(self.device)
        for name in self.model:  # a checkpoint names no file to import
            import_memory(name)
        if self.checkpoint:
            model, tokenizer = load_checkpoint(self.checkpoint, device)
        else:
            model, tokenizer = load_pretrained(self.pretrained, device)
        self.check_memories([model.config.model])
        return model, tokenizer


def reading_bar(doing: str, tokens: int, model: MemoryLM) -> Progress:
    """A bar of the ``tokens`` that a model reads, for more of them than are read in a moment."""
    # Fifty segments take about a second.
    is_short = tokens <= 50 * model.config.segment_len
    bar = Progress(total=tokens, unit="tok", unit_scale=True, desc=doing, hidden=is_short)
    if bar.disable:  # in a log, which would say nothing for minutes
        bar.say(f"{doing}: {counted(tokens, 'token')}")
    return bar


@dataclass(frozen=True, kw_only=True)
class MovedText:
    data: str = ""
    """The new path of the training text, if it was moved."""
    validation: str = ""
    """The new path of the validation text, if the run named it and it was moved."""
    test: str = ""
    """The new path of the test text, if the run named it and it was moved."""

    @property
    def moved(self) -> dict[str, str]:
        return {"data": self.data, "validation": self.validation, "test": self.test}
