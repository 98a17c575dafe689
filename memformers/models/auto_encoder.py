"""A compression function f_c with the decoder g that its auto-encoding loss needs (Rae et al. 2020, arXiv
1911.05507, section 3.2.1)."""

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.models.compression import needs_attention, rate_of


class CompressionAutoEncoder(nn.Module):
    """f_c, which is ``encode``, ``[n·c, B, D]`` to ``[n, B, D]``, beside a linear decoder g, ``[n, B, D]`` to
    ``[n·c, B, D]``, which [`AutoEncodingLoss`][] trains with it (section 3.2.1).

    Slots are made by f_c alone. Raises ValueError for an ``encode`` without a ``compression_rate``, and for
    one that needs attention, such as [`MostUsedCompression`][].
    """

    def __init__(self, encode: nn.Module, d_model: int):
        super().__init__()
        if needs_attention(encode):
            raise UserError(
                f"a decoder was expected beside an f_c that makes slots of memories alone, but "
                f"{type(encode).__name__} needs attention too; leave the decoder out, and use "
                f"compression_loss='attention' or 'none'."
            )
        self.encode = encode
        self.compression_rate = rate_of(encode)
        # A transposed convolution with kernel and stride c: one slot at a time becomes its c positions.
        self.decoder = nn.Conv1d(d_model, self.compression_rate * d_model, kernel_size=1)

    def forward(self, mem: Tensor) -> Tensor:
        """``mem [n·c, B, D]``, oldest first, to the slots ``[n, B, D]``."""
        slots: Tensor = self.encode(mem)
        return slots

    def decode(self, c_mem: Tensor) -> Tensor:
        """Slots ``c_mem [n, B, D]`` to what they may have been, ``[n·c, B, D]``."""
        positions = F.linear(c_mem, self.decoder.weight.squeeze(2), self.decoder.bias)  # [n, B, c·D]
        return rearrange(positions, "n b (c d) -> (n c) b d", c=self.compression_rate)
