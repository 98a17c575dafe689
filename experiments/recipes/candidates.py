"""The recipes that were tried, each by its differences to the default one."""

from dataclasses import asdict, replace
from typing import Any

from memformers.comparison.arms import settings_of
from memformers.comparison.text import TEXT
from memformers.models.config import ModelConfig
from memformers.runs.plan import Arm
from memformers.training.config import TrainConfig

DEFAULT = TrainConfig(model=ModelConfig(model="transformer-xl"), evaluations=1)
RATES = ("learning_rate", "muon_learning_rate", "beta2", "warmup", "weight_decay", "chunk_len")
"""Settings that change what is learned from a step, but not its work."""
CANDIDATES: dict[str, dict[str, Any]] = {
    "default": {},
    "first version": {
        "optimizer": "adamw", "learning_rate": 2e-3, "batch_size": 8, "chunk_len": 0, "beta2": 0.99,
        "precision": "float32", "memory_warmup": 0.0,
    },
    "full memory from the beginning": {"memory_warmup": 0.0},
    "memory grows over a quarter": {"memory_warmup": 0.25},
    "memory grows over all of it": {"memory_warmup": 1.0},
    "float32": {"precision": "float32"},
    "AdamW for everything": {"optimizer": "adamw"},
    "32 streams": {"batch_size": 32},
    "Muon 0.02, AdamW's part 2e-3": {"muon_learning_rate": 0.02, "learning_rate": 2e-3},
    "Muon 0.06, AdamW's part 6e-3": {"muon_learning_rate": 0.06, "learning_rate": 6e-3},
    "warm-up 10 %": {"warmup": 0.1},
    "β₂ 0.999": {"beta2": 0.999},
    "no weight decay": {"weight_decay": 0.0},
    "dropout 0.05": {"model.dropout": 0.05},
    "memory of 32": {"model.mem_len": 32},
    "memory of 128": {"model.mem_len": 128},
    "segments of 128": {"batch_size": 32, "model.segment_len": 128},
    "width 192": {"model.d_model": 192, "model.d_ff": 768, "model.heads": 6},
    "6 layers": {"model.n_layers": 6},
    "text from front to back": {"chunk_len": 0},
}  # fmt: skip
"""The recipes by their short names in the table."""


def arm_of(recipe: str, **more: Any) -> Arm:
    """The ``recipe`` as an arm, with ``more`` settings."""
    number = list(CANDIDATES).index(recipe)
    return Arm(f"recipe-{number:02}", CANDIDATES[recipe] | more, recipe)


def training_of(recipe: str) -> TrainConfig:
    """A training by the ``recipe``."""
    return TEXT.parse(settings_of(arm_of(recipe), asdict(DEFAULT)), recipe)


def work_of(recipe: str) -> TrainConfig:
    """A value that is equal for recipes whose steps have the same work: they differ in rates, or in the
    data."""
    return replace(training_of(recipe), **{name: getattr(DEFAULT, name) for name in RATES})
