"""The memories that are tried on a text."""

from dataclasses import replace

from memformers.comparison import CompareConfig
from memformers.models.config import ModelConfig
from memformers.training.config import TrainConfig

BASE = ModelConfig(mem_len=64, c_mem_len=32)
"""The network of all arms, and the memory of Transformer-XL, which the others are compared with."""
SLOTS = "model=compressive mem_len=32 c_mem_len=32"
LENGTHS = ("M-32: mem_len=32", "M-128: mem_len=128", "M-256: mem_len=256")
"""Transformer-XL with other lengths of memory."""
COMPRESSED = (f"slots-32-32: {SLOTS}", "slots-64-64: model=compressive mem_len=64 c_mem_len=64")
"""The Compressive Transformer with memory and slots of these lengths; c = 4, as by default."""
GROWING = (
    "M-64-grows: memory_warmup=0.5",
    "M-256-grows: mem_len=256 memory_warmup=0.5",
    f"slots-32-32-grows: {SLOTS} memory_warmup=0.5",
    "slots-64-64-grows: model=compressive mem_len=64 c_mem_len=64 memory_warmup=0.5",
)
"""Memories that grow over the first half of the training; all others have their length from the beginning."""
CAUSES = (
    f"slots-32-32-mean-start: {SLOTS} compression_start=mean",
    f"slots-32-32-c2: {SLOTS} compression_rate=2",
    f"slots-32-32-c8: {SLOTS} compression_rate=8",
)
"""Slots whose convolution starts as the mean, and slots of fewer and of more positions."""


def comparison(train: TrainConfig, *, seeds: int, scale: float, causes: bool) -> CompareConfig:
    """The comparison of all memories by the training ``train``, whose network is replaced; with ``causes``,
    with more kinds of slots."""
    return CompareConfig(
        train=replace(train, model=BASE, memory_warmup=0.0),
        models=("transformer", "transformer-xl"),
        arms=LENGTHS + COMPRESSED + GROWING + (CAUSES if causes else ()),
        equal_keys=False,
        seeds=seeds,
        scale=scale,
    )
