"""Attention by the flash and the blocked kernel, forward and backward, against the number of position
features: the table that keeps both."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.measuring import Result, in_turns, one_thread
from experiments.benchmarks.training import SIZES
from memformers.kernels import blocked, flash
from memformers.models.sinusoids import sinusoids

NAMES = ("compare", "mid", "base", "long")
"""Of the sizes of training."""
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLASH = "flash"
BLOCKED = "blocked"


def features_of(d_model: int, d_head: int) -> dict[str, int]:
    """The numbers of position features, by their names."""
    return {"16": 16, "E": d_head, "2E": 2 * d_head, "D": d_model}


def measure(name: str, precision: str, *, rounds: int) -> Result:
    """Seconds of CPU time of one thread, by features and kernel."""
    torch.manual_seed(0)
    D, H, _, _, S, M, C, _, B, _ = SIZES[name]
    # The number of keys that a Transformer-XL of this size has in the benchmark of training.
    K = S + M + (C if name == "compare" else 0)
    E = D // H
    dtype = PRECISIONS[precision]

    def draw(length: int) -> Tensor:
        """``[B, H, length, E]``, in the attention module's order in memory."""
        return torch.randn(length, B, H, E).to(dtype).movedim(0, 2).requires_grad_()

    inputs = {"query": draw(S), "key": draw(K), "value": draw(K)}
    inputs |= {name: torch.randn(H, E).requires_grad_() for name in ("u", "v")}
    grad = torch.randn(S, B, H, E).to(dtype).movedim(0, 2)

    seconds = {}
    for label, P in features_of(D, E).items():
        w = torch.randn(H, E, P).requires_grad_()
        table = sinusoids(K, P).float()
        sides: dict[str, Callable[[], object]] = {
            FLASH: partial(by_flash, inputs, w, table, grad),
            BLOCKED: partial(by_blocked, inputs, w, table, grad),
        }
        in_turns(sides, 1)  # warms up
        seconds[label] = in_turns(sides, rounds, f"{name}, {precision}, P = {P}", clock=time.process_time)
    return {"case": name, "precision": precision, "queries": S, "keys": K, "seconds": seconds}


def by_flash(inputs: dict[str, Any], w: Tensor, table: Tensor, grad: Tensor) -> None:
    output = flash.relative_attention(**inputs, w=w, table=table)
    torch.autograd.grad(output, [*inputs.values(), w], grad)


def by_blocked(inputs: dict[str, Any], w: Tensor, table: Tensor, grad: Tensor) -> None:
    r = torch.einsum("hep,kp->hke", w, table).to(inputs["key"].dtype)
    output = blocked.relative_attention(**inputs, r=r)
    torch.autograd.grad(output, [*inputs.values(), w], grad)


def measure_all(*, quick: bool) -> list[Result]:
    results = []
    with one_thread():
        for precision in PRECISIONS:
            for name in NAMES[:1] if quick else NAMES:
                results.append(measure(name, precision, rounds=2 if quick else 7))
    return results
