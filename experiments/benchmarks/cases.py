"""The shapes of the models whose training steps are measured."""

from dataclasses import dataclass, replace
from typing import Any

from memformers import ModelConfig
from memformers.comparison.arms import keys_of_layers
from memformers.models.config import ModelName

VOCABULARY = 65
MODELS: tuple[ModelName, ...] = ("transformer-xl", "compressive")
FIELDS = ["d_model", "heads", "d_ff", "n_layers", "segment_len", "mem_len", "c_mem_len", "compression_rate"]
SIZES = {  # D, heads, FFN, layers, S, M, C, c, B, steps
    "seed": (128, 4, 256, 6, 8, 8, 128, 2, 32, 40),
    "compare": (128, 4, 512, 4, 64, 64, 64, 4, 16, 16),
    "recall": (64, 4, 256, 2, 64, 64, 64, 4, 32, 24),
    "mid": (256, 4, 1024, 4, 128, 128, 128, 4, 8, 12),
    "base": (512, 8, 2048, 4, 512, 512, 128, 4, 2, 7),
    "long": (256, 4, 1024, 2, 512, 2048, 512, 4, 2, 9),
}
COMPILED = ("seed", "mid")
"""The cases whose Transformer-XL is compiled too, which takes half a minute or more."""
WITH_LUCIDRAINS = ("seed", "mid", "base")
"""The cases in which compressive-transformer-pytorch is measured too."""
EQUAL_KEYS = ("compare", "recall")
"""The cases in which Transformer-XL's memory is as long as both of the Compressive Transformer's, M + C."""


@dataclass(frozen=True)
class Case:
    """A model's shape, its batch, and the number of its steps that are timed."""

    name: str
    config: ModelConfig
    batch_size: int
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.config.segment_len * self.batch_size

    @property
    def segments_to_fill(self) -> int:
        """Segments after which both memories are full."""
        return -(-self.config.remembered_positions // self.config.segment_len) + 1

    def of(self, model: ModelName) -> "Case":
        """The same case for ``model``."""
        longer = self.name in EQUAL_KEYS and model == "transformer-xl"
        mem_len = keys_of_layers(self.config) if longer else self.config.mem_len
        return replace(self, config=replace(self.config, model=model, mem_len=mem_len))


def case(name: str) -> Case:
    """The case with this name; positions are labml-nn's learned ones, which both sides have."""
    *sizes, batch_size, steps = SIZES[name]
    settings: dict[str, Any] = dict(zip(FIELDS, sizes, strict=True))
    return Case(name, ModelConfig(vocab_size=VOCABULARY, positions="learned", **settings), batch_size, steps)


CASES = {name: case(name) for name in SIZES}
