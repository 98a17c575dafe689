"""Trained models that come with the package, a folder each; ``python -m experiments.pretrained`` makes them.

config.json, model.safetensors, tokenizer.json     the model with weights in bfloat16, and its tokenizer
recipe.json       how it was trained, and the loss of these weights on the held-out text
manifest.json     size and SHA-256 of each of these
"""

from pathlib import Path

import torch

from memformers.common.errors import UserError
from memformers.data.tokenizers import Tokenizer
from memformers.models.language_model import MemoryLM
from memformers.pretrained.own import load_model, load_with_tokenizer

PACKAGED = Path(__file__).parent / "weights"
RECIPE = "recipe.json"


def packaged_names() -> list[str]:
    """The names of the models that come with the package."""
    return sorted(path.parent.name for path in PACKAGED.glob(f"*/{RECIPE}"))


def packaged_folder(name: str) -> Path:
    """The folder of the model called ``name``; UserError, which lists the known names, for any other name."""
    if name not in packaged_names():
        raise UserError(f"no pretrained model is called {name!r}; use one of {', '.join(packaged_names())}.")
    return PACKAGED / name


def load_packaged(name: str, device: torch.device) -> tuple[MemoryLM, Tokenizer]:
    """The model called ``name``, in eval mode on ``device``, and its tokenizer; else UserError. The weights
    are converted to float32, in which the model can also be trained further."""
    model, tokenizer = load_with_tokenizer(packaged_folder(name), device)
    return model.float(), tokenizer


def load_folder_or_name(source: Path, device: str | torch.device) -> MemoryLM:
    """[`MemoryLM.from_pretrained`][]: the model in the folder ``source``, or, if there is no such folder, the
    model of the package with this name; else UserError."""
    if source.exists() or len(source.parts) > 1:
        return load_model(source, device)
    if source.name not in packaged_names():
        raise UserError(
            f"there is neither a folder nor a pretrained model called {source.name!r}; use one of "
            f"{', '.join(packaged_names())}, or name a folder."
        )
    return load_packaged(source.name, torch.device(device))[0]
