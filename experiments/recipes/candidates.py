"""The recipes that were tried, each by what it has otherwise than the default one."""

from dataclasses import dataclass, field, replace
from typing import Any

from memformers.models.config import ModelConfig
from memformers.training.config import TrainConfig


@dataclass(frozen=True)
class Recipe:
    """How to train."""

    train: dict[str, Any] = field(default_factory=dict)
    """Settings of TrainConfig that differ from its defaults."""
    network: dict[str, Any] = field(default_factory=dict)
    """Settings of ModelConfig likewise."""

    def config(self, tokens: int, seed: int, data: str) -> TrainConfig:
        """The training of a Transformer-XL by this recipe."""
        model = replace(ModelConfig(model="transformer-xl"), **self.network)
        return replace(TrainConfig(tokens=tokens, seed=seed, data=data), model=model, **self.train)


FIRST = {"optimizer": "adamw", "learning_rate": 2e-3, "batch_size": 8, "stretch": 0, "beta2": 0.99}
"""The recipe of the first version."""

SMALLER = {"batch_size": 32}

CANDIDATES = {
    "default": Recipe(),
    "first version": Recipe(FIRST),
    "32 streams": Recipe(SMALLER),
    "16 streams": Recipe({"batch_size": 16}),
    "32 streams, AdamW for everything": Recipe({**SMALLER, "optimizer": "adamw"}),
    "32 streams, text from front to back": Recipe({**SMALLER, "stretch": 0}),
    "32 streams, Muon 0.03, AdamW's part 2e-3": Recipe(
        {**SMALLER, "muon_learning_rate": 0.03, "learning_rate": 2e-3}
    ),
    "Muon 0.06, AdamW's part 6e-3": Recipe({"muon_learning_rate": 0.06, "learning_rate": 6e-3}),
    "width 96": Recipe(network={"d_model": 96, "d_ff": 384}),
    "no weight decay": Recipe({"weight_decay": 0.0}),
    "memory of 128": Recipe(network={"mem_len": 128}),
    "6 layers of width 96": Recipe(network={"d_model": 96, "d_ff": 384, "n_layers": 6}),
}
"""By a short name, as the table has it."""
