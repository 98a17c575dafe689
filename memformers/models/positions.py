"""How distances are represented by the paper's sinusoids."""

import torch
from torch import Tensor

_TABLES: dict[tuple[object, ...], Tensor] = {}
"""The longest table of each kind that was asked for; all layers and models share it."""


def sinusoids(distances: int, features: int, clamp_len: int | None = None) -> Tensor:
    """The paper's features of the distances 0 … distances−1, ``[distances, features]`` in float64:
    sines, then cosines, of wavelengths from 2π to 10,000·2π (Vaswani et al. 2017, section 3.5). Those
    beyond ``clamp_len`` are taken for it."""
    rates = 10_000.0 ** -(torch.arange(0, features, 2, dtype=torch.float64) / features)
    at = torch.arange(distances, dtype=torch.float64).clamp(max=distances if clamp_len is None else clamp_len)
    angles = at[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=-1)[:, :features]


def sinusoid_table(distances: int, usual: int, features: int, clamp_len: int | None, like: Tensor) -> Tensor:
    """[`sinusoids`][] in the dtype and on the device of ``like``, a tensor of any shape: ``[distances,
    features]`` of a table that is computed once in a process, for the ``usual`` number of distances or more.
    A graph of ``torch.compile`` has the usual one as a constant; other graphs compute it."""
    kind = features, clamp_len, like.dtype, like.device
    if torch.compiler.is_exporting() or (torch.compiler.is_compiling() and distances > usual):
        return sinusoids(distances, features, clamp_len).to(like)
    return _table(usual if distances <= usual else distances, *kind)[:distances]


def _table(
    distances: int, features: int, clamp_len: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    kind = features, clamp_len, dtype, device
    if kind not in _TABLES or len(_TABLES[kind]) < distances:
        with torch.inference_mode(False):  # a tensor of inference mode can't be used in training
            _TABLES[kind] = sinusoids(distances, features, clamp_len).to(device, dtype)
    return _TABLES[kind]


# As torch.compiler.assume_constant_result does, which would import the compiler, half a second.
_table._dynamo_marked_constant = True  # type: ignore[attr-defined]
