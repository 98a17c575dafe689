"""What a memory of one's own defines, and what it gets for it: the layers, documents, saving, generation."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.models.boundaries import EVERYTHING, valid_afterwards
from memformers.models.config import NetworkConfig
from memformers.models.kinds import check_returned, own_code, place_of
from memformers.models.layers import MemoryLayer
from memformers.models.lengths import ByLayer, LayerLengths
from memformers.models.memory import Memory, check_lengths, check_memory
from memformers.models.remembering import followed
from memformers.models.stack import MemoryStack


class OwnMemory(MemoryStack):
    """The class from which a memory of your own derives.

    A layer remembers its newest M inputs as they are, and C slots ``[C, B, D]``, which are yours: they stand
    for what came before. Each query attends to slots, newest inputs and segment. A memory defines:

    - ``layer_lengths(config)``: for each layer the [`LayerLengths`][memformers.models.lengths.LayerLengths]:
      M, C, and how many positions a slot stands for. They are checked; keys M + C and reach M + c·C are
      reported beside every result.
    - ``grow(layer, slots, left, belongs)``: the slots after some positions have left the newest M; or, for a
      memory that grows in another way, all of ``remember``.

    And if it wants:

    - ``Config``, a frozen dataclass of its own settings, with types, defaults and a text below each. They
      become options of the command and settings of arms, and are found in ``self.settings``.
    - ``uses``, those of the other models' settings that it uses too.
    - ``layer``, the class of its layers, if they do something else with the slots than attend to them: its
      ``forward`` gets them as ``c_mem``.
    - ``forward``, if the segment is read in another way altogether.
    - ``keys_seen``, if the slots are not all of the running document, or none.
    - ``keeps_keys = True``, if ``forward`` and ``layer`` are those of this class, for faster generation.
    - ``attention_sizes`` and ``more_operations``, if it isn't an attention of S queries over M + C + S keys
      alone that reads and writes the memory, for the keys and the cost beside every result.

    Args:
        config: What the network is built from.
        parts: The arguments of its layers.

    Examples:
        >>> import torch
        >>> from memformers import LayerLengths, MemoryLM, ModelConfig, OwnMemory
        >>> class Mean(OwnMemory):
        ...     @classmethod
        ...     def layer_lengths(cls, config):
        ...         return [LayerLengths(mem_len=16, c_mem_len=1, compression_rate=64)] * config.n_layers
        ...     def grow(self, layer, slots, left, belongs):
        ...         return 0.9 * slots + 0.1 * left.mean(0, keepdim=True)
        >>> model = MemoryLM(ModelConfig(model=Mean, vocab_size=65))
        >>> memory = model(torch.randint(65, (64, 2))).memory
        >>> memory.mem_len, memory.c_mem_len
        (16, 1)
    """

    uses: ClassVar[tuple[str, ...]] = ("mem_len", "tbptt")
    """The settings of other models that it uses: some of ``mem_len``, ``c_mem_len``, ``compression_rate``,
    ``tbptt``."""
    takes: ClassVar[tuple[str, ...]] = ("mem", "c_mem", "valid")
    layer: ClassVar[type[MemoryLayer]] = MemoryLayer
    """The class of its layers."""
    keeps_keys: ClassVar[bool] = False
    """Whether generation may keep the keys of slots, newest inputs and segment: if it has no ``forward`` of
    its own, and its layers attend to these alone. Without it, generation reads the running segment again for
    each token."""

    def __init__(self, config: NetworkConfig, parts: Mapping[str, Any]):
        super().__init__(self.layer(**parts), config.n_layers)
        self.settings = config.own

    @classmethod
    def build(cls, config: NetworkConfig, parts: Mapping[str, Any]) -> "OwnMemory":
        """The network of ``config``, with layers of these ``parts``."""
        with own_code(cls):
            return cls(config, parts)

    def grow(self, layer: int, slots: Tensor, left: Tensor, belongs: Tensor) -> Tensor:
        """The slots of a layer after some positions have left its newest M.

        Args:
            layer: The number of the layer, from 0.
            slots: What this method returned before, ``[C, B, D]``; zeros in a stream whose document had no
                slots yet.
            left: The positions that leave now, oldest first, ``[n, B, D]``; zeros where they belong to an
                earlier document.
            belongs: Whether each belongs to the running document, boolean ``[n, B]``.

        Returns:
            ``[C, B, D]``.
        """
        raise NotImplementedError

    def remember(
        self,
        memory: Memory,
        inputs: Sequence[Tensor],
        lengths: Sequence[LayerLengths],
        doc_starts: Tensor | None = None,
    ) -> tuple[Memory, Tensor]:
        """The memory after a segment, and a loss of its own to be added to that of the language model, a
        scalar; ``inputs`` are what ``forward`` returned for each layer, ``[S, B, D]``. How much of it belongs
        to the running document, ``valid``, is added afterwards."""
        mem, c_mem = [], []
        for layer, (x, own) in enumerate(zip(inputs, lengths, strict=True)):
            whole = torch.cat([memory.mem[layer], x]) if memory.mem else x  # [M + S, B, D]
            n = max(len(whole) - own.mem_len, 0)
            slots = memory.c_mem[layer] if memory.c_mem else x[:0]
            if own.c_mem_len and (n or len(slots)):
                slots = slots if len(slots) else x.new_zeros(own.c_mem_len, *x.shape[1:])
                goes_on, belongs = running_document(memory.valid, doc_starts, whole, len(x))
                left = whole[:n] * belongs[:n, :, None]
                slots = self.grow(layer, slots * goes_on[:, None], left, belongs[:n]).to(x.dtype)
            mem.append(whole[n:])
            c_mem.append(slots)
        slots_of_all = tuple(c_mem) if any(map(len, c_mem)) else ()
        return Memory(tuple(mem), slots_of_all), inputs[0].new_zeros(())

    def forward(
        self,
        x: Tensor,
        mem: Sequence[Tensor] | None,
        c_mem: Sequence[Tensor] | None,
        mask: Tensor | None = None,
        *,
        doc_starts: Tensor | None = None,
        valid: Tensor | None = None,
        window: ByLayer | None = None,
        through_memory: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Read a segment, as [`CompressiveTransformer`][memformers.models.compressive.CompressiveTransformer]
        does; returns the output ``[S, B, D]``, and for each layer what ``remember`` is to get."""
        memory = Memory(tuple(mem or ()), tuple(c_mem or ()), valid)
        return self.read(x, memory, mask, doc_starts, window, through_memory)

    def keys_seen(self, valid: Tensor, mem_len: int, c_mem_len: int, rate: int) -> Tensor:
        """How many of the newest keys of a memory belong to the running document of ``valid [B]`` positions:
        all slots as soon as one position has left the newest M; int64 ``[B]``."""
        return valid.clamp(0, mem_len) + c_mem_len * (valid > mem_len)

    # What stands around the user's code, so that a mistake in it is one line with its place.

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor]]:
        """``forward``, whose output must be ``[S, B, D]`` as ``x`` is."""
        with own_code(type(self)):
            output, inputs = super().__call__(x, *args, **kwargs)
        check_returned(type(self), output, x.shape, "[S, B, D]")
        return output, inputs

    def after_segment(
        self,
        memory: Memory,
        inputs: Sequence[Tensor],
        config: NetworkConfig,
        x: Tensor,
        doc_starts: Tensor | None = None,
        through_memory: bool = False,
    ) -> tuple[Memory, Tensor]:
        """[`remember`][] after the segment ``x [S, B, D]``; the memory is checked, and detached without
        ``through_memory``."""
        lengths = config.layer_lengths
        with own_code(type(self)):
            after, loss = self.remember(memory, inputs, lengths, doc_starts)
        try:
            check_memory(after, x, config.n_layers)
            check_lengths(after, config, complete=True)
        except UserError as error:
            raise UserError(f"{place_of(type(self))}.remember: {error}") from None
        after = after if after.valid is not None else followed(memory, after, lengths, doc_starts, len(x))
        return after if through_memory else after.detach(), loss


def running_document(
    valid: Tensor | None, doc_starts: Tensor | None, whole: Tensor, segment_len: int
) -> tuple[Tensor, Tensor]:
    """What of a memory and the segment after it, ``whole [M + S, B, ·]``, belongs to the document that runs
    at its end, with ``valid [B]`` positions before the segment and ``doc_starts [S, B]``: whether the slots
    do, boolean ``[B]``, and which positions do, boolean ``[M + S, B]``."""
    L, B = whole.shape[:2]
    newest = valid_afterwards(valid, doc_starts, segment_len, EVERYTHING, EVERYTHING)  # [B]
    if newest is None:
        return whole.new_ones(B, dtype=torch.bool), whole.new_ones(L, B, dtype=torch.bool)
    return newest > L, torch.arange(L, 0, -1, device=whole.device)[:, None] <= newest
