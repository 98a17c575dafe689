"""A kernel beside the naive one in float64: output and every gradient."""

from collections.abc import Callable

import torch
from torch import Tensor

from memformers.kernels import naive
from memformers.kernels.proof import TOLERANCE, errors

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
    assert kernel(**inputs, key_start=key_start).dtype == dtype
    found = errors(kernel, inputs, key_start, law)
    assert all(error <= TOLERANCE[dtype] for error in found.values()), found


def compare_dropout(
    kernel: Callable[..., Tensor],
    B: int,
    H: int,
    S: int,
    K: int,
    dtype: torch.dtype,
    bounded: bool,
    device: str = "cpu",
) -> None:
    """Whether ``kernel`` drops probabilities, as many as it must, and computes from the others what the naive
    one does. The same seed drops the same ones: a first pass shows which, with one-hot values."""
    share = 0.3
    inputs = tensors(B, H, S, K, K, dtype, device)
    one_hot = torch.eye(K, dtype=torch.float64, device=device).expand(B, H, K, K)
    key_start = first_keys(B, S, K, device) if bounded else None

    def dropped(**arguments: Tensor) -> Tensor:
        torch.manual_seed(5)
        return kernel(**arguments, dropout_prob=share)

    def probabilities(**arguments: Tensor) -> Tensor:
        return naive.relative_attention(**arguments | {"value": one_hot})

    def law(**arguments: Tensor) -> Tensor:
        return (probabilities(**arguments) * shown / (1 - share)) @ arguments["value"]

    shown = dropped(**inputs | {"value": one_hot.to(dtype)}, key_start=key_start) != 0
    exact = {name: t.double() for name, t in inputs.items()}
    visible = probabilities(**exact, key_start=key_start) > 0
    assert abs(shown[visible].double().mean() - (1 - share)) < 2 / visible.sum() ** 0.5
    compare(dropped, inputs, dtype, key_start, law)


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
