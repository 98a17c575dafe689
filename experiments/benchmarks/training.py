"""Seconds of whole training steps, with clip and AdamW, after both sides were shown to agree: ours, ours in
bfloat16, and labml-nn's."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmarks.measuring import Result, beside_products, check_errors, relative_error
from experiments.benchmarks.peers import LABML, TOLERANCE, check_parity, two_alike
from experiments.scaling import step_of
from memformers import ModelConfig
from memformers.comparison.arms import keys_of_layers
from memformers.models.config import ModelName
from memformers.training.config import TrainConfig

MODELS: tuple[ModelName, ...] = ("transformer-xl", "compressive")
VOCABULARY = 65
SIZES = {
    # D, heads, FFN, layers, S, M, C, c, B, steps
    "seed": (128, 4, 256, 6, 8, 8, 128, 2, 32, 40),
    "compare": (128, 4, 512, 4, 64, 64, 64, 4, 16, 16),
    "recall": (64, 4, 256, 2, 64, 64, 64, 4, 32, 24),
    "mid": (256, 4, 1024, 4, 128, 128, 128, 4, 8, 12),
    "base": (512, 8, 2048, 4, 512, 512, 128, 4, 2, 7),
    "long": (256, 4, 1024, 2, 512, 2048, 512, 4, 2, 9),
}
EQUAL_KEYS = ("compare", "recall")
"""Sizes in which Transformer-XL's memory has M + C positions."""
OURS = "ours"
BFLOAT16 = "ours, bfloat16"
LABML_FUSED = "labml-nn, fused AdamW"
BFLOAT16_TOLERANCE = 5e-2
"""The largest relative RMS error of logits under autocast: 8 bits a number, through several layers."""


@dataclass(frozen=True)
class Case:
    """A model's shape, its batch, and the number of its steps that are timed."""

    name: str
    config: ModelConfig
    batch_size: int
    steps: int

    @classmethod
    def of(cls, name: str, model: ModelName) -> "Case":
        """Positions are labml-nn's learned ones, which both sides have."""
        # labml-nn has no sinusoidal positions.
        D, n_heads, d_ff, layers, S, M, C, c, B, steps = SIZES[name]
        config = ModelConfig(
            model, vocab_size=VOCABULARY, positions="learned", d_model=D, n_heads=n_heads, d_ff=d_ff,
            n_layers=layers, segment_len=S, mem_len=M, c_mem_len=C, compression_rate=c,
        )  # fmt: skip
        if name in EQUAL_KEYS and model == "transformer-xl":
            config = replace(config, mem_len=keys_of_layers(config))
        return cls(name, config, B, steps)

    def batches(self) -> list[Tensor]:
        shape = (self.config.segment_len, self.batch_size)
        return [torch.randint(VOCABULARY, shape) for _ in range(4)]


@dataclass
class Trainer:
    model: nn.Module
    batches: list[Tensor]
    bfloat16: bool = False
    fused: bool = True
    memory: Any = None
    steps: int = 0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.fused)

    def read(self, number: int) -> tuple[Tensor, Tensor]:
        tokens = self.batches[number % len(self.batches)]
        logits, self.memory, reconstruction_loss = self.model(tokens, self.memory)
        return logits, reconstruction_loss

    def step(self) -> Tensor:
        tokens = self.batches[self.steps % len(self.batches)]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            logits, reconstruction_loss = self.read(self.steps)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + reconstruction_loss
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.steps += 1
        return logits.detach()


def fill_memories(case: Case, sides: Mapping[str, Trainer]) -> None:
    """Read without learning until all memories of a ``case`` are full."""
    n_segments = -(-case.config.remembered_positions // case.config.segment_len) + 1
    with torch.no_grad():
        for number in range(n_segments):
            for trainer in sides.values():
                trainer.read(number)


def build_sides(case: Case) -> tuple[dict[str, Trainer], float]:
    """The models with full memories, and the error of ours beside labml-nn's."""
    batches = case.batches()
    ours, theirs = two_alike(case.config)
    error = check_parity(ours, theirs, batches)
    sides = {
        OURS: Trainer(ours, batches),
        LABML: Trainer(theirs, batches, fused=False),  # PyTorch's default on CPU
        LABML_FUSED: Trainer(deepcopy(theirs), batches),
        BFLOAT16: Trainer(deepcopy(ours), batches, bfloat16=True),
    }
    fill_memories(case, sides)
    return sides, error


def check_first_step(sides: Mapping[str, Trainer]) -> dict[str, float]:
    """The error of the logits of the first step of each side, beside ours."""
    errors = {}
    expected = sides[OURS].step()
    for side in (LABML, LABML_FUSED, BFLOAT16):
        error = relative_error(sides[side].step(), expected)
        tolerance = BFLOAT16_TOLERANCE if side == BFLOAT16 else TOLERANCE
        errors[side] = check_errors({"logits of the first step": error}, tolerance, side)
    return errors


def measure(case: Case, *, quick: bool = False) -> Result:
    torch.manual_seed(0)
    sides, parity_error = build_sides(case)
    errors = check_first_step(sides)
    for _ in range(0 if quick else 2):  # warms up
        for trainer in sides.values():
            trainer.step()
    steps = {side: trainer.step for side, trainer in sides.items()}
    model = case.config.model
    return {
        "case": case.name,
        "model": model,
        "tokens": case.config.segment_len * case.batch_size,
        "flops": step_of(TrainConfig(case.config, batch_size=case.batch_size), 1)["operations"],
        "parity error": parity_error,
        "errors": errors,
        **beside_products(steps, 2 if quick else case.steps, f"{case.name} {model}"),
    }
