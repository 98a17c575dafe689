"""The recipes that were tried, each by its differences to the default one."""

from dataclasses import dataclass, field, replace
from typing import Any

from memformers.models.config import ModelConfig
from memformers.training.config import TrainConfig

RATES = ("learning_rate", "muon_learning_rate", "beta2", "warmup", "weight_decay", "chunk_len")
"""Settings that change what is learned from a step, but not its work."""


@dataclass(frozen=True)
class Recipe:
    """A recipe: the settings of a training."""

    train: dict[str, Any] = field(default_factory=dict)
    """Settings of TrainConfig that differ from its defaults."""
    network: dict[str, Any] = field(default_factory=dict)
    """Settings of ModelConfig that differ from its defaults."""

    def config(self, tokens: int, seed: int, data: str) -> TrainConfig:
        """The training of a Transformer-XL by this recipe."""
        model = replace(ModelConfig(model="transformer-xl"), **self.network)
        return replace(TrainConfig(tokens=tokens, seed=seed, data=data), model=model, **self.train)

    @property
    def work(self) -> TrainConfig:
        """A value that is equal for recipes whose steps have the same work: they differ in rates, or in the
        data."""
        same = TrainConfig()
        return replace(
            self.config(tokens=1, seed=0, data=""),
            **{name: getattr(same, name) for name in RATES},
        )


FIRST = {
    "optimizer": "adamw", "learning_rate": 2e-3, "batch_size": 8, "chunk_len": 0, "beta2": 0.99,
    "precision": "float32", "memory_warmup": 0.0,
}  # fmt: skip
"""The recipe of the first version."""

CANDIDATES = {
    "default": Recipe(),
    "first version": Recipe(FIRST),
    "full memory from the beginning": Recipe({"memory_warmup": 0.0}),
    "memory grows over a quarter": Recipe({"memory_warmup": 0.25}),
    "memory grows over all of it": Recipe({"memory_warmup": 1.0}),
    "float32": Recipe({"precision": "float32"}),
    "AdamW for everything": Recipe({"optimizer": "adamw"}),
    "32 streams": Recipe({"batch_size": 32}),
    "Muon 0.02, AdamW's part 2e-3": Recipe({"muon_learning_rate": 0.02, "learning_rate": 2e-3}),
    "Muon 0.06, AdamW's part 6e-3": Recipe({"muon_learning_rate": 0.06, "learning_rate": 6e-3}),
    "warm-up 10 %": Recipe({"warmup": 0.1}),
    "β₂ 0.999": Recipe({"beta2": 0.999}),
    "no weight decay": Recipe({"weight_decay": 0.0}),
    "dropout 0.05": Recipe(network={"dropout": 0.05}),
    "memory of 32": Recipe(network={"mem_len": 32}),
    "memory of 128": Recipe(network={"mem_len": 128}),
    "segments of 128": Recipe({"batch_size": 32}, network={"segment_len": 128}),
    "width 192": Recipe(network={"d_model": 192, "d_ff": 768, "heads": 6}),
    "6 layers": Recipe(network={"n_layers": 6}),
    "text from front to back": Recipe({"chunk_len": 0}),
}
"""The recipes by their short names in the table."""
