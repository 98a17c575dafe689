"""Initial weights of a training: those of another model, whose network and tokenizer it takes over."""

from dataclasses import fields, replace
from pathlib import Path

import torch

from memformers.common.errors import UserError
from memformers.common.fields import replace_nested
from memformers.common.files import user_path
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import TOKENIZER
from memformers.models.config import SHARED_SETTINGS, ModelConfig, applies_to
from memformers.models.hub import is_hub_model
from memformers.models.io import packaged_names
from memformers.models.language_model import MemoryLM
from memformers.runs.load import load_checkpoint, load_pretrained
from memformers.training.config import TrainConfig

MAY_DIFFER_FROM_INIT = {
    "segment_len", "mem_len", "c_mem_len", "same_length", "clamp_len", "dropout", "kernel", "bptt",
    "compression_loss",
}  # fmt: skip
"""Settings of a network that its weights don't depend on."""


def with_init(
    config: TrainConfig, init: MemoryLM | str | Path, folder: Path
) -> tuple[TrainConfig, MemoryLM, Tokenizer | None]:
    """``config`` with the network and the tokenizer of the initial weights, as a run in ``folder`` has them;
    their model; and their tokenizer, None if ``init`` is a model."""
    tokenizer = None
    if isinstance(init, MemoryLM):
        model = init
    else:
        model, tokenizer = load_initial(str(init))

    network = model.config if config.model == ModelConfig() else config.model
    network = replace(network, vocab_size=model.config.vocab_size)  # which the text is checked against
    check_same_network(network, model.config)
    config = replace(config, model=network)
    if tokenizer is None:
        return config, model, None

    path = str(folder / TOKENIZER)
    if config.tokenizer not in (TrainConfig().tokenizer, tokenizer.name, path):
        raise UserError(
            f"tokenizer={config.tokenizer!r} can't be used, since the initial weights have a tokenizer; "
            f"leave it out."
        )
    return replace(config, tokenizer=path), model, tokenizer


def check_same_network(network: ModelConfig, initial: ModelConfig) -> None:
    """Raise UserError if the weights of the ``initial`` network don't fit ``network``."""
    differences = []
    for setting in fields(ModelConfig):
        initial_value = getattr(initial, setting.name)
        value = getattr(network, setting.name)
        if setting.name not in MAY_DIFFER_FROM_INIT and initial_value != value:
            differences.append(f"{setting.name} {initial_value} → {value}")
    if differences:
        raise UserError(
            f"the initial weights come from a network with other settings ({', '.join(differences)}). Leave "
            f"these options out; only {', '.join(sorted(MAY_DIFFER_FROM_INIT))} may change."
        )


def load_initial(name: str) -> tuple[MemoryLM, Tokenizer]:
    """The model and the tokenizer from a folder, or by name from the package or the hub. Unused lengths have
    their defaults."""
    cpu = torch.device("cpu")
    is_packaged = name in packaged_names() and not Path(name).exists()
    if is_packaged or is_hub_model(name):
        model, tokenizer = load_pretrained(name, cpu)
    else:
        model, tokenizer = load_checkpoint(user_path(name), cpu)
    unused = {}
    for setting in fields(model.config):
        if setting.name in SHARED_SETTINGS and not applies_to(setting.name, model.config.model):
            unused[setting.name] = setting.default
    model.config = replace_nested(model.config, **unused)
    return model, tokenizer
