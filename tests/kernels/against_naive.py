"""A kernel beside the naive one in float64: output and every gradient."""

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import Tensor

from memformers.kernels import naive
from memformers.kernels.self_test import DROPOUT, TOLERANCE, Kernel, errors, with_dropout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Of the fused kernel: without a GPU, Triton's interpreter runs it on CPU."""


def kernel_named(name: str) -> tuple[Kernel, str]:
    """A kernel, and the device for its tests."""
    if name == "fused":
        pytest.importorskip("triton", reason="Triton is not installed")
    home = import_module(f"memformers.kernels.{name}")
    return home.relative_attention, DEVICE if name == "fused" else "cpu"


def first_keys(B: int, S: int, K: int, device: str = "cpu") -> Tensor:
    """Random ``key_start [B, S]`` by stream: all keys, one document, some keys, a query's own alone."""
    generator = torch.Generator().manual_seed(2)
    own = torch.arange(K - S, K).expand(B, S)
    some = (torch.rand(B, S, generator=generator) * (own + 1)).long()
    kinds = torch.stack((torch.zeros_like(own), some[:, :1].expand(B, S), some, own))
    return kinds[torch.arange(B) + 1 & 3, torch.arange(B)].to(device)


def compare(
    kernel: Kernel, inputs: dict[str, Tensor], dtype: torch.dtype, key_start: Tensor | None = None,
    reference: Kernel = naive.relative_attention,
) -> None:  # fmt: skip
    """Whether ``kernel`` agrees with the ``reference`` in output and every gradient."""
    assert kernel(**inputs, key_start=key_start).dtype == dtype
    found = errors(kernel, inputs, key_start, reference)
    assert all(error <= TOLERANCE[dtype] for error in found.values()), found


def compare_dropout(kernel: Kernel, inputs: dict[str, Tensor], dtype: torch.dtype, bounded: bool) -> None:
    """Whether ``kernel`` drops as many as it must, and computes from the others what the naive one does."""
    (B, _, S, _), K = inputs["query"].shape, inputs["key"].shape[2]
    key_start = first_keys(B, S, K, inputs["key"].device.type) if bounded else None
    dropping, reference, kept = with_dropout(kernel, inputs, key_start)
    queries = {name: t for name, t in inputs.items() if name != "value"}
    visible = naive.attention_probabilities(**queries, key_start=key_start) > 0
    assert abs(kept[visible].double().mean() - (1 - DROPOUT)) < 2 / visible.sum() ** 0.5
    compare(dropping, inputs, dtype, key_start, reference)


def kept_by(compute: Callable[[], Tensor]) -> list[Tensor]:
    """The tensors that are kept for the backward pass."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        compute()
    return kept
