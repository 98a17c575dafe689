"""The proof, on the machine where it runs, that a kernel computes what the naive one does."""

import warnings
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from memformers.kernels import naive

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
"""The greatest RMS error of a kernel, relative to the RMS value, by dtype."""
B, H, S, K = 2, 2, 70, 150
"""The streams, heads, queries and keys of the proof: several tiles of a kernel, and parts of others."""


def errors(
    kernel: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    key_start: Tensor | None = None,
    law: Callable[..., Tensor] = naive.relative_attention,
) -> dict[str, float]:
    """The RMS errors of the output of ``kernel`` and of the gradient of each of the ``inputs``, relative to
    the RMS values of the ``law`` in float64. Inputs are a kernel's arguments by name, and take gradients;
    queries see the keys from ``key_start [B, S]`` on."""
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    wanted, got = law(**exact, key_start=key_start), kernel(**inputs, key_start=key_start)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = weight.to(got.device, got.dtype)
    all_wanted = wanted, *torch.autograd.grad(wanted, list(exact.values()), weight.double())
    all_got = got, *torch.autograd.grad(got, list(inputs.values()), weight)
    return {
        name: ((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item()
        for name, a, b in zip(("output", *inputs), all_got, all_wanted, strict=True)
    }


@cache
def objection(kernel: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, d_head: int) -> str:
    """Why ``kernel`` can't be trusted on a ``device``, in words; empty if it agrees with the naive kernel, in
    output ``[B, H, S, E]`` and all gradients, on a small problem with documents. It is computed once per
    process."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"query": (B, H, S, d_head), "key": (B, H, K, d_head), "value": (B, H, K, d_head),
              "r": (H, K, d_head), "u": (H, d_head), "v": (H, d_head), "s": (H, K)}  # fmt: skip
    key_start = (torch.rand(B, S, generator=draw) * torch.arange(K - S + 1, K + 1)).long().to(device)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        inputs = {
            name: torch.randn(shape, generator=draw).to(device, dtype).requires_grad_()
            for name, shape in shapes.items()
        }
        try:
            found = errors(kernel, inputs, key_start)
        except Exception as error:  # any error of a compiler or a driver
            said = " ".join(str(error).split())[:300]
            return f"can't run here: {type(error).__name__}: {said}"
    for name, apart in found.items():
        if not apart <= TOLERANCE[dtype]:  # NaN too
            return f"differs in {name} by {apart:.1e} from the naive kernel, more than {TOLERANCE[dtype]}"
    return ""


def is_proven(device: torch.device, dtype: torch.dtype, d_head: int) -> bool:
    """Whether the fused kernel has no [`objection`][]; else the first call warns."""
    return trust(device, dtype, d_head)  # torch.compile would look into a function that is cached itself


is_proven._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""As ``torch.compiler.assume_constant_result`` does, which would import the compiler, half a second."""


@cache
def trust(device: torch.device, dtype: torch.dtype, d_head: int) -> bool:
    """[`is_proven`][], computed and warned of once per process."""
    from memformers.kernels import fused  # here, since not every machine has Triton

    said = objection(fused.relative_attention, device, dtype, d_head)
    if said:
        warnings.warn(
            f"kernel='fused' {said}. The naive kernel is used on {device} for {dtype} and d_head={d_head}.",
            RuntimeWarning,
            stacklevel=2,
        )
    return not said
