"""Attention alone, forward and backward with the gradients of all six inputs, against the length of
memory: our kernel, the definition, and PyTorch's own attention with the positions as a bias."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from experiments.benchmarks.machine import (
    MatrixMultiply,
    forget_peak_memory,
    measure_in_child,
    peak_of_this_process,
    relative_error,
    resident_memory,
)
from memformers.kernels import blocked, naive

B, H, S, E = 2, 8, 512, 64
MEMORY_LENGTHS = (512, 1024, 2048, 4096, 8192)
TOLERANCE = 1e-5
"""The largest RMS error relative to the RMS value, of the output and of every gradient."""
LIMIT = 6 << 30
"""The approximate limit of an implementation's memory in bytes; if it would need more, it isn't run."""
Attention = Callable[..., Tensor]


def sdpa(query: Tensor, key: Tensor, value: Tensor, r: Tensor, *, u: Tensor, s: Tensor) -> Tensor:
    """The same attention by ``F.scaled_dot_product_attention``, positions as an explicit bias."""
    bias = position_bias(query, r, s).masked_fill(
        ~naive.causal_mask(query.shape[2], key.shape[2], query.device), -math.inf
    )
    return F.scaled_dot_product_attention(query + u[:, None], key, value, attn_mask=bias)


def position_bias(query: Tensor, r: Tensor, s: Tensor) -> Tensor:
    """(q_i·r_d + s_d) / √E for every query and key, ``[B, H, S, K]``."""
    position = torch.einsum("bhie,hde->bhid", query, r.flip(1)) + s.flip(1)[:, None]
    return naive.relative_shift(position) / math.sqrt(query.shape[-1])


OURS, NAIVE, SDPA = "ours, blocked", "ours, naive", "SDPA with a bias"
IMPLEMENTATIONS: dict[str, tuple[Attention, int]] = {
    OURS: (blocked.relative_attention, 1),
    NAIVE: (naive.relative_attention, 6),
    SDPA: (sdpa, 4),
}
"""Each with about how many tensors of all scores it may store at a time."""


def random_inputs(memory_len: int, queries: int = S) -> dict[str, Tensor]:
    """Inputs of all implementations, contiguous, which all take a gradient."""
    K = memory_len + queries
    shapes = {
        "query": (B, H, queries, E),
        "key": (B, H, K, E),
        "value": (B, H, K, E),
        "r": (H, K, E),
        "u": (H, E),
        "s": (H, K),
    }
    return {name: torch.randn(shape).requires_grad_() for name, shape in shapes.items()}


def forward_and_backward(attention: Attention, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The output and the gradient of each input, for an output gradient that is the same every time."""
    out = attention(**inputs)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, list(inputs.values()), grad)]


def check_parity(attention: Attention, inputs: dict[str, Tensor], expected: list[Tensor]) -> float:
    """The largest error against the definition's results; ValueError above the tolerance."""
    came = forward_and_backward(attention, inputs)
    errors = {
        name: relative_error(a, b)
        for name, a, b in zip(("output", *inputs), came, expected, strict=True)
    }  # fmt: skip
    where = max(errors, key=errors.__getitem__)
    if not errors[where] <= TOLERANCE:
        raise ValueError(f"an attention differs from the definition by {errors[where]:.1e} in {where}.")
    return errors[where]


def measure(memory_len: int, *, repeats: int, children: bool = True) -> dict[str, Any]:
    """Seconds of every forward and backward pass, ``torch.mm``'s rate in between, and extra memory."""
    torch.manual_seed(0)
    inputs = random_inputs(memory_len)
    K = memory_len + S
    scores = 4 * B * H * S * K
    absent = {
        name: f"would need about {copies * scores / (1 << 30):.1f} GiB"
        for name, (_, copies) in IMPLEMENTATIONS.items()
        if copies * scores > LIMIT
    }
    present = {name: one for name, (one, _) in IMPLEMENTATIONS.items() if name not in absent}
    errors = {}
    if NAIVE in present:
        expected = forward_and_backward(present[NAIVE], inputs)
        errors = {name: check_parity(one, inputs, expected) for name, one in present.items() if name != NAIVE}
    matrix_multiply = MatrixMultiply()
    seconds: dict[str, list[float]] = {name: [] for name in present}
    rates = []
    for _ in tqdm(range(repeats), desc=f"attention, M = {memory_len}", leave=False):
        for name, one in present.items():
            start = time.perf_counter()
            forward_and_backward(one, inputs)
            seconds[name].append(time.perf_counter() - start)
            rates.append(matrix_multiply.rate())
    return {
        "memory_len": memory_len,
        "keys": K,
        # Forward: 3 products, of content, of positions and with values; backward: 2 of the same size for
        # each.
        "flops": 9 * 2 * B * H * S * K * E,
        "errors": errors,
        "not run": absent,
        "seconds": seconds,
        "torch.mm, FLOP/s": rates,
        "extra memory": {
            name: measure_in_child("attention", name, str(memory_len)) for name in present
        } if children else {},
    }  # fmt: skip


def extra_memory(name: str, memory_len: int) -> int | None:
    """The most bytes that one forward and backward pass needs besides its inputs; call it in a separate
    process. A small pass comes first, so that PyTorch's own initialization isn't counted."""
    attention, _ = IMPLEMENTATIONS[name]
    forward_and_backward(attention, random_inputs(64, queries=64))
    inputs = random_inputs(memory_len)
    forget_peak_memory()
    before = resident_memory()
    forward_and_backward(attention, inputs)
    peak = peak_of_this_process()
    return None if before is None or peak is None else peak - before
