"""A kernel beside the naive one in float64: output and every gradient."""

from collections.abc import Callable
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.kernels import naive

# The largest RMS error of a kernel, relative to the RMS value, by dtype.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
DROPOUT = 0.3
Kernel = Callable[..., Tensor]


def kernel_named(name: str) -> Kernel:
    return import_module(f"memformers.kernels.{name}").relative_attention


def random_inputs(B: int, H: int, S: int, K: int, E: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A kernel's arguments by name, for both forms of positions, in the attention module's memory order."""
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "query": (S, B, H, E),
        "key": (K, B, H, E),
        "value": (K, B, H, E),
        "r": (K, H, E),
        "u": (H, E),
        "v": (H, E),
        "s": (H, K),
    }
    inputs = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        inputs[name] = drawn.movedim(0, -2).requires_grad_()
    return inputs


def first_keys(B: int, S: int, K: int) -> Tensor:
    """Random ``key_start [B, S]`` by stream: all keys, one document, some keys, a query's own alone."""
    generator = torch.Generator().manual_seed(2)
    last = torch.arange(K - S, K).expand(B, S)  # the query itself
    some = (torch.rand(B, S, generator=generator) * (last + 1)).long()
    kinds = torch.stack((torch.zeros_like(last), some[:, :1].expand(B, S), some, last))
    return kinds[torch.arange(B) + 1 & 3, torch.arange(B)]


def compare(
    kernel: Kernel, inputs: dict[str, Tensor], dtype: torch.dtype, key_start: Tensor | None = None,
    reference: Kernel = naive.relative_attention, ignored: str = "",
) -> None:  # fmt: skip
    """Whether ``kernel`` agrees with the ``reference`` in float64, in output and every gradient but those
    ``ignored``; queries see the keys from ``key_start [B, S]`` on."""
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    output = kernel(**inputs, key_start=key_start)
    expected = reference(**exact, key_start=key_start)
    assert output.dtype == dtype
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # In the output's order in memory, as in a model.
    weight = torch.empty_like(output).copy_(weight)
    grads = torch.autograd.grad(output, list(inputs.values()), weight)
    expected_grads = torch.autograd.grad(expected, list(exact.values()), weight.double())

    errors = {}
    results = zip(("output", *inputs), (output, *grads), (expected, *expected_grads), strict=True)
    for name, result, wanted in results:
        if name not in ignored:
            difference = (result.double() - wanted).norm()
            errors[name] = (difference / wanted.norm().clamp_min(1e-30)).item()
    assert all(error <= TOLERANCE[dtype] for error in errors.values()), errors


def compare_dropout(kernel: Kernel, inputs: dict[str, Tensor], dtype: torch.dtype, bounded: bool) -> None:
    """Whether ``kernel`` drops the right number, and computes from the others what the naive one does. Which
    are kept, ``[B, H, S, K]``, one-hot values show, for which outputs are probabilities."""
    B, _, S, E = inputs["query"].shape
    value = inputs["value"]
    K = value.shape[2]
    key_start = first_keys(B, S, K) if bounded else None

    def dropping(**arguments: Tensor | None) -> Tensor:
        # Every call begins with the same random state, and leaves it as it was.
        with torch.random.fork_rng():
            return kernel(**arguments, dropout_prob=DROPOUT)

    one_hot = F.pad(torch.eye(K, dtype=value.dtype), (0, -K % E))
    parts = [inputs | {"value": part.expand_as(value)} for part in one_hot.split(E, dim=1)]
    with torch.no_grad():
        kept = torch.cat([dropping(**part, key_start=key_start) for part in parts], dim=-1)[..., :K] != 0

    def reference(value: Tensor, **arguments: Tensor) -> Tensor:
        return (naive.attention_probabilities(**arguments) * kept / (1 - DROPOUT)) @ value

    queries = {name: t for name, t in inputs.items() if name != "value"}
    visible = naive.attention_probabilities(**queries, key_start=key_start) > 0
    assert abs(kept[visible].double().mean() - (1 - DROPOUT)) < 2 / visible.sum() ** 0.5
    compare(dropping, inputs, dtype, key_start, reference)


def kept_by(compute: Callable[[], Tensor]) -> tuple[list[Tensor], Tensor]:
    """The tensors that are kept for the backward pass, and the result."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return kept, compute()
