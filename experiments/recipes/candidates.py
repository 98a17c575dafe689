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

CANDIDATES = {
    "default": Recipe(),
    "first version": Recipe(FIRST),
    "AdamW for everything": Recipe({"optimizer": "adamw"}),
    "text from front to back": Recipe({"stretch": 0}),
    "16 streams": Recipe({"batch_size": 16}),
    "64 streams": Recipe({"batch_size": 64}),
    "Muon 0.03, AdamW's part 2e-3": Recipe({"muon_learning_rate": 0.03, "learning_rate": 2e-3}),
    "Muon 0.06, AdamW's part 6e-3": Recipe({"muon_learning_rate": 0.06, "learning_rate": 6e-3}),
    "no weight decay": Recipe({"weight_decay": 0.0}),
    "weight decay 0.3": Recipe({"weight_decay": 0.3}),
    "memory of 32": Recipe(network={"mem_len": 32}),
    "memory of 128": Recipe(network={"mem_len": 128}),
    "segments of 32, 64 streams": Recipe({"batch_size": 64}, {"segment_len": 32}),
    "width 96": Recipe(network={"d_model": 96, "d_ff": 384}),
    "6 layers of width 96": Recipe(network={"d_model": 96, "d_ff": 384, "n_layers": 6}),
}
"""By a short name, as the table has it."""
