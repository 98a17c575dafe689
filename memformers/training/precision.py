"""The precision of a training's matrix products for ``precision="auto"``."""

from dataclasses import replace

import torch

from memformers.common.machine import multiplies_bfloat16_faster
from memformers.training.config import TrainConfig
from memformers.training.ranks import Distributed


def with_precision(
    config: TrainConfig, device: torch.device, ranks: Distributed | None = None
) -> TrainConfig:
    """``config`` with bfloat16 in place of ``precision="auto"`` if ``device`` multiplies it faster, else
    float32; the first of several ``ranks`` decides."""
    if config.precision != "auto":
        return config
    faster = (ranks or Distributed()).all_gather(multiplies_bfloat16_faster(device))[0]
    return replace(config, precision="bfloat16" if faster else "float32")
