"""Muon: momentum whose singular values are all brought to about 1 before it is applied.

Sources: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks" (momentum, iteration,
scale); Liu et al. 2025, arXiv 2502.16982 (weight decay).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from memformers.training.ranks import full_tensor, local_tensor, rows_like

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the quintic x → ax + bx³ + cx⁵, which takes small singular values to about 1 fast; Jordan's."""
STEPS = 5
"""Iterations, after which singular values lie between about 0.7 and 1.2; Jordan's number."""


class Muon(torch.optim.Optimizer):
    """For matrices of hidden layers. A parameter of more dimensions, a convolution's, is taken as the matrix
    ``[outputs, everything else]``.

    With G the gradient of a matrix W ``[rows, columns]``::

        m ← μ m + (1 − μ) G
        W ← (1 − lr · weight_decay) W − lr · √max(1, rows / columns) · orthogonal(μ m + (1 − μ) G)

    where ``orthogonal`` is [`orthogonalized`][], computed in ``dtype`` (None: the matrices' own); bfloat16 is
    precise enough. Matrices of one shape are computed together. Where each rank holds some rows of a matrix
    (FSDP), every rank gathers and computes the whole one, and applies its rows.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step for every parameter that has a gradient. A ``closure`` isn't taken."""
        assert closure is None
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for parameters in alike.values():
                self._step_alike(parameters, group["lr"], group["momentum"], group["weight_decay"])

    def _step_alike(self, parameters: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        """The step of ``parameters`` of one shape."""
        directions = []
        for parameter in parameters:
            kept = self.state[parameter]
            if not kept:
                kept["momentum"] = torch.zeros_like(parameter)
            assert parameter.grad is not None
            kept["momentum"].lerp_(parameter.grad, 1 - momentum)
            # One step further than the momentum, as Nesterov has it.
            directions.append(full_tensor(parameter.grad.lerp(kept["momentum"], momentum)).flatten(1))
        matrices = torch.stack(directions)  # [n, rows, columns]
        rows, columns = matrices.shape[1:]
        step = lr * max(1.0, rows / columns) ** 0.5
        updates = orthogonalized(matrices.to(self.dtype or matrices.dtype)).to(matrices)
        for parameter, update in zip(parameters, updates, strict=True):
            parameter.mul_(1 - lr * weight_decay)
            local_tensor(parameter).sub_(rows_like(parameter, update.reshape(parameter.shape)), alpha=step)


def orthogonalized(matrices: Tensor) -> Tensor:
    """U Vᵀ, nearly, of each matrix U Σ Vᵀ of ``matrices [n, rows, columns]``, by Newton–Schulz iteration of
    X → aX + b(XXᵀ)X + c(XXᵀ)²X; a matrix of zeros stays one."""
    a, b, c = COEFFICIENTS
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    x = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value is above 1
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrices else x.mT
