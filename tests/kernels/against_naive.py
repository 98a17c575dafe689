"""A kernel beside the naive one in float64: output and every gradient."""

from collections.abc import Callable

import torch
from torch import Tensor

from memformers.kernels import naive

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
"""RMS error, relative to the RMS value."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Of the fused kernel: without a GPU, Triton's interpreter runs it on CPU."""


def leaves(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """Random tensors of these shapes that take a gradient."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def tensors(
    B: int, H: int, S: int, K: int, E: int, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, Tensor]:
    """Random arguments of a kernel, of both position schemes at once."""
    shapes = {"query": (B, H, S, E), "key": (B, H, K, E), "value": (B, H, K, E), "r": (H, K, E)}
    return leaves(shapes | {"u": (H, E), "v": (H, E), "s": (H, K)}, dtype, device)


def first_keys(B: int, S: int, K: int, device: str = "cpu") -> Tensor:
    """Random ``key_start [B, S]`` of every kind: all keys, a document that begins somewhere for all queries,
    some keys of each query's own, and the query's own key alone."""
    generator = torch.Generator().manual_seed(2)
    own = torch.arange(K - S, K).expand(B, S)
    some = (torch.rand(B, S, generator=generator) * (own + 1)).long()
    kinds = torch.stack((torch.zeros_like(own), some[:, :1].expand(B, S), some, own))
    return kinds[torch.arange(B) + 1 & 3, torch.arange(B)].to(device)


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Whether they agree within the tolerance of ``dtype``."""
    got, wanted = got.double(), wanted.double()
    assert (got - wanted).norm() <= TOLERANCE[dtype] * wanted.norm() + 1e-30


def compare(
    kernel: Callable[..., Tensor],
    inputs: dict[str, Tensor],
    dtype: torch.dtype,
    key_start: Tensor | None = None,
    law: Callable[..., Tensor] = naive.relative_attention,
) -> None:
    """Whether ``kernel`` agrees with the ``law`` on ``inputs``, in output and every gradient, where queries
    see the keys from ``key_start [B, S]`` on."""
    exact = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
    wanted = law(**exact, key_start=key_start)
    compare_outputs(kernel(**inputs, key_start=key_start), wanted, inputs, exact, dtype)


def compare_outputs(
    got: Tensor, wanted: Tensor, inputs: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Whether ``got``, made from ``inputs``, agrees with ``wanted``, made from ``exact``, likewise."""
    assert got.dtype == dtype
    close(got, wanted, dtype)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = weight.to(got.device, dtype)
    wanted_grads = torch.autograd.grad(wanted, list(exact.values()), weight.double())
    got_grads = torch.autograd.grad(got, list(inputs.values()), weight)
    for name, a, b in zip(inputs, got_grads, wanted_grads, strict=True):
        assert a.dtype == inputs[name].dtype
        close(a, b, dtype)


def results(kernel: Callable[..., Tensor], inputs: dict[str, Tensor], **options: Tensor) -> list[Tensor]:
    """The output and the gradient of every input of the output's sum of squares."""
    out = kernel(**inputs, **options)
    return [out, *torch.autograd.grad(out.square().sum(), list(inputs.values()))]


def kept_by(compute: Callable[[], Tensor]) -> list[Tensor]:
    """The tensors that are kept for the backward pass."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        compute()
    return kept
