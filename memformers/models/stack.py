"""A stack of layers that remembers: what Transformer-XL and the Compressive Transformer have in common."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memformers.common.errors import UserError
from memformers.models.boundaries import check_starts, check_valid, first_of_document, first_within_span
from memformers.models.checks import check_memory
from memformers.models.compression import needs_attention
from memformers.models.layers import MemoryLayer
from memformers.models.lengths import ByLayer, LayerLengths, MemoryLengths, by_layer
from memformers.models.memory import Memory
from memformers.models.most_used import attention_received
from memformers.models.positions import Sinusoids
from memformers.models.remembering import Leaving


class MemoryStack(nn.Module, ABC):
    """``n_layers`` layers built like ``layer``, or like those given one by one, with fresh weights, and in
    pre-norm a final norm.

    Memory is passed in, and the inputs that each layer adds to it come back. A model derives from this and
    says how its memory grows: [`leaving`][] and [`remember`][].
    """

    def __init__(self, layer: MemoryLayer | Sequence[MemoryLayer], n_layers: int):
        super().__init__()
        if n_layers < 1:
            raise UserError(f"n_layers={n_layers} makes no model; use at least 1.")
        layers = [layer] * n_layers if isinstance(layer, MemoryLayer) else list(layer)
        if len(layers) != n_layers:
            raise UserError(
                f"{len(layers)} layers came for n_layers={n_layers}; give one for each, or one for all."
            )
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
        starts: Tensor | None = None,
        span: ByLayer | None = None,
        through_memory: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """A segment ``x [S, B, D]`` after ``memory``; ``mask [S, K, B]`` or ``[S, K, 1]``, None for causal.

        ``starts [S, B]`` is true where a new document begins: its queries see no key before. With a ``span``,
        each query sees only that many of the newest keys, its own included.

        Returns the output ``[S, B, D]``, and each layer's detached input ``[S, B, D]``, which is what this
        segment adds to the memory; ``through_memory``, it keeps its gradient. Raises ValueError for a memory
        of another depth, batch, width, dtype or device, and for starts of another shape, dtype or device.
        """
        check_memory("mem", memory.mem, x, len(self.layers))
        check_memory("c_mem", memory.c_mem, x, len(self.layers))
        check_valid(memory.valid, x)
        check_starts(starts, x)
        first = self.first_seen(x, memory, starts, span)
        inputs = []
        for i, layer in enumerate(self.layers):
            inputs.append(x if through_memory else x.detach())
            x = sparing(layer, self.recompute)(
                x=x,
                mem=memory.mem[i] if memory.mem else None,
                c_mem=memory.c_mem[i] if memory.c_mem else None,
                mask=mask,
                first=first[i],
            )
        return self.norm(x), inputs

    def first_seen(
        self, x: Tensor, memory: Memory, starts: Tensor | None, span: ByLayer | None
    ) -> list[Tensor | None]:
        """The first key that each query of ``x [S, B, ·]`` may see in each layer, int64 ``[B, S]``, for the
        arguments of [`read`][]; None where every query sees all keys up to its own."""
        n_layers = len(self.layers)
        if starts is None and memory.valid is None and span is None:
            return [None] * n_layers
        lengths = memory.lengths(n_layers)
        # What a slot stands for is asked of a compression only where it matters.
        asked = memory.valid is not None and any(C for _, C in lengths)
        rates = self.compression_rates if asked else [1] * n_layers
        spans = [None] * n_layers if span is None else by_layer(span, n_layers, "span")
        found: list[Tensor | None] = []
        of_each = list(zip(lengths, rates, spans, strict=True))
        for layer, of_one in enumerate(of_each):
            if layer and of_one == of_each[layer - 1]:  # as are all layers of most models
                found.append(found[-1])
            else:
                found.append(first_seen_by_layer(x, memory.valid, starts, *of_one))
        return found

    def received_by_oldest(
        self, memory: Memory, inputs: Sequence[Tensor], starts: Tensor | None, layer: int, positions: int
    ) -> Tensor | None:
        """How much attention the oldest positions of a ``layer``'s memory, ``positions`` of them, received in
        the segment of these ``inputs [S, B, D]``, with ``starts [S, B]``: ``[positions, B]``; None where its
        f_c doesn't need it. A ``mask`` or ``span`` of the forward pass is not known here."""
        if not needs_attention(self.compressions[layer]):
            return None
        past = [parts[layer] for parts in (memory.c_mem, memory.mem) if parts]
        first = self.first_seen(inputs[layer], memory, starts, None)[layer]
        context, S = torch.cat((*past, inputs[layer])), len(inputs[layer])
        received = attention_received(self.memory_layers[layer], context, S, first)
        slots = len(memory.c_mem[layer]) if memory.c_mem else 0
        return received[slots : slots + positions]

    @property
    def compression_rates(self) -> list[int]:
        """How many positions a slot of each layer's compressed memory stands for."""
        return [1] * len(self.layers)

    @abstractmethod
    def arguments(self, memory: Memory) -> dict[str, tuple[Tensor, ...] | Tensor | None]:
        """``memory`` as arguments of the model's forward pass: tensors ``[·, B, D]`` a layer each, and
        ``valid [B]``."""

    @abstractmethod
    def leaving(self, length: int, lengths: LayerLengths) -> Leaving:
        """What leaves a layer's memory of ``length`` positions after a segment, to bring it back to its
        ``lengths``."""

    @abstractmethod
    def remember(
        self,
        memory: Memory,
        inputs: Sequence[Tensor],
        lengths: MemoryLengths,
        starts: Tensor | None = None,
    ) -> tuple[Memory, Tensor]:
        """The memory after a segment with these layer inputs, ``[S, B, D]`` a layer, and ``starts [S, B]``;
        and the loss of compressing it, a scalar: 0 where nothing was compressed."""

    def made_anew(self, memory: Memory, lengths: MemoryLengths) -> Memory:
        """``memory`` as a segment is to read it: where f_c learns from the language model's loss, its newest
        slots ``[m, B, D]`` a layer are made anew from what they stand for, with the gradient to f_c."""
        return memory

    @property
    def memory_layers(self) -> list[MemoryLayer]:
        """The layers, by their type."""
        return cast(list[MemoryLayer], list(self.layers))

    @property
    def compressions(self) -> list[nn.Module]:
        """Each layer's f_c, which is called beside the layers; none for a model that only forgets."""
        return []


def first_seen_by_layer(
    x: Tensor,
    valid: Tensor | None,
    starts: Tensor | None,
    lengths: tuple[int, int],
    rate: int,
    span: int | None,
) -> Tensor | None:
    """The first key that each query of ``x [S, B, ·]`` may see in a layer with these ``lengths`` M and C,
    int64 ``[B, S]``; None where every query sees all keys up to its own."""
    (S, B), (M, C) = x.shape[:2], lengths
    first = first_of_document(starts, valid, S, M, C, rate)
    if span is None or span >= C + M + S:
        return first
    nearest = first_within_span(S, C + M + S, span, x.device).expand(B, S)
    return nearest if first is None else torch.maximum(first, nearest)


def copied(layer: MemoryLayer) -> MemoryLayer:
    """A copy with weights of its own, and with the same table of sinusoids."""
    shared = {id(module): module for module in layer.modules() if isinstance(module, Sinusoids)}
    return copy.deepcopy(layer, dict(shared))


def reset_parameters(modules: Iterable[nn.Module]) -> None:
    """Let each module that has a ``reset_parameters`` draw its weights anew; others keep theirs."""
    for module in modules:
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()


def sparing(layer: nn.Module, recompute: bool) -> Callable[..., Tensor]:
    """``layer``, from ``[S, B, D]`` to the same; or with ``recompute``, one that keeps only its inputs for
    the backward pass and computes the rest again there (Chen et al. 2016, arXiv 1604.06174)."""
    if recompute and torch.is_grad_enabled():
        return partial(checkpoint, layer, use_reentrant=False)
    return layer


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode within the block, and afterwards in the mode it came in."""
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()
