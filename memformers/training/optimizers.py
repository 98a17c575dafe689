"""Optimizers and learning rates."""

from collections.abc import Callable

import torch
from labml_helpers.schedule import RelativePiecewise
from torch import Tensor, nn

from memformers.models.language_model import MemoryLM
from memformers.training.config import TrainConfig
from memformers.training.muon import Muon

Optimizers = tuple[torch.optim.Optimizer, ...]
"""Optimizers that together have every parameter of a model exactly once."""


def build_optimizers(model: MemoryLM, config: TrainConfig) -> Optimizers:
    """AdamW for all parameters; or with ``optimizer="muon"``, Muon for the matrices of the layers and AdamW
    for the others: vocabulary, positions, biases, norms and compression functions.

    Weight decay applies only to the weights of linear maps and convolutions, since there is no reason to pull
    an embedding, a bias, a norm or a position towards zero.
    """
    matrices = layer_matrices(model) if config.optimizer == "muon" else []
    taken = {id(matrix) for matrix in matrices}
    maps = (module.weight for module in model.modules() if isinstance(module, nn.Linear | nn.Conv1d))
    decaying = {id(weight): weight for weight in maps if id(weight) not in taken}
    others = [p for p in model.parameters() if id(p) not in taken and id(p) not in decaying]
    adamw = torch.optim.AdamW(
        [
            {"params": list(decaying.values()), "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(0.9, config.beta2),
        fused=True,
    )
    if not matrices:
        return (adamw,)
    dtype = torch.bfloat16 if config.precision == "bfloat16" else None
    muon = Muon(matrices, lr=config.matrix_learning_rate, weight_decay=config.weight_decay, dtype=dtype)
    return adamw, muon


def layer_matrices(model: MemoryLM) -> list[Tensor]:
    """The weights of the linear maps within the layers, ``[out, in]`` each, without those of the compression
    functions. The matrices of the vocabulary are not included, since each of their rows belongs to one
    token."""
    compressing = {module for compress in model.transformer.compressions for module in compress.modules()}
    modules = (module for module in model.transformer.modules() if module not in compressing)
    return [module.weight for module in modules if isinstance(module, nn.Linear)]


def learning_rate_schedule(config: TrainConfig) -> Callable[[int], float]:
    """The fraction of its peak that each learning rate has after a number of tokens: it rises linearly from 0
    and then falls linearly to 0."""
    shape = [(0.0, 0.0), (config.warmup, 1.0), (1.0, 0.0)]
    return RelativePiecewise(shape if config.warmup else shape[1:], config.tokens)


def set_learning_rates(optimizers: Optimizers, part: float) -> None:
    """Set each learning rate to this fraction of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = part * optimizer.defaults["lr"]
