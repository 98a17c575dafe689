"""Attention alone, forward and backward with all gradients, against the length of memory, by each kernel."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.measuring import (
    Result,
    beside_products,
    check_errors,
    in_child,
    memory_above,
    relative_error,
)
from memformers.kernels import blocked, flash, naive, sdpa
from memformers.models.sinusoids import sinusoids

# Streams, heads, queries and features of a head.
B, H, S, E = 2, 8, 512, 64
P = 16
"""Position features."""
MEMORY_LENGTHS = (512, 1024, 2048, 4096, 8192)
TOLERANCE = 1e-5
"""The largest relative RMS error, of the output and of every gradient."""
Attention = Callable[..., Tensor]

FLASH = "ours, flash"
BLOCKED = "ours, blocked"
NAIVE = "ours, naive"
SDPA = "SDPA with a bias"


def by_vectors(kernel: Attention) -> Attention:
    """A kernel that takes the vector r of each distance, from the factors of r."""

    def attention(w: Tensor, **arguments: Tensor) -> Tensor:
        table = sinusoid_table(len(arguments["key"][0, 0]))
        return kernel(r=torch.einsum("hep,kp->hke", w, table), **arguments)

    return attention


def flash_attention(**arguments: Any) -> Tensor:
    return flash.relative_attention(table=sinusoid_table(arguments["key"].shape[2]), **arguments)


@cache
def sinusoid_table(K: int) -> Tensor:
    return sinusoids(K, P).float()


IMPLEMENTATIONS: dict[str, Attention] = {
    FLASH: flash_attention,
    BLOCKED: by_vectors(blocked.relative_attention),
    NAIVE: by_vectors(naive.relative_attention),
    SDPA: by_vectors(sdpa.relative_attention),
}


def random_inputs(memory_len: int, queries: int = S) -> dict[str, Tensor]:
    K = memory_len + queries
    shapes: dict[str, tuple[int, ...]] = {
        "query": (B, H, queries, E),
        "key": (B, H, K, E),
        "value": (B, H, K, E),
        "w": (H, E, P),
        "u": (H, E),
        "v": (H, E),
    }
    return {name: torch.randn(shape).requires_grad_() for name, shape in shapes.items()}


def forward_and_backward(attention: Attention, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The output, and the gradient of every input from one of the output that differs everywhere."""
    output = attention(**inputs)
    grad = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device)
    grads = torch.autograd.grad(output, list(inputs.values()), grad.view(output.shape))
    return [output.detach(), *grads]


def check_parity(attention: Attention, inputs: dict[str, Tensor], expected: list[Tensor]) -> float:
    """The largest error against the definition's results; ValueError above the tolerance."""
    results = forward_and_backward(attention, inputs)
    errors = {}
    for name, result, wanted in zip(("output", *inputs), results, expected, strict=True):
        errors[name] = relative_error(result, wanted)
    return check_errors(errors, TOLERANCE, "an attention that should equal the definition")


def measure(memory_len: int, *, repeats: int) -> Result:
    torch.manual_seed(0)
    K = memory_len + S
    inputs = random_inputs(memory_len)

    # All compute the same.
    expected = forward_and_backward(IMPLEMENTATIONS[NAIVE], inputs)
    errors = {}
    for name, attention in IMPLEMENTATIONS.items():
        if name != NAIVE:
            errors[name] = check_parity(attention, inputs, expected)

    sides = {}
    for name, attention in IMPLEMENTATIONS.items():
        sides[name] = partial(forward_and_backward, attention, inputs)
    return {
        "memory_len": memory_len,
        "keys": K,
        # Three products forward, of content, of positions and with values; two for each backward. The flash
        # kernel's products of positions have P features in place of E.
        "flops": 9 * 2 * B * H * S * K * E,
        "errors": errors,
        **beside_products(sides, repeats, f"attention, M = {memory_len}"),
        "extra memory": {name: in_child(extra_memory, name, memory_len) for name in sides},
    }


def extra_memory(name: str, memory_len: int) -> int | None:
    """The most bytes of one pass besides its inputs, after a small one; call it in another process."""
    torch.manual_seed(0)
    attention = IMPLEMENTATIONS[name]
    forward_and_backward(attention, random_inputs(64, queries=64))
    inputs = random_inputs(memory_len)
    return memory_above(lambda: forward_and_backward(attention, inputs))
