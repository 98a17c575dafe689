"""The shapes of the models whose training steps are measured."""

from dataclasses import dataclass, replace

from memformers import ModelConfig
from memformers.models.config import ModelName
from memformers.training.arms import keys_of_layers

VOCABULARY = 65
MODELS: tuple[ModelName, ...] = ("transformer-xl", "compressive")


@dataclass(frozen=True)
class Case:
    """A model's shape, its batch, and the number of its steps that are timed."""

    name: str
    config: ModelConfig
    batch_size: int
    steps: int
    compiled: bool = False
    """Whether torch.compile is measured too; compiling takes half a minute or more."""
    lucidrains: bool = False
    """Whether compressive-transformer-pytorch is measured too."""
    equal_keys: bool = False
    """Whether Transformer-XL's memory is as long as the Compressive Transformer's memory and compressed
    memory together, M + C."""

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
        longer = self.equal_keys and model == "transformer-xl"
        mem_len = keys_of_layers(self.config) if longer else self.config.mem_len
        return replace(self, config=replace(self.config, model=model, mem_len=mem_len))


def shape(**sizes: int) -> ModelConfig:
    """A model with labml-nn's learned positions, which both sides have."""
    return ModelConfig(vocab_size=VOCABULARY, positions="learned", **sizes)  # type: ignore[arg-type]


CASES = {
    "seed": Case(
        "seed",
        shape(d_model=128, heads=4, d_ff=256, n_layers=6, segment_len=8, mem_len=8, c_mem_len=128,
              compression_rate=2),
        batch_size=32, steps=40, compiled=True, lucidrains=True,
    ),
    "compare": Case(
        "compare",
        shape(d_model=128, heads=4, d_ff=512, n_layers=4, segment_len=64, mem_len=64, c_mem_len=64,
              compression_rate=4),
        batch_size=16, steps=16, equal_keys=True,
    ),
    "recall": Case(
        "recall",
        shape(d_model=64, heads=4, d_ff=256, n_layers=2, segment_len=64, mem_len=64, c_mem_len=64,
              compression_rate=4),
        batch_size=32, steps=24, equal_keys=True,
    ),
    "mid": Case(
        "mid",
        shape(d_model=256, heads=4, d_ff=1024, n_layers=4, segment_len=128, mem_len=128, c_mem_len=128,
              compression_rate=4),
        batch_size=8, steps=12, compiled=True, lucidrains=True,
    ),
    "base": Case(
        "base",
        shape(d_model=512, heads=8, d_ff=2048, n_layers=4, segment_len=512, mem_len=512, c_mem_len=128,
              compression_rate=4),
        batch_size=2, steps=7, lucidrains=True,
    ),
    "long": Case(
        "long",
        shape(d_model=256, heads=4, d_ff=1024, n_layers=2, segment_len=512, mem_len=2048, c_mem_len=512,
              compression_rate=4),
        batch_size=2, steps=9,
    ),
}  # fmt: skip
