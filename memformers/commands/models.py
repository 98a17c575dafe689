"""The trained model that a command uses."""

from pathlib import Path

from memformers.common.errors import UserError
from memformers.common.machine import choose_device
from memformers.data.tokenizers import Tokenizer
from memformers.models.language_model import MemoryLM
from memformers.pretrained.own import load_checkpoint
from memformers.pretrained.packaged import load_packaged, packaged_names


def load_chosen(checkpoint: Path | None, pretrained: str, device: str) -> tuple[MemoryLM, Tokenizer]:
    """The model of ``--checkpoint`` or of ``--pretrained`` on ``device``, and its tokenizer. Raises UserError
    unless exactly one of the two is given."""
    if (checkpoint is None) == (not pretrained):
        raise UserError(
            f"give one model: --checkpoint with the folder of a run, or --pretrained with one of "
            f"{', '.join(packaged_names())}."
        )
    if checkpoint is None:
        return load_packaged(pretrained, choose_device(device))
    return load_checkpoint(checkpoint, choose_device(device))
