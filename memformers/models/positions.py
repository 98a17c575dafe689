"""How distances are represented by the paper's sinusoids."""

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

_TABLES: dict[tuple[object, ...], Tensor] = {}
"""The longest table of each kind that was asked for; all layers and models share it."""


def sinusoids(distances: int, features: int, clamp_len: int | None = None) -> Tensor:
    """Features of 0 … distances−1, at most ``clamp_len``: ``[distances, features]`` in float64, first
    sines, then cosines, of wavelengths from 2π to 10,000·2π (Vaswani et al. 2017, section 3.5)."""
    rates = 10_000.0 ** -(torch.arange(0, features, 2, dtype=torch.float64) / features)
    at = torch.arange(distances, dtype=torch.float64).clamp(max=distances if clamp_len is None else clamp_len)
    angles = at[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=-1)[:, :features]


def sinusoid_table(distances: int, features: int, clamp_len: int | None, like: Tensor) -> Tensor:
    """[`sinusoids`][] in the dtype and on the device of ``like``, a tensor of any shape: ``[distances,
    features]`` of a table that is computed once in a process; programs of ``torch.export`` compute it."""
    if torch.compiler.is_exporting():
        return sinusoids(distances, features, clamp_len).to(like)
    table = copied_table if torch.compiler.is_compiling() else shared_table
    return table(distances, features, clamp_len, like)


def shared_table(distances: int, features: int, clamp_len: int | None, like: Tensor) -> Tensor:
    """A view of the table, ``[distances, features]``."""
    mode = like.fake_mode if isinstance(like, FakeTensor) else None  # counting memory has tables of its own
    kind = features, clamp_len, like.dtype, like.device, mode
    if kind not in _TABLES or len(_TABLES[kind]) < distances:
        with torch.inference_mode(False):  # a tensor of inference mode can't be used in training
            _TABLES[kind] = sinusoids(distances, features, clamp_len).to(like.device, like.dtype)
    return _TABLES[kind][:distances]


@torch.library.custom_op("memformers::sinusoid_table", mutates_args=())
def copied_table(distances: int, features: int, clamp_len: int | None, like: Tensor) -> Tensor:
    """A copy of it, ``[distances, features]``: ``torch.compile`` takes a function's constant only once."""
    return shared_table(distances, features, clamp_len, like).clone()


@copied_table.register_fake
def _(distances: int, features: int, clamp_len: int | None, like: Tensor) -> Tensor:
    return like.new_empty(distances, features)
