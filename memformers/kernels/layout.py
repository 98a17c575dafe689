"""The order of the kernels' results in memory."""

from torch import Tensor


def sequence_first(x: Tensor) -> Tensor:
    """An empty ``[B, H, T, E]`` like ``x`` whose memory is in the modules' order, ``[T, B, H, E]``."""
    B, H, T, E = x.shape
    return x.new_empty(T, B, H, E).permute(1, 2, 0, 3)
