"""Weights that a training begins with: a trained model's, and which of them don't learn."""

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import torch

from memformers.common.errors import UserError
from memformers.common.fields import changed
from memformers.convert.load import load_checkpoint, load_packaged
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import TOKENIZER, load_tokenizer, save_tokenizer
from memformers.models.config import LENGTHS, ModelConfig, is_used
from memformers.models.io import packaged_names
from memformers.models.language_model import MemoryLM
from memformers.training.config import TrainConfig
from memformers.training.distributed import Distributed

MAY_DIFFER = {
    "segment_len", "mem_len", "divided_len", "c_mem_len", "same_length", "clamp_len", "dropout", "kernel",
    "bptt", "compression_loss",
}  # fmt: skip
"""Settings of a network in which a training may differ from the weights that it begins with."""


@cache
def load_initial(place: str) -> tuple[MemoryLM, Tokenizer]:
    """The model and the tokenizer of a run, a checkpoint, ``save_pretrained``, Hugging Face's Transformer-XL,
    or, by its name, of the package; else UserError. Lengths without use, which the arms of an experiment
    share, are at their defaults."""
    packaged = place in packaged_names() and not Path(place).exists()
    cpu = torch.device("cpu")
    model, tokenizer = load_packaged(place, cpu) if packaged else load_checkpoint(Path(place), cpu)
    kind = model.config.model
    usual = {
        f.name: f.default for f in fields(model.config) if f.name in LENGTHS and not is_used(f.name, kind)
    }
    model.config = changed(model.config, **usual)
    return model, tokenizer


def begun_with(
    model: MemoryLM, tokenizer: Tokenizer | None, config: TrainConfig, folder: Path, ranks: Distributed
) -> TrainConfig:
    """``config`` with the network of ``model``, whose weights it begins with, and with its tokenizer, which
    gets a file in ``folder``, so that the training can be resumed without the model.

    A network that was left at its default altogether is the model's; UserError for settings that differ."""
    asked, own = config.model, model.config
    if asked == ModelConfig():
        asked = own
    asked = replace(asked, vocab_size=own.vocab_size)  # which the text is checked against
    names = [f.name for f in fields(ModelConfig) if f.name not in MAY_DIFFER]
    pairs = ((name, getattr(own, name), getattr(asked, name)) for name in names)
    if wrong := [f"{name} {before} → {now}" for name, before, now in pairs if before != now]:
        raise UserError(
            f"the weights to begin with are those of another network: {', '.join(wrong)}; leave these "
            f"settings out. What may differ: {', '.join(sorted(MAY_DIFFER))}."
        )
    config = replace(config, model=asked)
    if tokenizer is None:
        return config
    if config.tokenizer not in (TrainConfig().tokenizer, tokenizer.name):
        raise UserError(
            f"tokenizer={config.tokenizer!r} was given, but the weights to begin with have a tokenizer; "
            f"leave it out."
        )
    path = folder / TOKENIZER
    if path.exists() and load_tokenizer(path).to_json() != tokenizer.to_json():
        raise UserError(f"{path} is another tokenizer than that of the weights; name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    ranks.first_alone(lambda: save_tokenizer(tokenizer, folder))
    return replace(config, tokenizer=str(path))


def copy_weights(source: MemoryLM, model: MemoryLM) -> None:
    """Give ``model`` the weights of ``source``; UserError where their shapes differ."""
    before, now = (
        {name: tuple(x.shape) for name, x in each.state_dict().items()} for each in (source, model)
    )
    if wrong := [name for name in {**before, **now} if before.get(name) != now.get(name)]:
        raise UserError(
            f"the weights to begin with don't fit: {wrong[0]} is {before.get(wrong[0], 'missing')}, but "
            f"{now.get(wrong[0], 'missing')} was expected. With positions='learned', leave segment_len, "
            f"mem_len and c_mem_len as they are."
        )
    model.load_state_dict(source.state_dict())


def freeze(model: MemoryLM, patterns: Sequence[str]) -> None:
    """Let the weights that ``patterns`` name learn no more; UserError for a pattern that names none, and
    where nothing is left to learn."""
    weights = dict(model.named_parameters())
    for pattern in patterns:
        wanted, named = pattern.split("."), []
        for name, parts in ((name, name.split(".")) for name in weights):
            places = range(len(parts) - len(wanted) + 1)
            if any(all(map(fnmatchcase, parts[i:], wanted)) for i in places):
                named.append(weights[name].requires_grad_(False))
        if not named:
            known = dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in weights)
            raise UserError(f"freeze={pattern!r} names no weight; the weights are {', '.join(known)}.")
    if not any(weight.requires_grad for weight in weights.values()):
        raise UserError(f"freeze={' '.join(patterns)} leaves nothing to learn; leave a pattern out.")
