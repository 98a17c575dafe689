"""Attention by [`memformers.kernels.flash`][], which takes the two factors of r_d = W_R · sinusoid(d) in
place of the vectors r_d."""

from typing import TYPE_CHECKING

from einops import rearrange
from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.kernels import flash, is_flash_faster
from memformers.models.hooks import is_unmodified

if TYPE_CHECKING:
    from memformers.models.attention import RelativeMultiHeadAttention


def is_flash_used(attention: "RelativeMultiHeadAttention", query: Tensor, dropout_prob: float) -> bool:
    """Whether the flash kernel computes the attention of ``query [B, H, S, E]``: if it was named, or with
    ``"auto"`` if it is faster. ``"auto"`` avoids it with dropout: PyTorch's flash kernel for CPUs has
    none."""
    if attention.kernel == "flash":
        return True
    return (
        attention.kernel == "auto"
        and attention.has_rotations
        and is_unmodified(attention.position, nn.Linear)
        and not dropout_prob
        and is_flash_faster(query, attention.position_features)
    )


def attend_by_flash(
    attention: "RelativeMultiHeadAttention", query: Tensor, key: Tensor, value: Tensor, *,
    mask: Tensor | None, key_start: Tensor | None, dropout_prob: float,
) -> Tensor:  # fmt: skip
    """[`memformers.kernels.flash.relative_attention`][] with the positions of ``attention``: ``[B, H, S,
    E]``."""
    if not is_unmodified(attention.position, nn.Linear):
        raise UserError(
            "kernel='flash' reads the weight of the map W_R, position, which was wrapped, hooked or "
            "replaced; use kernel='auto'."
        )
    w = rearrange(attention.position.weight, "(h e) p -> h e p", h=attention.n_heads)  # [H, E, P]
    table = attention.sinusoid_table(key.shape[2])  # [K, P]
    return flash.relative_attention(
        query, key, value, w, table, u=attention.u, v=attention.v, mask=mask, key_start=key_start,
        dropout_prob=dropout_prob,
    )  # fmt: skip
