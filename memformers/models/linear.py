"""Linear maps: when one may be read in place of being called, a norm folded into one, and few rows."""

from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memformers.kernels.operators import has_values, is_transformed

M = TypeVar("M", bound=nn.Module)
PARTS = 4
"""How many matrices a weight is cut into for few rows."""
LARGE = 1 << 17
"""Numbers in a weight, from which on that is faster: half a MiB in float32, which leaves a core's cache."""


def is_plain(module: nn.Module | None, *kinds: type[M]) -> TypeGuard[M]:
    """Whether ``module`` is exactly of one of these ``kinds`` and has no hooks, so that its weights say what
    it computes: none is wrapped, quantized or parametrized; weight norm and pruning are hooks."""
    if type(module) not in kinds:
        return False
    own = module.__dict__
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"]
    return not (hooks or own["_backward_hooks"] or own["_backward_pre_hooks"])


def layer_norm_no_affine(norm: nn.LayerNorm | None, x: Tensor) -> Tensor:
    """x̂: ``x [·, B, D]`` as ``norm`` gives it before its scale and shift; ``x`` itself without a norm."""
    return x if norm is None else F.layer_norm(x, norm.normalized_shape, eps=norm.eps)


def fold(norm: nn.LayerNorm | None, linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """Weight ``[out, in]`` and bias ``[out]`` of ``linear`` after the scale γ and the shift β of ``norm``, if
    there is one: W(γ ∘ x̂ + β) = (W ∘ γ)x̂ + Wβ."""
    weight, bias = linear.weight, linear.bias
    if norm is None:
        return weight, weight.new_zeros(linear.out_features) if bias is None else bias
    shift = weight @ norm.bias
    return weight * norm.weight, shift if bias is None else shift + bias


def joined_linear(first: Tensor, second: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``F.linear`` of ``first [m, B, in]``, then of ``second [s, B, in]``: ``[m + s, B, out]``. On CPU, both
    are written to where they belong: to join them afterwards takes 3 % of a training step."""
    how = weight, bias
    # In a transformation there is no rule for a function of our own, whatever it is of.
    if not has_values(first) or torch._C._are_functorch_transforms_active() or is_transformed(second, *how):
        return torch.cat((F.linear(first, *how), F.linear(second, *how)))
    maps = [how]
    if torch.is_autocast_enabled("cpu") and second.dtype != torch.float64:
        dtype = torch.get_autocast_dtype("cpu")
        first, second = first.to(dtype), second.to(dtype)
        # As autocast does, which casts a parameter once, and all else for each product.
        maps = [(weight.to(dtype), bias.to(dtype)) for _ in range(1 if weight.is_leaf else 2)]
    return JoinedLinear.apply(first, second, *maps[0], *maps[-1])


class JoinedLinear(torch.autograd.Function):
    """Two inputs, ``[·, B, in]`` each, and a weight and a bias for each, to their outputs in one tensor."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        """As [`joined_linear`][] has it: ``[m + s, B, out]``."""
        xs, weights, biases = given[:2], given[2::2], given[3::2]
        ctx.m, m, s, B, out = len(xs[0]), len(xs[0]), len(xs[1]), xs[1].shape[1], len(weights[0])
        joined = xs[1].new_empty(m + s, B, out)
        for x, weight, bias, part in zip(xs, weights, biases, joined.split((m, s)), strict=True):
            torch.addmm(bias, x.flatten(0, 1), weight.T, out=part.view(-1, out))
        of_xs, of_maps = ctx.needs_input_grad[:2], ctx.needs_input_grad[2::2]
        kept = (*zip(xs, of_maps, strict=True), *zip(weights, of_xs, strict=True))
        ctx.save_for_backward(*(x if needed else None for x, needed in kept))
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of what ``forward`` takes, from that of its output, ``[m + s, B, out]``."""
        first, second, *weights = ctx.saved_tensors
        (grad,), needed, found = grads, ctx.needs_input_grad, list[Tensor | None]()
        lengths, B, out = (ctx.m, len(grad) - ctx.m), *grad.shape[1:]
        parts = [part.reshape(-1, out) for part in grad.split(lengths)]
        for n, part, weight in zip(lengths, parts, weights, strict=True):
            found.append(None if weight is None else (part @ weight).reshape(n, B, weight.shape[1]))
        for i, (part, x) in enumerate(zip(parts, (first, second), strict=True)):
            found.append(None if x is None else part.T @ x.flatten(0, 1))
            found.append(part.sum(0) if needed[3 + 2 * i] else None)
        return tuple(found)


def stacked(maps: Sequence[nn.Module]) -> list[nn.Module]:
    """One map, to the outputs of all ``maps`` of the same input, where all are plain; else ``maps``."""
    folded = [fold(None, each) for each in maps if is_plain(each, nn.Linear)]
    if len(folded) < len(maps):
        return list(maps)
    weight, bias = (torch.cat(parts) for parts in zip(*folded, strict=True))
    size = weight.shape[1], len(weight)  # without first weights, which would draw from everybody's generator
    one = nn.utils.skip_init(nn.Linear, *size, device=weight.device, dtype=weight.dtype)
    one.weight.copy_(weight)
    one.bias.copy_(bias)
    return [one]


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)``, ``[·, in]`` to ``[·, out]``; without gradient, one or two rows on CPU in float32, as in
    generation, read the weight as a batch of matrices, on all cores: PyTorch gives a matrix to one."""
    if torch.is_grad_enabled() or not is_plain(module, nn.Linear):
        return module(x)
    weight, bias, inputs = module.weight, module.bias, x.shape[-1]
    few = x.numel() <= 2 * inputs and weight.numel() >= LARGE and weight.shape[0] % PARTS == 0
    if not few or x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, inputs)
    out = torch.bmm(rows.expand(PARTS, *rows.shape), weight.view(PARTS, -1, inputs).mT)
    out = out.transpose(0, 1).reshape(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias
