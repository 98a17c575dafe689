"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): a transformer that remembers the last segments."""

from collections.abc import Sequence

from torch import Tensor, nn

from memformers.layers import MemoryLayer, final_norm, sparing, stack
from memformers.memory import check_memory


class TransformerXLLayer(MemoryLayer):
    """The shared layer, attending over memory and segment (section 3.2)."""

    def forward(self, *, x: Tensor, mem: Tensor | None, mask: Tensor | None = None) -> Tensor:
        """``x [S, B, D]`` and ``mem [M, B, D]`` (or None) to ``[S, B, D]``; ``mask [S, M + S, B]``
        or ``[S, M + S, 1]``, true where a query may look, None for causal."""
        return self.attend_and_transform(x, [] if mem is None else [mem], mask)


class TransformerXL(nn.Module):
    """``n_layers`` layers built like ``layer``, each with fresh weights, and in pre-norm a final norm.

    The memory is passed in and comes back as a list; growing and cutting it is the business of
    :mod:`memformers.memory`.
    """

    def __init__(self, layer: TransformerXLLayer, n_layers: int):
        super().__init__()
        self.layers = stack(layer, n_layers)
        self.norm = final_norm(layer)
        self.recompute = False
        """Whether layers are computed again in the backward pass, to save memory."""

    def forward(
        self, x: Tensor, mem: Sequence[Tensor] | None, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """``x [S, B, D]`` and ``mem``, None, empty, or a tensor ``[M, B, D]`` a layer.

        Returns the output ``[S, B, D]`` and ``new_mem``: the detached input ``[S, B, D]`` of each
        layer, which is what this segment adds to the memory. Raises ValueError for a memory of
        another depth, batch, width, dtype or device.
        """
        mem = mem or []
        check_memory("mem", mem, x, len(self.layers))
        new_mem = []
        for i, layer in enumerate(self.layers):
            new_mem.append(x.detach())
            x = sparing(layer, self.recompute)(x=x, mem=mem[i] if mem else None, mask=mask)
        return self.norm(x), new_mem
