"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): a transformer that remembers the last segments."""

from collections.abc import Sequence

from torch import Tensor

from memformers.models.layers import TransformerXLLayer
from memformers.models.lengths import ByLayer
from memformers.models.memory import Memory
from memformers.models.stack import MemoryStack


class TransformerXL(MemoryStack):
    """``n_layers`` layers built like ``layer``, each with fresh weights, and in pre-norm a final norm."""

    def __init__(self, layer: TransformerXLLayer, n_layers: int):
        super().__init__(layer, n_layers)

    def forward(
        self,
        x: Tensor,
        mem: Sequence[Tensor] | None,
        mask: Tensor | None = None,
        *,
        doc_starts: Tensor | None = None,
        valid: Tensor | None = None,
        window: ByLayer | None = None,
        through_memory: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """``x [S, B, D]`` and ``mem``, None, empty, or a tensor ``[M, B, D]`` a layer; ``mask [S, M + S, B]``
        or ``[S, M + S, 1]``, true where a query may look, None for causal.

        ``doc_starts [S, B]`` is true where a new document begins, and ``valid [B]`` says how many of the
        newest positions of ``mem`` belong to the running one, None for all; a query sees no other document.
        With a ``window``, a query sees only that many of the newest positions, its own included. M and the
        window may differ by layer.

        Returns the output ``[S, B, D]`` and ``new_mem``: the detached input ``[S, B, D]`` of each
        layer, which is what this segment adds to the memory; ``through_memory``, it keeps its gradient.
        Raises ValueError for a memory of another depth, batch, width, dtype or device, and for starts or
        valid that don't fit.
        """
        return self.read(x, Memory(tuple(mem or ()), valid=valid), mask, doc_starts, window, through_memory)
