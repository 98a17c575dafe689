"""A memory transformer from features to features, to be used where a recurrent network is used."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple

from memformers.common.errors import UserError
from memformers.models.building import build_transformer, initialise_weights
from memformers.models.config import CoreConfig, NetworkConfig
from memformers.models.kinds import named
from memformers.models.memory import Memory, check_lengths, check_memory
from memformers.models.stack import MemoryStack, reset_parameters

if TYPE_CHECKING:
    from memformers.generation.incremental import Stepper


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
    """What the compression functions learn from, a scalar to add to the loss; exactly 0 if nothing was
    compressed in this segment."""


# So that torch.export.save can write a program that returns it.
_register_namedtuple(CoreOutput, serialized_type_name="memformers.CoreOutput")


class MemoryCore(nn.Module):
    """A memory transformer for features of any kind, used as ``nn.GRU`` is.

    Where F, the width of the features, is not D, a linear map leads to the first layer. Memory is a value:
    the module stores nothing of what it reads.

    Args:
        config: What the core is built from.

    Examples:
        >>> import torch
        >>> from memformers import CoreConfig, MemoryCore
        >>> core, memory = MemoryCore(CoreConfig(d_input=3, d_model=32, mem_len=32)), None
        >>> for segment in torch.randn(48, 2, 3).split(16):  # features [S, B, F]
        ...     output, memory, auxiliary_loss = core(segment, memory)
        >>> output.shape, memory.mem_len
        (torch.Size([16, 2, 32]), 32)
    """

    def __init__(self, config: CoreConfig):
        super().__init__()
        self.config = config
        F, D = config.d_input or config.d_model, config.d_model
        self.encode = nn.Linear(F, D) if config.d_input not in (None, D) else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.transformer = build_transformer(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw fresh weights, those of the compression functions last."""
        reset_parameters(self.encode.modules())
        initialise_weights(self.transformer)

    def forward(
        self,
        x: Tensor,
        memory: Memory | None = None,
        doc_starts: Tensor | None = None,
        *,
        through_memory: bool = False,
    ) -> CoreOutput:
        """Read a segment.

        Args:
            x: Features ``[S, B, F]``.
            memory: What the last segment returned; None for nothing.
            doc_starts: Boolean ``[S, B]``, true where a stream's new document, an episode for example,
                begins: it sees nothing of what came before, neither in the segment nor in memory.
            through_memory: Whether what this segment adds to the memory keeps its gradient.

        Returns:
            The output ``[S, B, D]``, the next memory and the auxiliary loss.

        Raises:
            ValueError: For features of another shape, dtype or device than the weights, for a memory of
                another model, batch, dtype or device, and for starts of another shape or dtype.
        """
        self.check_features(x)
        if memory is not None and not isinstance(memory, Memory):
            raise UserError(f"expected memory to be a Memory or None, got a {type(memory).__name__}.")
        memory = memory or Memory(())
        x = self.dropout(self.encode(x))  # [S, B, D]
        output, inputs = read_features(self.transformer, self.config, x, memory, doc_starts, through_memory)
        memory, loss = self.transformer.after_segment(
            memory, inputs, self.config, output, doc_starts, through_memory
        )
        return CoreOutput(output, memory, loss)

    def initial(self, batch: int) -> Memory:
        """An empty memory of ``batch`` streams with the shapes of a full one, so that all segments have the
        same shapes ([`Memory.empty`][memformers.models.memory.Memory.empty])."""
        one = self.weight
        return Memory.empty(self.config, batch, dtype=one.dtype, device=one.device)

    def stepper(self, batch: int, memory: Memory | None = None) -> "Stepper":
        """What reads ``batch`` streams step by step, from ``memory`` on, with keys and values kept
        ([`memformers.generation.incremental.Stepper`][])."""
        from memformers.generation.incremental import Stepper

        return Stepper(self, batch, memory)

    def encoded(self, x: Tensor) -> Tensor:
        """Features ``x [S, B, F]`` as the first layer reads them without dropout, ``[S, B, D]``."""
        self.check_features(x)
        encoded: Tensor = self.encode(x)
        return encoded

    @property
    def weight(self) -> Tensor:
        """A weight ``[D]``, which tells dtype and device."""
        return self.transformer.memory_layers[0].norm_ff.weight

    def check_features(self, x: Tensor) -> None:
        """Raise UserError unless ``x`` is features ``[S, B, F]``, S and B at least 1, of the weights' dtype
        and device."""
        F, one = self.config.d_input or self.config.d_model, self.weight
        if x.dim() != 3 or 0 in x.shape or x.shape[2] != F:
            raise UserError(
                f"expected features as [segment, batch, {F}], at least one of each, got {list(x.shape)}."
            )
        if x.device != one.device or (x.dtype != one.dtype and not torch.is_autocast_enabled(x.device.type)):
            raise UserError(
                f"expected features as {one.dtype} on {one.device}, as the weights are, got {x.dtype} on "
                f"{x.device}; move them there."
            )

    # The rooms above build on this one, so the methods below import them when they are called.

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, each atomically; ValueError as
        [`MemoryLM.save_pretrained`][memformers.models.language_model.MemoryLM.save_pretrained]."""
        from memformers.pretrained.own import save_model

        save_model(self, Path(folder))

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        device: str | torch.device = "cpu",
        *,
        model: str | type[MemoryStack] = "",
        gate: str | type[nn.Module] = "",
        compression: str | type[nn.Module] = "",
        compression_loss: str | type[nn.Module] = "",
    ) -> "MemoryCore":
        """The core that [`save_pretrained`][] wrote to ``folder``, in eval mode, on ``device``; ``model`` and
        the parts of your own are as in
        [`MemoryLM.from_pretrained`][memformers.models.language_model.MemoryLM.from_pretrained]. Nothing is
        unpickled. Raises ValueError for a missing, broken or mismatched file."""
        from memformers.pretrained.own import load_core

        own = {"gate": gate, "compression": compression, "compression_loss": compression_loss}
        for setting, name in {"model": model, **own}.items():
            named(name, setting)
        return load_core(Path(folder), device)


def read_features(
    transformer: MemoryStack,
    config: NetworkConfig,
    x: Tensor,
    memory: Memory,
    doc_starts: Tensor | None = None,
    through_memory: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """``x [S, B, D]``, with ``doc_starts [S, B]``, after ``memory``, to the output ``[S, B, D]`` of the
    ``transformer`` of this ``config`` and each layer's input ``[S, B, D]``, which is detached without
    ``through_memory``. Raises ValueError for a ``memory`` that doesn't fit."""
    check_memory(memory, x, config.n_layers)
    check_lengths(memory, config)
    memory = transformer.recompute_slots(memory, config.layer_lengths)
    past = {name: getattr(memory, name) for name in transformer.takes}
    output, inputs = transformer(
        x, **past, doc_starts=doc_starts, window=config.window, through_memory=through_memory
    )
    return output, inputs
