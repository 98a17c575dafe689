"""A memory transformer from features to features, to be used where a recurrent network is used."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple

from memformers.common.errors import UserError
from memformers.common.fields import check_arguments
from memformers.models.config import CoreConfig
from memformers.models.io import Pretrained
from memformers.models.memory import Memory
from memformers.models.stack import build_transformer, children_first, initialise_weights, reset_parameters

if TYPE_CHECKING:
    from memformers.common.types import typed_like


class CoreOutput(NamedTuple):
    """What [`MemoryCore`][] returns for a segment.

    Examples:
        >>> import torch
        >>> from memformers import CoreConfig, MemoryCore
        >>> read = MemoryCore(CoreConfig(d_input=3, d_model=32))(torch.randn(16, 2, 3))  # features [S, B, F]
        >>> read.output.shape, read.memory.mem_len
        (torch.Size([16, 2, 32]), 16)
    """

    output: Tensor
    """``[S, B, D]``."""
    memory: Memory
    """To pass in with the streams' next segment."""
    auxiliary_loss: Tensor
    """What the compression functions learn from, a scalar to add to the loss; 0 if nothing was compressed."""


# So that torch.export.save can write a program that returns it.
_register_namedtuple(CoreOutput, serialized_type_name="memformers.CoreOutput")


class MemoryCore(Pretrained):
    """A memory transformer for any features, built from ``config`` and used like ``nn.GRU``; if their width F
    differs from D, a linear layer projects them. It is stateless: pass the memory in, get the new one back.

    Examples:
        >>> import torch
        >>> from memformers import CoreConfig, MemoryCore
        >>> core, memory = MemoryCore(CoreConfig(d_input=3, d_model=32, mem_len=32)), None
        >>> for segment in torch.randn(48, 2, 3).split(16):  # features [S, B, F]
        ...     output, memory, auxiliary_loss = core(segment, memory)
        >>> output.shape, memory.mem_len
        (torch.Size([16, 2, 32]), 32)
    """

    config: CoreConfig
    config_class = CoreConfig

    @check_arguments
    def __init__(self, config: CoreConfig):
        super().__init__()
        self.config = config
        D = config.d_model
        F = config.d_input or D
        self.encode = nn.Linear(F, D) if F != D else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.transformer = build_transformer(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw fresh weights, those of the compression functions last."""
        reset_parameters([module for _, module in children_first(self.encode)])
        initialise_weights(self.transformer)

    def forward(
        self,
        x: Tensor,
        memory: Memory | None = None,
        doc_starts: Tensor | None = None,
        *,
        through_memory: bool = False,
    ) -> CoreOutput:
        """Read features ``x [S, B, F]``: output ``[S, B, D]``, next memory and auxiliary loss. Raises
        ValueError for features, memory or starts of another shape, dtype or device, or of another model.

        Args:
            memory: What the last segment returned; None for nothing.
            doc_starts: Boolean ``[S, B]``, true where a stream's new document or episode begins: it sees
                nothing of what came before, neither in the segment nor in memory.
            through_memory: Whether what this segment adds to the memory keeps its gradient.
        """
        x = self.dropout(self.encoded(x))  # [S, B, D]
        return CoreOutput(*self.transformer(x, memory, doc_starts=doc_starts, through_memory=through_memory))

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def initial(self, batch: int) -> Memory:
        """An empty memory of ``batch`` streams in the shapes of a full one ([`memformers.Memory`][])."""
        weight = self.transformer.weight
        return Memory.empty(self.config, batch, dtype=weight.dtype, device=weight.device)

    def encoded(self, x: Tensor) -> Tensor:
        """Features ``x [S, B, F]`` as the first layer reads them without dropout, ``[S, B, D]``: in the
        weights' dtype, under autocast too, so that memory is as well. UserError for what ``forward``
        refuses."""
        F = self.config.d_input or self.config.d_model
        weight = self.transformer.weight
        if not isinstance(x, Tensor):
            raise UserError(f"expected features as a torch.Tensor, got {type(x).__name__}; convert them.")
        if x.dim() != 3 or 0 in x.shape or x.shape[2] != F:
            raise UserError(f"expected features [segment, batch, {F}], at least 1 of each, got {[*x.shape]}.")
        # Autocast converts features, but not to another device.
        may_convert = torch.is_autocast_enabled(x.device.type)
        if x.device != weight.device or (x.dtype != weight.dtype and not may_convert):
            raise UserError(
                f"expected features as {weight.dtype} on {weight.device}, as the weights, got {x.dtype} on "
                f"{x.device}; convert them."
            )
        return self.encode(x).to(weight.dtype)
