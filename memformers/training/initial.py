"""Weights that a training begins with: a trained model's, and which of them don't learn."""

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import torch

from memformers.common.errors import UserError
from memformers.convert.load import load_checkpoint, load_packaged
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import TOKENIZER, load_tokenizer, save_tokenizer
from memformers.models.config import ModelConfig
from memformers.models.io import packaged_names
from memformers.models.language_model import MemoryLM
from memformers.training.config import TrainConfig
from memformers.training.distributed import Distributed

MAY_DIFFER = {
    "segment_len", "mem_len", "c_mem_len", "same_length", "clamp_len", "dropout", "kernel", "bptt",
    "compression_loss",
}  # fmt: skip
"""Settings of a network in which a training may differ from the weights that it begins with."""


@cache
def load_initial(place: str) -> tuple[MemoryLM, Tokenizer]:
    """The model and the tokenizer of a run, a checkpoint, ``save_pretrained``, Hugging Face's Transformer-XL,
    or, by its name, of the package; else UserError."""
    if place in packaged_names() and not Path(place).exists():
        return load_packaged(place, torch.device("cpu"))
    return load_checkpoint(Path(place), torch.device("cpu"))


def initial_of(init: MemoryLM | str | Path) -> tuple[MemoryLM, Tokenizer | None]:
    """A model of one's own, whose tokens the config names, or what [`load_initial`][] loads."""
    return (init, None) if isinstance(init, MemoryLM) else load_initial(str(init))


def begun_with(
    model: MemoryLM, tokenizer: Tokenizer | None, config: TrainConfig, folder: Path, ranks: Distributed
) -> TrainConfig:
    """``config`` with the network of ``model``, whose weights it begins with, and with its tokenizer, which
    gets a file in ``folder``, so that the training can be resumed without the model."""
    config = replace(config, model=network_of(config.model, model))
    if tokenizer is None:
        return config
    if config.tokenizer not in (TrainConfig().tokenizer, tokenizer.name):
        raise UserError(
            f"tokenizer={config.tokenizer!r} was given, but the weights to begin with have a tokenizer; "
            f"leave it out."
        )
    path = folder / TOKENIZER
    if path.exists() and load_tokenizer(path).saved() != tokenizer.saved():
        raise UserError(f"{path} is another tokenizer than that of the weights; name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    ranks.first_alone(lambda: save_tokenizer(tokenizer, folder))
    return replace(config, tokenizer=str(path))


def network_of(asked: ModelConfig, model: MemoryLM) -> ModelConfig:
    """The network of a training that was asked for one and begins with the weights of ``model``, of which it
    takes what was left at its default altogether; UserError, which names them, for settings that differ."""
    if asked == ModelConfig():
        return model.config
    own = {f.name: getattr(model.config, f.name) for f in fields(ModelConfig) if f.name not in MAY_DIFFER}
    asked = replace(asked, vocab_size=own["vocab_size"])  # which the text is checked against
    if wrong := [
        f"{n} {value} → {getattr(asked, n)}" for n, value in own.items() if getattr(asked, n) != value
    ]:
        raise UserError(
            f"the weights to begin with are those of another network: {', '.join(wrong)}; leave these "
            f"settings out. What may differ: {', '.join(sorted(MAY_DIFFER))}."
        )
    return asked


def copy_weights(source: MemoryLM, model: MemoryLM) -> None:
    """Give ``model`` the weights of ``source``; UserError where their shapes differ."""
    found, own = source.state_dict(), model.state_dict()
    shapes = [{name: tuple(x.shape) for name, x in state.items()} for state in (found, own)]
    if wrong := [n for n in {**shapes[0], **shapes[1]} if shapes[0].get(n) != shapes[1].get(n)]:
        before, now = (each.get(wrong[0], "missing") for each in shapes)
        raise UserError(
            f"the weights to begin with don't fit: {wrong[0]} is {before}, but {now} was expected. With "
            f"positions='learned', leave segment_len, mem_len and c_mem_len as they are."
        )
    model.load_state_dict(found)


def freeze(model: MemoryLM, patterns: Sequence[str]) -> None:
    """Let the weights that ``patterns`` name learn no more; UserError for a pattern that names none, and
    where nothing is left to learn."""
    for pattern in patterns:
        wanted, n_frozen = pattern.split("."), 0
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            places = range(len(parts) - len(wanted) + 1)
            if any(all(map(fnmatchcase, parts[i:], wanted)) for i in places):
                parameter.requires_grad_(False)
                n_frozen += 1
        if not n_frozen:
            known = dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name, _ in model.named_parameters())
            raise UserError(f"freeze={pattern!r} names no weight; the weights are {', '.join(known)}.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"freeze={' '.join(patterns)} leaves nothing to learn; leave a pattern out.")
