"""What learns from a gradient, and how fast."""

from collections.abc import Callable

import torch
from labml_helpers.schedule import RelativePiecewise
from torch import nn

from memformers.training.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; only the matrices of linear maps and convolutions decay, since nothing pulls an
    embedding, a bias, a norm or a position towards zero by right."""
    maps = (m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d))
    decaying = {id(m.weight): m.weight for m in maps}
    others = [p for p in model.parameters() if id(p) not in decaying]
    return torch.optim.AdamW(
        [
            {"params": list(decaying.values()), "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(0.9, 0.99),
        fused=True,
    )


def learning_rate_schedule(config: TrainConfig) -> Callable[[int], float]:
    """The learning rate at a number of tokens: up from 0, then down to 0, both in straight lines."""
    shape = [(0.0, 0.0), (config.warmup, 1.0), (1.0, 0.0)]
    factor = RelativePiecewise(shape if config.warmup else shape[1:], config.tokens)
    return lambda tokens: config.learning_rate * factor(tokens)
