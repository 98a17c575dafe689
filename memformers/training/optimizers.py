"""Optimizers and learning rates.

Muon brings all singular values of a momentum to about 1 before it applies it. Sources: Jordan et al. 2024,
"Muon: an optimizer for hidden layers in neural networks" (momentum, iteration, scale); Liu et al. 2025, arXiv
2502.16982 (weight decay).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from labml_helpers.schedule import RelativePiecewise
from torch import Tensor, nn

from memformers.models.language_model import MemoryLM
from memformers.training.config import TrainConfig

Optimizers = tuple[torch.optim.Optimizer, ...]
"""Optimizers that together have every parameter of a model exactly once."""


def build_optimizers(model: MemoryLM, config: TrainConfig) -> Optimizers:
    """AdamW, or with ``optimizer="muon"``, Muon for the matrices of the layers and AdamW for all others. Only
    the weights of linear maps and convolutions decay."""
    learning = dict.fromkeys(p for p in model.parameters() if p.requires_grad)  # an ordered set
    compressing: set[nn.Module] = set()
    for f_c in model.transformer.compressions:
        compressing.update(f_c.modules())

    # Muon trains the matrices of the layers, without those of compression functions.
    matrices: dict[Tensor, None] = {}
    if config.optim.optimizer == "muon":
        for module in model.transformer.modules():
            if isinstance(module, nn.Linear) and module not in compressing and module.weight in learning:
                matrices[module.weight] = None

    # AdamW trains all other parameters.
    decaying: dict[Tensor, None] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d):
            weight = module.weight
            if weight in learning and weight not in matrices:
                decaying[weight] = None
    remaining = [p for p in learning if p not in matrices and p not in decaying]
    groups = [
        {"params": [*decaying], "weight_decay": config.optim.weight_decay},
        {"params": remaining, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups, lr=config.optim.learning_rate, betas=(0.9, config.optim.beta2), fused=True
    )
    if not matrices:
        return (adamw,)
    dtype = torch.bfloat16 if config.step.precision == "bfloat16" else None
    muon = Muon(matrices, lr=config.optim.muon_peak, weight_decay=config.optim.weight_decay, dtype=dtype)
    return adamw, muon


def learning_rate_schedule(config: TrainConfig, tokens: int) -> Callable[[int], float]:
    """The fraction of its peak that a learning rate has after a number of tokens, of all ``tokens``."""
    warmup = config.optim.warmup_fraction
    schedule = config.optim.schedule
    points = [(0.0, 0.0), (warmup, 1.0)] if warmup > 0 else [(0.0, 1.0)]
    points += {
        "linear": [(1.0, 0.0)],
        "constant": [(1.0, 1.0)],
        "wsd": [(max(WSD_DECAY_START, warmup), 1.0), (1.0, 0.0)],
        "cosine": [(1.0, 2.0)],  # from 1 to 2, the angle of the half cosine in units of π, plus 1
    }[schedule]
    piecewise = RelativePiecewise(points, tokens)
    if schedule != "cosine":
        return piecewise

    def half_cosine(seen: int) -> float:
        x = piecewise(seen)
        return x if x < 1 else (1 + math.cos(math.pi * (x - 1))) / 2

    return half_cosine


WSD_DECAY_START = 0.8
"""Where the schedule wsd begins to fall, as a fraction of the training: the last fifth."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the quintic x → ax + bx³ + cx⁵, which takes small singular values to about 1 fast; Jordan's."""
STEPS = 5
"""Iterations. Afterwards, singular values lie between about 0.7 and 1.2. Jordan's number."""
MATRICES_IN_CACHE = 1 << 19
"""Bytes of float32 matrices that a CPU orthogonalizes together. With 36 matrices of 128·128 to 128·256, a
step takes 0.82 of the time that it takes with all of a shape together. In bfloat16, or from 512·512 on,
nothing is gained."""


# torch.optim.Muon always rounds to bfloat16, and takes one matrix after the other.
class Muon(torch.optim.Optimizer):
    """For matrices ``[rows, columns]`` of hidden layers.

    With G the gradient of a matrix W ``[rows, columns]``::

        m ← μ m + (1 − μ) G
        W ← (1 − lr · weight_decay) W − lr · √max(1, rows / columns) · orthogonal(μ m + (1 − μ) G)

    where orthogonal is [`orthogonalized`][], computed in ``dtype`` (None: the matrices' own); bfloat16 is
    precise enough. Matrices of one shape are computed together.
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
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step for every parameter that has a gradient."""
        for group in self.param_groups:
            lr = group["lr"]
            momentum = group["momentum"]
            # Matrices of one shape are orthogonalized together.
            weights_by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            directions_by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for w in group["params"]:
                if w.grad is not None:
                    state = self.state[w]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(w)
                    m = state["momentum"]
                    m.lerp_(w.grad, 1 - momentum)
                    weights_by_shape[w.shape].append(w)
                    # Nesterov momentum: look one step ahead.
                    directions_by_shape[w.shape].append(w.grad.lerp(m, momentum))
            for shape, weights in weights_by_shape.items():
                matrices = torch.stack(directions_by_shape[shape])  # [n, rows, columns]
                rows, columns = matrices.shape[1:]
                updates = orthogonalized_in_cache(matrices.to(self.dtype or matrices.dtype)).to(matrices)
                for w, update in zip(weights, updates, strict=True):
                    w.mul_(1 - lr * group["weight_decay"])
                    w.sub_(update, alpha=lr * max(1.0, rows / columns) ** 0.5)


def orthogonalized_in_cache(matrices: Tensor) -> Tensor:
    """[`orthogonalized`][] of ``matrices [n, rows, columns]``. On a CPU, float32 matrices are computed a few
    at a time: these stay in a core's cache through all iterations."""
    if matrices.device.type != "cpu" or matrices.dtype != torch.float32:
        return orthogonalized(matrices)
    n_together = max(MATRICES_IN_CACHE // matrices[0].nbytes, 1)
    return torch.cat([orthogonalized(part) for part in matrices.split(n_together)])


def orthogonalized(matrices: Tensor) -> Tensor:
    """U Vᵀ, nearly, of each matrix U Σ Vᵀ of ``matrices [n, rows, columns]``, by Newton–Schulz iteration of
    X → aX + b(XXᵀ)X + c(XXᵀ)²X; a matrix of zeros stays zero."""
    a, b, c = COEFFICIENTS
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    x = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value is above 1
    n, rows, _ = x.shape
    # Iterations share their buffers: fresh memory for each product would take longer.
    gram = x.new_empty(n, rows, rows)
    polynomial = torch.empty_like(gram)
    for _ in range(STEPS):
        torch.bmm(x, x.mT, out=gram)  # XXᵀ
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)  # b XXᵀ + c (XXᵀ)²
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x if wide is matrices else x.mT
