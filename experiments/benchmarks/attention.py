"""Attention alone, forward and backward with the gradients of all six inputs, against the length of memory.

On CPU: our kernel, the definition, and PyTorch's own attention with the positions as a bias. On a GPU, in
bfloat16: our fused kernel, FlexAttention with the positions as a bias, and PyTorch's attention without
positions, which is a lower bound of the time.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.benchmarks.measuring import (
    MatrixMultiply,
    Result,
    check_errors,
    first_line,
    in_child,
    in_turns,
    memory_above,
    relative_error,
)
from memformers.kernels import blocked, naive

B, H, S, E = 2, 8, 512, 64
MEMORY_LENGTHS = (512, 1024, 2048, 4096, 8192)
TOLERANCE, BFLOAT16_TOLERANCE = 1e-5, 5e-3
"""The largest RMS error relative to the RMS value: of the output and of every gradient; and of the output in
bfloat16, against the definition in float32."""
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
FUSED, FLEX, FLOOR = "ours, fused", "FlexAttention with a bias", "SDPA without positions"


def implementations_on_gpu(K: int) -> dict[str, Attention]:
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


def random_inputs(memory_len: int, queries: int = S) -> dict[str, Tensor]:
    """Inputs of all implementations, contiguous, which all take a gradient."""
    K = memory_len + queries
    shapes: dict[str, tuple[int, ...]] = {"r": (H, K, E), "u": (H, E), "s": (H, K)}
    shapes = {"query": (B, H, queries, E), "key": (B, H, K, E), "value": (B, H, K, E)} | shapes
    return {name: torch.randn(shape).requires_grad_() for name, shape in shapes.items()}


def forward_and_backward(attention: Attention, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The output and the gradient of each input, for an output gradient that is the same every time."""
    out = attention(**inputs)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, list(inputs.values()), grad)]


def check_parity(attention: Attention, inputs: dict[str, Tensor], expected: list[Tensor]) -> float:
    """The largest error against the definition's results; ValueError above the tolerance."""
    results = zip(forward_and_backward(attention, inputs), expected, strict=True)
    errors = dict(zip(("output", *inputs), (relative_error(*pair) for pair in results), strict=True))
    return check_errors(errors, TOLERANCE, "an attention that should equal the definition")


def measure(memory_len: int, *, repeats: int) -> Result:
    """Seconds of every forward and backward pass, ``torch.mm``'s rate in between, and extra memory."""
    torch.manual_seed(0)
    inputs, K = random_inputs(memory_len), memory_len + S
    needs = {name: copies * 4 * B * H * S * K for name, (_, copies) in IMPLEMENTATIONS.items()}
    present = {name: IMPLEMENTATIONS[name][0] for name, need in needs.items() if need <= LIMIT}
    errors = {}
    if NAIVE in present:
        expected = forward_and_backward(present[NAIVE], inputs)
        errors = {name: check_parity(one, inputs, expected) for name, one in present.items() if name != NAIVE}
    sides = {name: partial(forward_and_backward, one, inputs) for name, one in present.items()}
    matrix_multiply = MatrixMultiply()
    return {
        "memory_len": memory_len,
        "keys": K,
        # Three products forward, of content, of positions and with values; two for each backward.
        "flops": 9 * 2 * B * H * S * K * E,
        "errors": errors,
        "not run": {
            name: f"would need about {need / (1 << 30):.1f} GiB"
            for name, need in needs.items()
            if need > LIMIT
        },
        "seconds": in_turns(sides, repeats, f"attention, M = {memory_len}", between=matrix_multiply),
        "torch.mm, FLOP/s": matrix_multiply.rates,
        "extra memory": {name: in_child("attention", "extra_memory", name, memory_len) for name in present},
    }


def extra_memory(name: str, memory_len: int) -> int | None:
    """The most bytes that one forward and backward pass needs besides its inputs; call it in a separate
    process. A small pass comes first, so that PyTorch's own initialization isn't counted."""
    torch.manual_seed(0)
    attention, _ = IMPLEMENTATIONS[name]
    forward_and_backward(attention, random_inputs(64, queries=64))
    inputs = random_inputs(memory_len)
    return memory_above(lambda: forward_and_backward(attention, inputs))


def measure_on_gpu(memory_len: int, *, repeats: int) -> Result:
    """Seconds of forward and backward passes, by the GPU's clock, and the bytes that one needs besides its
    inputs; ``not run`` has the reasons of those that were not run."""
    torch.manual_seed(0)
    inputs = {
        name: x.detach().to("cuda", torch.bfloat16).requires_grad_()
        for name, x in random_inputs(memory_len).items()
    }
    q, k, v, r, u, s = (x.detach().float() for x in inputs.values())
    expected = naive.relative_attention(q, k, v, r, u=u, s=s)
    seconds: dict[str, list[float]] = {}
    extra: dict[str, int] = {}
    absent: dict[str, str] = {}
    for name, attention in implementations_on_gpu(memory_len + S).items():
        try:
            error = relative_error(attention(**inputs).float(), expected)
            if name != FLOOR:
                check_errors({"output": error}, BFLOAT16_TOLERANCE, name)
            pass_of_it = partial(forward_and_backward, attention, inputs)
            seconds[name], extra[name] = timed_on_gpu(pass_of_it, repeats)
        except Exception as error:
            absent[name] = first_line(error)
    of_all = {"seconds": seconds, "extra memory": extra, "not run": absent}
    return {"memory_len": memory_len, "keys": memory_len + S, **of_all}


def timed_on_gpu(compute: Callable[[], object], repeats: int) -> tuple[list[float], int]:
    """Seconds of each call of ``compute``, after three that aren't counted, and the bytes that one needs."""
    times = []
    for _ in range(3):
        compute()
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        compute()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    compute()
    torch.cuda.synchronize()
    return times, torch.cuda.max_memory_allocated() - before
