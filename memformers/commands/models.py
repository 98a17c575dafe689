"""The trained model that a command uses."""

from dataclasses import dataclass
from pathlib import Path

from memformers.common.errors import UserError
from memformers.common.fields import check_fields
from memformers.common.machine import choose_device
from memformers.data.tokenizers import Tokenizer
from memformers.models.language_model import MemoryLM
from memformers.pretrained.own import load_checkpoint, load_packaged, packaged_names


@dataclass(frozen=True, kw_only=True)
class ModelCommand:
    """The options of a command that uses a trained model."""

    checkpoint: Path | None = None
    """The folder of a run, or a folder that contains the files of save_pretrained and a tokenizer.json."""
    pretrained: str = ""
    """A model that comes with the package, in place of --checkpoint: compressive-shakespeare or
    transformer-xl-shakespeare."""
    device: str = "auto"
    """Where to run, such as cpu or cuda:1; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        """Raise UserError for an option outside of its range."""
        check_fields(self)

    def load(self) -> tuple[MemoryLM, Tokenizer]:
        """The model of ``--checkpoint`` or of ``--pretrained``, and its tokenizer. Raises UserError unless
        exactly one of the two is given."""
        if (self.checkpoint is None) == (not self.pretrained):
            raise UserError(
                f"give one model: --checkpoint with the folder of a run, or --pretrained with one of "
                f"{', '.join(packaged_names())}."
            )
        if self.checkpoint is None:
            return load_packaged(self.pretrained, choose_device(self.device))
        return load_checkpoint(self.checkpoint, choose_device(self.device))
