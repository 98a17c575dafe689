"""A stack of layers that remembers: what Transformer-XL and the Compressive Transformer have in common."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_arguments
from memformers.models.boundaries import check_starts, first_in_window, first_of_document, seen_of_past
from memformers.models.config import NetworkConfig
from memformers.models.kinds import NoSettings
from memformers.models.layers import MemoryLayer
from memformers.models.lengths import ByLayer, LayerLengths, by_layer
from memformers.models.memory import Memory, check_memory
from memformers.models.positions import Sinusoids
from memformers.models.remembering import Compressed, keep_newest


class MemoryStack(nn.Module):
    """``n_layers`` layers built like ``layer``, or like those given one by one, with fresh weights, and in
    pre-norm a final norm.

    Memory is passed in, and the inputs that each layer adds to it come back. A model derives from this with
    a ``forward`` that takes its kinds of memory, and with another [`advance`][] if it doesn't only forget.
    """

    takes: ClassVar[tuple[str, ...]] = ("mem", "valid")
    """The parts of a [`Memory`][] that are arguments of ``forward``."""
    Config: ClassVar[type] = NoSettings
    """The frozen dataclass of settings that no other model has."""
    uses: ClassVar[tuple[str, ...]] = ()
    """The settings of other models that a memory of one's own uses too."""
    keeps_keys: ClassVar[bool] = True
    """Whether a [`Stepper`][memformers.generation.incremental.Stepper] may keep the keys and values of its
    layers, which then attend to compressed memory, memory and segment alone."""

    @classmethod
    def layer_lengths(cls, config: NetworkConfig) -> list[LayerLengths]:
        """How much each layer of the network of ``config`` remembers."""
        raise NotImplementedError

    @classmethod
    def build(cls, config: NetworkConfig, parts: Mapping[str, Any]) -> "MemoryStack":
        """The network of ``config``, with layers of these ``parts``, the arguments of a [`MemoryLayer`][]."""
        raise NotImplementedError

    @classmethod
    def attention_sizes(cls, config: NetworkConfig) -> list[tuple[int, int]]:
        """How many queries and keys each attention gets for a segment, with a full memory: one attention for
        each layer, of S queries over M + C + S keys."""
        S = config.segment_len
        return [(S, own.keys + S) for own in cls.layer_lengths(config)]

    @classmethod
    def more_operations(cls, config: NetworkConfig) -> int:
        """Operations of a token, in all layers together, for what reads and writes the memory beside that
        attention: those of matrix products, where a multiply-add is two."""
        return 0

    @check_arguments
    def __init__(self, layer: MemoryLayer | Sequence[MemoryLayer], n_layers: Count):
        super().__init__()
        layers = [layer] * n_layers if isinstance(layer, MemoryLayer) else list(layer)
        if len(layers) != n_layers:
            raise UserError(f"expected n_layers={n_layers} layers, or one for all, got {len(layers)} layers.")
        layer = layers[0]
        self.layers = nn.ModuleList(map(copied, layers))
        reset_parameters(self.layers.modules())
        # In post-norm the last layer has normalized its sums already.
        self.norm = nn.LayerNorm(layer.d_model) if layer.norm == "pre" else nn.Identity()
        self.recompute = False
        """Whether layers are computed again in the backward pass, to save memory."""

    def read(
        self,
        x: Tensor,
        memory: Memory,
        mask: Tensor | None = None,
        doc_starts: Tensor | None = None,
        window: ByLayer | None = None,
        through_memory: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """A segment ``x [S, B, D]`` after ``memory``; ``mask [S, K, B]`` or ``[S, K, 1]``, None for causal.

        ``doc_starts [S, B]`` is true where a new document begins: its queries see no key before. With a
        ``window``, each query sees only that many of the newest keys, its own included.

        Returns the output ``[S, B, D]``, and each layer's detached input ``[S, B, D]``, which is what this
        segment adds to the memory; ``through_memory``, it keeps its gradient. Raises ValueError for a memory
        of another depth, batch, width, dtype or device, and for starts of another shape, dtype or device.
        """
        check_memory(memory, x, len(self.layers))
        check_starts(doc_starts, x)
        key_start = self.first_seen(x, memory, doc_starts, window)
        inputs = []
        for i, layer in enumerate(self.layers):
            inputs.append(x if through_memory else x.detach())
            x = maybe_recompute(layer, self.recompute)(
                x=x,
                mem=memory.mem[i] if memory.mem else None,
                c_mem=memory.c_mem[i] if memory.c_mem else None,
                mask=mask,
                key_start=key_start[i],
            )
        return self.norm(x), inputs

    def first_seen(
        self, x: Tensor, memory: Memory, doc_starts: Tensor | None, window: ByLayer | None
    ) -> list[Tensor | None]:
        """The first key that each query of ``x [S, B, ·]`` may see in each layer, int64 ``[B, S]``, for the
        arguments of [`read`][]; None where every query sees all keys up to its own."""
        n_layers = len(self.layers)
        if doc_starts is None and memory.valid is None and window is None:
            return [None] * n_layers
        lengths = memory.lengths(n_layers)
        # What a slot stands for is asked of a compression only where it matters.
        asked = memory.valid is not None and any(C for _, C in lengths)
        rates = self.compression_rates if asked else [1] * n_layers
        windows = [None] * n_layers if window is None else by_layer(window, n_layers, "window")
        found: list[Tensor | None] = []
        of_each = list(zip(lengths, rates, windows, strict=True))
        for layer, of_one in enumerate(of_each):
            if layer and of_one == of_each[layer - 1]:  # as are all layers of most models
                found.append(found[-1])
                continue
            (M, C), rate, own_window = of_one
            seen = None if memory.valid is None else self.keys_seen(memory.valid, M, C, rate)
            key_start = first_of_document(doc_starts, seen, len(x), M + C)
            found.append(first_in_window(x, key_start, C + M + len(x), own_window))
        return found

    def keys_seen(self, valid: Tensor, mem_len: int, c_mem_len: int, rate: int) -> Tensor:
        """How many of the newest keys of a memory of ``mem_len`` positions and ``c_mem_len`` slots belong to
        the running document of ``valid [B]`` positions: int64 ``[B]``."""
        return seen_of_past(valid, mem_len, c_mem_len, rate)

    def after_segment(
        self,
        memory: Memory,
        inputs: Sequence[Tensor],
        config: NetworkConfig,
        x: Tensor,
        doc_starts: Tensor | None = None,
        through_memory: bool = False,
    ) -> tuple[Memory, Tensor]:
        """[`remember`][] for the network of ``config``, after the segment ``x [S, B, D]``, whose layer inputs
        carry a gradient ``through_memory``."""
        return self.remember(memory, inputs, config.layer_lengths, doc_starts)

    def remember(
        self,
        memory: Memory,
        inputs: Sequence[Tensor],
        lengths: Sequence[LayerLengths],
        doc_starts: Tensor | None = None,
    ) -> tuple[Memory, Tensor]:
        """The memory after a segment with these layer inputs, ``[S, B, D]`` a layer, and ``doc_starts
        [S, B]``, shortened to the ``lengths`` of each layer; and the loss of compressing it, a scalar: 0
        where nothing was compressed."""
        memory, compressed = self.advance(memory, inputs, lengths, doc_starts)
        if compressed is None:
            return memory, inputs[0].new_zeros(())
        return memory, self.compression_loss_of(inputs, compressed)

    def advance(
        self,
        memory: Memory,
        inputs: Sequence[Tensor],
        lengths: Sequence[LayerLengths],
        doc_starts: Tensor | None = None,
    ) -> tuple[Memory, Compressed | None]:
        """The memory of [`remember`][], and what was compressed, ``[·, B, D]`` a layer, None for nothing."""
        return keep_newest(memory, inputs, lengths, doc_starts), None

    def compression_loss_of(self, inputs: Sequence[Tensor], compressed: Compressed) -> Tensor:
        """The loss of what was ``compressed`` after a segment with these ``inputs [S, B, D]``, a scalar."""
        return inputs[0].new_zeros(())

    def recompute_slots(self, memory: Memory, lengths: Sequence[LayerLengths]) -> Memory:
        """``memory`` as a segment is to read it: where f_c learns from the language model's loss, its newest
        slots ``[m, B, D]`` a layer are made anew from what they stand for, with the gradient to f_c."""
        return memory

    @property
    def compression_rates(self) -> list[int]:
        """How many positions a slot of each layer's compressed memory stands for."""
        return [1] * len(self.layers)

    @property
    def memory_layers(self) -> list[MemoryLayer]:
        """The layers, by their type."""
        return cast(list[MemoryLayer], list(self.layers))

    @property
    def compressions(self) -> list[nn.Module]:
        """Each layer's f_c, which is called beside the layers; none for a model that only forgets."""
        return []


def copied(layer: MemoryLayer) -> MemoryLayer:
    """A copy with weights of its own, and with the same table of sinusoids."""
    shared = {id(module): module for module in layer.modules() if isinstance(module, Sinusoids)}
    return copy.deepcopy(layer, dict(shared))


def reset_parameters(modules: Iterable[nn.Module]) -> None:
    """Let each module that has a ``reset_parameters`` draw its weights anew; others keep theirs."""
    for module in modules:
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def maybe_recompute(layer: nn.Module, recompute: bool) -> Callable[..., Tensor]:
    """``layer``, from ``[S, B, D]`` to the same; or with ``recompute``, one that keeps only its inputs for
    the backward pass and computes the rest again there (Chen et al. 2016, arXiv 1604.06174)."""
    if recompute and torch.is_grad_enabled():
        return partial(checkpoint, layer, use_reentrant=False)
    return layer


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode within the block, and afterwards each module in the mode it came in."""
    modes = [(module, module.training) for module in model.modules()]
    if not any(training for _, training in modes):
        yield
        return
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # parents first
            module.train(training)
        for module, training in modes:  # also one that is part of several
            module.training = training
