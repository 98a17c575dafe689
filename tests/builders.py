"""Small models and configs for tests."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memformers import (
    CompressiveTransformer,
    Conv1dCompression,
    FeedForward,
    MemoryLayer,
    RelativeMultiHeadAttention,
    TransformerXL,
)
from memformers.common.fields import replace_nested
from memformers.comparison.recall.setup import SETTINGS, RecallSetup
from memformers.comparison.recall.task import layer_reach
from memformers.evaluation import conformance
from memformers.models.config import SETTING_MODELS, ModelConfig
from memformers.models.language_model import MemoryLM
from memformers.models.layers import Norm
from memformers.training.config import EvaluationConfig, TrainConfig

SMALL = ModelConfig(**conformance.SMALL | {"segment_len": 7, "mem_len": 5, "compression_rate": 3})
SMALL_SIZES = [
    "--max-tokens", "1500", "--batch-size", "4", "--evaluations", "1", "--d-model", "16", "--n-heads", "2",
    "--d-ff", "16", "--n-layers", "1", "--segment-len", "16", "--mem-len", "16",
]  # fmt: skip
# Arguments of the command for seconds of training.
SMALL_RUN = ["--data", "builtin", *SMALL_SIZES]
COMPARED = ("transformer", "transformer-xl", "compressive")
MODELS = (*COMPARED, "selective")


def small_lm(model: str, **changes: Any) -> MemoryLM:
    """A MemoryLM in which no weight is zero, with those of ``changes`` that it uses."""
    used = {name: value for name, value in changes.items() if model in SETTING_MODELS.get(name, (model,))}
    lm = MemoryLM(replace(SMALL, model=model, **used))
    fill_zeros(lm)
    return lm


def layer_parts(norm: Norm = "pre", **attention: Any) -> dict[str, Any]:
    """Arguments of a small layer that drops nothing."""
    return {
        "d_model": 12,
        "self_attn": RelativeMultiHeadAttention(3, 12, 0.0, **attention),
        "feed_forward": FeedForward(12, 16, 0.0),
        "dropout_prob": 0.0,
        "norm": norm,
    }


def small_xl(n_layers: int = 2, norm: Norm = "pre", mem_len: int = 0) -> TransformerXL:
    return fill_zeros(TransformerXL(MemoryLayer(**layer_parts(norm)), n_layers, mem_len))


def small_compressive(norm: Norm = "pre", mem_len: int = 0, c_mem_len: int = 0) -> CompressiveTransformer:
    """Two layers with slots of three positions."""
    layer = MemoryLayer(**layer_parts(norm))
    return fill_zeros(CompressiveTransformer(layer, 2, mem_len, c_mem_len, Conv1dCompression(3, 12)))


MINE = """
from memformers import LayerMemory, MemoryRule


class Mine(MemoryRule):
    n_slots = 1

    def update(self, past, x, context):
        window = self.push(past, x, context)
        return LayerMemory(window.mem, window.slots + STEP), None
"""


def write_memory(path: Path | str, head: str = "STEP = 1", tail: str = "") -> Path:
    """Write the file of a user's memory ``Mine``, in a folder that need not exist: the newest ``mem_len``
    inputs, and one slot, to which each segment adds what the lines ``head`` define as ``STEP``. It ends with
    ``tail``."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}\n{MINE}{tail}", encoding="utf-8")
    return path


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def fill_zeros(module: Any) -> Any:
    """Give parameters that start at zero random values, so that a test sees what they do."""
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():
                parameter.normal_(std=0.5)
    return module


def small_training(**changes: Any) -> TrainConfig:
    """Seconds of training on the built-in corpus."""
    defaults = TrainConfig(
        model=replace(SMALL, vocab_size=None, d_model=16, n_heads=2, segment_len=16, mem_len=16),
        data="builtin",
        max_tokens=2_000,
        batch_size=4,
        memory_warmup=0.0,
        evaluation=EvaluationConfig(evaluations=2, log_every=5),
    )
    model = changes.pop("model", None)
    if isinstance(model, str):
        changes["model"] = replace(defaults.model, model=model)
    return replace_nested(defaults, **changes)


NEAR = SETTINGS["near"]


def tiny_recall() -> RecallSetup:
    """A recall experiment of moments, with memories like those of the near setting."""
    model = replace(
        NEAR.base.model, d_model=8, n_heads=2, d_ff=16, n_layers=1, segment_len=32, mem_len=32, c_mem_len=32
    )
    base = replace_nested(
        NEAR.base, model=model, max_tokens=256, batch_size=4, evaluations=1, log_every=1, device="cpu",
        evaluated=32, reach=layer_reach(model),
    )  # fmt: skip
    return replace(NEAR, base=base)
