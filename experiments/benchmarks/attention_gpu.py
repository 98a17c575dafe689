"""Attention alone on a GPU, in bfloat16: our fused kernel, FlexAttention with the positions as a bias,
and PyTorch's attention without positions, which is a lower bound of the time."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.benchmarks.attention import S, forward_and_backward, position_bias
from experiments.benchmarks.attention import random_inputs as random_inputs_on_cpu
from experiments.benchmarks.machine import first_line, relative_error
from memformers.kernels import naive

TOLERANCE = 5e-3
"""The largest RMS error of the output relative to the RMS value, against the definition in float32."""
FUSED, FLEX, FLOOR = "ours, fused", "FlexAttention with a bias", "SDPA without positions"


def implementations(K: int) -> dict[str, Callable[..., Tensor]]:
    """Each by name, for S queries over K keys."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from memformers.kernels import fused

    compiled = torch.compile(flex_attention)
    visible = create_block_mask(lambda b, h, i, j: i + (K - S) >= j, None, None, S, K, device="cuda")

    def flex(query: Tensor, key: Tensor, value: Tensor, r: Tensor, *, u: Tensor, s: Tensor) -> Tensor:
        bias = position_bias(query, r, s)

        def with_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + bias[b, h, i, j]

        return compiled(query + u[:, None], key, value, score_mod=with_bias, block_mask=visible)

    def floor(query: Tensor, key: Tensor, value: Tensor, r: Tensor, *, u: Tensor, s: Tensor) -> Tensor:
        unused = 0.0 * (r.sum() + s.sum())  # keeps their gradients defined
        return F.scaled_dot_product_attention(query + u[:, None], key, value) + unused

    return {FUSED: fused.relative_attention, FLEX: flex, FLOOR: floor}


def measure(memory_len: int, *, repeats: int) -> dict[str, Any]:
    """Milliseconds of forward and backward passes and the memory that they need; ``not run`` has the reasons
    of those that were not run."""
    torch.manual_seed(0)
    inputs = {
        name: x.detach().to("cuda", torch.bfloat16).requires_grad_()
        for name, x in random_inputs_on_cpu(memory_len).items()
    }
    q, k, v, r, u, s = (x.detach().float() for x in inputs.values())
    expected = naive.relative_attention(q, k, v, r, u=u, s=s)
    seconds: dict[str, list[float]] = {}
    extra: dict[str, int] = {}
    absent: dict[str, str] = {}
    for name, attention in implementations(memory_len + S).items():
        try:
            error = relative_error(attention(**inputs).float(), expected)
            if name != FLOOR and not error <= TOLERANCE:
                raise ValueError(f"differs from the definition by {error:.1e}")
            seconds[name] = timed(attention, inputs, repeats)
            extra[name] = peak(attention, inputs)
        except Exception as error:
            absent[name] = first_line(error)
    return {
        "memory_len": memory_len,
        "keys": memory_len + S,
        "seconds": seconds,
        "extra memory": extra,
        "not run": absent,
    }


def timed(attention: Callable[..., Tensor], inputs: dict[str, Tensor], repeats: int) -> list[float]:
    """Seconds of each pass, by the GPU's clock."""
    times = []
    for _ in range(3):
        forward_and_backward(attention, inputs)
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        forward_and_backward(attention, inputs)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return times


def peak(attention: Callable[..., Tensor], inputs: dict[str, Tensor]) -> int:
    """The most bytes that a pass needs besides its inputs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward_and_backward(attention, inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
