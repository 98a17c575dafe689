"""Linear maps of one or two rows on all cores, for generation on a CPU.

PyTorch multiplies so few rows on a single core. A batched product with slices of the weight uses all: with
two threads on an AMD EPYC, the calling thread computes 25 to 40 % less for a token of a model with D = 512 or
1,024. On a single core, nothing is gained.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memformers.models.hooks import is_unmodified

MAX_ROWS = 2
"""With more, PyTorch's own product uses all cores."""
N_SLICES = 4
"""The matrices into which a weight is cut."""
MIN_SLICED_WEIGHT = 1 << 17
"""The smallest weight for which slices are faster, in numbers: half a MiB in float32, more than a core's
cache."""


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)``, ``[·, in]`` to ``[·, out]``; without gradient by [`product`][] if the module is
    unmodified."""
    if torch.is_grad_enabled() or not is_unmodified(module, nn.Linear):
        return module(x)
    return product(x, module.weight, module.bias)


def as_function(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The ``module`` as a function of ``[·, in]``, without gradient: that of its current weights if it is an
    unmodified linear map or layer norm. For one token with D = 128, a call takes 2 to 3 µs less, of 6 to
    8."""
    if is_unmodified(module, nn.Linear):
        return partial(product, weight=module.weight, bias=module.bias)
    if is_unmodified(module, nn.LayerNorm):
        shape = module.normalized_shape
        return partial(
            torch.layer_norm, normalized_shape=shape, weight=module.weight, bias=module.bias, eps=module.eps
        )
    return module


@dataclass(frozen=True)
class StackedMap:
    """Several linear maps of the same input as one, without gradient: ``[·, in]`` to ``[·, out of all]``."""

    weight: Tensor
    """``[out of all, in]``."""
    bias: Tensor
    """``[out of all]``."""

    def __call__(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


def by_columns(matrix: Tensor) -> Tensor:
    """``matrix [·, m, n]``, stored column by column: on a CPU, a product with one row then takes 0.8 of the
    time if it is large. In half precision, it would take longer."""
    is_faster = matrix.device.type == "cpu" and matrix.element_size() >= 4
    return matrix.mT.contiguous().mT if is_faster else matrix


def takes_vector(weight: Tensor, n_rows: int) -> bool:
    """Whether [`map_of_rows`][] is faster for a vector ``[in]`` than for a matrix with a single row: on a
    CPU, where it takes 4 to 30 % less time, but not in half precision."""
    return n_rows == 1 and weight.device.type == "cpu" and weight.element_size() >= 4


def map_of_rows(weight: Tensor, bias: Tensor | None, n_rows: int) -> Callable[..., Tensor]:
    """The product with ``weight [out, in]``, plus ``bias [out]``, as a function of ``[n_rows, in]`` to
    ``[n_rows, out]``, or of vectors if it [takes one][memformers.models.fast_linear.takes_vector]. With a
    bias, it may write to a given ``out``."""
    if takes_vector(weight, n_rows):
        return partial(torch.addmv, weight.new_zeros(len(weight)) if bias is None else bias, weight)
    return partial(product, weight=weight, bias=bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``x [·, in]`` times ``weight [out, in]``, plus ``bias [out]``: ``[·, out]``; with a bias, it may be
    written to ``out``. Few rows times a large float32 weight on a CPU are computed by slices of the
    weight."""
    d_in = x.shape[-1]
    is_few = x.numel() <= MAX_ROWS * d_in
    is_large = weight.numel() >= MIN_SLICED_WEIGHT and len(weight) % N_SLICES == 0
    if not is_few or not is_large or x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, weight, bias, out=out)  # type: ignore[call-arg]  # its stub lacks out

    # A product for each slice: PyTorch shares the batch among threads.
    rows = x.reshape(-1, d_in)  # [n, in]
    slices = weight.view(N_SLICES, -1, d_in)  # [4, out / 4, in]
    sliced = torch.bmm(rows.expand(N_SLICES, *rows.shape), slices.mT)  # [4, n, out / 4]
    joined = sliced.transpose(0, 1).reshape(*x.shape[:-1], len(weight))  # [·, out]
    return joined if bias is None else torch.add(joined, bias, out=out)
