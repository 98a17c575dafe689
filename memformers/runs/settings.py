"""Which settings a training uses."""

from collections.abc import Mapping
from typing import Any

OF_A_COMPRESSION = {
    f"model.{name}" for name in ("c_mem_len", "compression_rate", "compression", "compression_start",
                                 "compression_loss", "bptt")
}  # fmt: skip
LEARNING = ("conv", "dilated")
"""Compressions with weights, which have a start."""


def unused(config: Mapping[str, Any]) -> set[str]:
    """The names of those settings of a training that its model or optimizer doesn't use, dotted as those of
    ``config``."""
    model, found = config.get("model.model"), set()
    if model != "compressive":
        found |= OF_A_COMPRESSION
    elif config.get("model.compression") not in LEARNING:
        found.add("model.compression_start")
        found |= set() if ":" in str(config.get("model.compression")) else {"model.bptt"}
    if model != "transformer-xl":
        found.add("model.same_length")
    if model == "transformer":
        found |= {"model.mem_len", "memory_warmup", "tbptt"}
    if config.get("model.positions") != "sinusoidal":
        found |= {"model.position_features", "model.clamp_len"}
    if config.get("model.embedding") != "adaptive":
        found |= {name for name in config if name.startswith("model.adaptive.")}
    if config.get("optimizer") != "muon":
        found.add("muon_learning_rate")
    return found
