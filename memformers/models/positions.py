"""How distances are represented: the paper's sinusoids, or a vector learned for each distance."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from memformers.common.errors import UserError

Positions = Literal["learned", "sinusoidal"]


def sinusoids(distances: int, features: int, clamp_len: int | None = None) -> Tensor:
    """The paper's features of the distances 0 … distances−1, ``[distances, features]`` in float64:
    sines, then cosines, of wavelengths from 2π to 10,000·2π (Vaswani et al. 2017, section 3.5). Those
    beyond ``clamp_len`` are taken for it."""
    rates = 10_000.0 ** -(torch.arange(0, features, 2, dtype=torch.float64) / features)
    at = torch.arange(distances, dtype=torch.float64).clamp(max=distances if clamp_len is None else clamp_len)
    angles = at[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=-1)[:, :features]


class Sinusoids(nn.Module):
    """[`sinusoids`][] as a table that grows when longer distances come, and that all layers share.

    It is no part of a checkpoint. ``features`` is P; distances beyond ``clamp_len`` are taken for it.
    """

    def __init__(self, features: int, clamp_len: int | None = None):
        super().__init__()
        self.features, self.clamp_len = features, clamp_len
        self.table: Tensor
        self.register_buffer("table", torch.empty(0, features), persistent=False)

    def forward(self, distances: int, like: Tensor) -> Tensor:
        """``[distances, P]``, in the dtype and on the device of ``like``."""
        table = self.table
        if len(table) < distances or table.dtype != like.dtype or table.device != like.device:
            table = sinusoids(distances, self.features, self.clamp_len).to(like)
            # A compiled graph keeps no tables, and tensors made in inference mode can't be used in training.
            if not torch.compiler.is_compiling() and not table.is_inference():
                self.table = table
        return table[:distances]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Sinusoids":
        """Forget the table when the module is moved or cast: cast from another dtype, it would be rounded
        twice."""
        super()._apply(fn, recurse)
        self.table = self.table[:0]
        return self


def check_positions(positions: Positions, features: int | None, clamp_len: int | None) -> None:
    """Raise UserError for settings of sinusoids beside learned positions."""
    for name, value in (("position_features", features), ("clamp_len", clamp_len)):
        if positions == "learned" and value is not None:
            raise UserError(
                f"{name}={value} is for sinusoids, which positions='learned' doesn't have; leave it out, or "
                f"use positions='sinusoidal'."
            )
