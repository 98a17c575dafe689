"""A stack of layers that remembers: what Transformer-XL and the Compressive Transformer have in common."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_arguments
from memformers.models.attention import RelativeMultiHeadAttention
from memformers.models.config import NetworkConfig
from memformers.models.documents import (
    check_starts,
    first_seen,
    seen_of_past,
    valid_afterwards,
    without_hidden,
)
from memformers.models.layers import FeedForward, MemoryLayer
from memformers.models.memory import Memory, check_memory
from memformers.models.memory_sizes import MemorySizes
from memformers.models.parts import check_returned, children_first, reset_parameters
from memformers.models.registry import NoSettings, lookup


class MemoryStack(nn.Module):
    """``n_layers`` layers built like ``layer``, or like those given one by one, with fresh weights, and in
    pre-norm a final norm. A model derives from this with [`update_memory`][], and with [`recompute_slots`][]
    if its slots learn from a later loss."""

    Config: ClassVar[type] = NoSettings
    """The frozen dataclass of settings that no other model has."""
    uses: ClassVar[tuple[str, ...]] = ()
    """The settings of other models that a memory of your own uses too."""
    keeps_keys: ClassVar[bool] = True
    """Whether a [`Stepper`][memformers.generation.incremental.Stepper] may keep the keys and values of its
    layers, which then attend to compressed memory, memory and segment alone."""

    @classmethod
    def memory_sizes(cls, config: NetworkConfig) -> Sequence[MemorySizes]:
        """How much each layer of the network of ``config`` remembers."""
        raise NotImplementedError

    @classmethod
    def build(cls, config: NetworkConfig, parts: Mapping[str, Any]) -> "MemoryStack":
        """The network of ``config``, with layers of these ``parts``, the arguments of a [`MemoryLayer`][]."""
        raise NotImplementedError

    @classmethod
    def attention_sizes(cls, config: NetworkConfig) -> list[tuple[int, int]]:
        """Queries and keys of each attention for a segment, with a full memory: in each layer, S and M + C +
        S."""
        return [(config.segment_len, own.keys + config.segment_len) for own in config.memory_sizes]

    @classmethod
    def more_operations(cls, config: NetworkConfig) -> int:
        """Operations of a token, in all layers together, in matrix products that read and write the memory
        beside that attention; a multiply-add is two."""
        return 0

    @check_arguments
    def __init__(self, layer: MemoryLayer | Sequence[MemoryLayer], n_layers: Count):
        super().__init__()
        layers = [layer] * n_layers if isinstance(layer, MemoryLayer) else list(layer)
        if len(layers) != n_layers:
            raise UserError(f"expected n_layers={n_layers} layers, or one for all, got {len(layers)} layers.")
        layer = layers[0]
        self.layers = nn.ModuleList(map(copy.deepcopy, layers))
        reset_parameters([module for _, module in children_first(self.layers)])
        # In post-norm the last layer has normalized its sums already.
        self.norm = nn.LayerNorm(layer.d_model) if layer.norm == "pre" else nn.Identity()
        self.recompute = False
        """Whether layers keep only their inputs for the backward pass and are computed again there, to save
        memory (Chen et al. 2016, arXiv 1604.06174)."""

    def forward(
        self,
        x: Tensor,
        memory: Memory | Sequence[Tensor] | None = None,
        mask: Tensor | None = None,
        *,
        doc_starts: Tensor | None = None,
        sizes: Sequence[MemorySizes] | None = None,
        through_memory: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Read a segment.

        Args:
            x: ``[S, B, D]``.
            memory: None for nothing; or its positions alone, a tensor ``[M, B, D]`` per layer.
            mask: ``[S, K, B]`` or ``[S, K, 1]``, K = C + M + S, true where a query may look, None for causal.
            doc_starts: ``[S, B]``, true where a new document begins; a query sees no other document.
            sizes: How much each layer remembers, against which the memory is checked; and its window.
            through_memory: Whether the inputs that are returned keep their gradient.

        Returns:
            The output ``[S, B, D]``, and each layer's input ``[S, B, D]``, which [`remember`][] takes.

        Raises:
            ValueError: For a memory of another depth, batch, width, dtype or device, and for starts of
                another shape, dtype or device.
        """
        memory = Memory(tuple(memory)) if isinstance(memory, list | tuple) else memory
        memory = check_memory(memory, x, len(self.layers), sizes)
        check_starts(doc_starts, x)
        memory = self.recompute_slots(memory, sizes) if sizes else memory
        first, inputs = self.first_seen(x, memory, doc_starts, sizes), []
        for i, layer in enumerate(self.memory_layers):
            inputs.append(x if through_memory else x.detach())
            past = memory.mem[i] if memory.mem else None, memory.c_mem[i] if memory.c_mem else None
            if self.recompute and torch.is_grad_enabled():
                # By position: only there PyTorch looks for devices whose random states it must restore.
                x = checkpoint(layer, x, *past, mask, first[i], use_reentrant=False)  # [S, B, D]
            else:
                x = layer(x, *past, mask, first[i])  # [S, B, D]
        return self.norm(x), inputs

    def step(
        self,
        x: Tensor,
        memory: Memory | None,
        sizes: Sequence[MemorySizes],
        doc_starts: Tensor | None = None,
        through_memory: bool = False,
    ) -> tuple[Tensor, Memory, Tensor]:
        """[`forward`][] and [`remember`][]: a segment ``x [S, B, D]``, with ``doc_starts [S, B]``, to the
        output ``[S, B, D]``, the next memory and the loss of compressing it, a scalar."""
        if doc_starts is not None:
            check_starts(doc_starts, x)
            memory = check_memory(memory, x, len(self.layers), sizes).hidden_from(doc_starts[0])
        output, inputs = self(x, memory, doc_starts=doc_starts, sizes=sizes, through_memory=through_memory)
        after = self.remember(memory, inputs, sizes, doc_starts, len(x), through_memory)
        return output, *after

    def first_seen(
        self,
        x: Tensor,
        memory: Memory,
        doc_starts: Tensor | None,
        sizes: Sequence[MemorySizes] | None = None,
    ) -> list[Tensor | None]:
        """The first key that each query of ``x [S, B, ·]`` may see in each layer, int64 ``[B, S]``, for the
        arguments of [`forward`][]; None where every query sees all keys up to its own."""
        windows = [own.window for own in sizes] if sizes else [None] * len(self.layers)
        if doc_starts is None and memory.valid is None and not any(windows):
            return [None] * len(self.layers)
        found: dict[tuple[Any, ...], Tensor | None] = {}  # the same in all layers of most models
        lengths, each = memory.lengths(len(self.layers)), []
        for i, ((M, C), window) in enumerate(zip(lengths, windows, strict=True)):
            # What a slot stands for is asked of a compression only where it matters.
            rate = self.compression_rates[i] if C and memory.valid is not None else 1
            if (kind := (M, C, rate, window)) not in found:
                seen = None if memory.valid is None else self.keys_seen(memory.valid, M, C, rate)
                found[kind] = first_seen(doc_starts, seen, window, x, M + C)
            each.append(found[kind])
        return each

    def keys_seen(self, valid: Tensor, mem_len: int, c_mem_len: int, rate: int) -> Tensor:
        """How many of the newest keys of a memory of ``mem_len`` positions and ``c_mem_len`` slots belong to
        the running document of ``valid [B]`` positions: int64 ``[B]``."""
        return seen_of_past(valid, mem_len, c_mem_len, rate)

    def remember(
        self,
        memory: Memory | None,
        inputs: Sequence[Tensor],
        sizes: Sequence[MemorySizes],
        doc_starts: Tensor | None = None,
        segment_len: int | None = None,
        through_memory: bool = False,
    ) -> tuple[Memory, Tensor]:
        """The memory after a segment with these layer inputs, ``[S, B, D]`` a layer, and ``doc_starts [S,
        B]``; and the loss of compressing it, a scalar: 0 where nothing was compressed. ``segment_len`` is S,
        where ``inputs`` are of another length; without ``through_memory`` no gradient is kept."""
        memory, S = memory or Memory(), len(inputs[0]) if segment_len is None else segment_len
        after, loss = self.update_memory(memory, inputs, sizes, doc_starts)
        try:
            check_memory(after, inputs[0], len(self.layers), sizes, complete=True)
            check_returned(type(self), "update_memory", loss, ())
        except UserError as error:
            raise UserError(f"{type(self).__qualname__}.update_memory: {error}") from None
        before = memory.positions(sizes)
        valid = valid_afterwards(memory.valid, doc_starts, S, before, after.positions(sizes))
        after = self.without_hidden(replace(after, valid=valid), sizes)
        return after if through_memory else after.detach(), loss

    def without_hidden(self, memory: Memory, sizes: Sequence[MemorySizes]) -> Memory:
        """``memory`` without numbers that are not finite before each stream's running document, which would
        reach a gradient."""
        if memory.valid is None:
            return memory
        mem, c_mem, behind = list(memory.mem), list(memory.c_mem), list(memory.slot_inputs)
        for i, ((M, C), own) in enumerate(zip(memory.lengths(len(sizes)), sizes, strict=True)):
            seen = self.keys_seen(memory.valid, M, C, own.compression_rate)  # [B]
            hidden = torch.arange(C + M, device=seen.device)[:, None] < C + M - seen  # [C + M, B]
            mem[i : i + 1] = [without_hidden(x, hidden[C:]) for x in mem[i : i + 1]]
            c_mem[i : i + 1] = [without_hidden(x, hidden[:C]) for x in c_mem[i : i + 1]]
            for x in behind[i : i + 1]:
                slots = hidden[C - len(x) // own.compression_rate : C]
                behind[i] = without_hidden(x, slots.repeat_interleave(own.compression_rate, dim=0))
        return replace(memory, mem=tuple(mem), c_mem=tuple(c_mem), slot_inputs=tuple(behind))

    def update_memory(
        self,
        memory: Memory,
        inputs: Sequence[Tensor],
        sizes: Sequence[MemorySizes],
        doc_starts: Tensor | None,
    ) -> tuple[Memory, Tensor]:
        """What a model does for [`remember`][], with its arguments, ``[S, B, D]`` a layer and ``[S, B]``; the
        memory's ``valid`` is added afterwards."""
        raise NotImplementedError

    def recompute_slots(self, memory: Memory, sizes: Sequence[MemorySizes]) -> Memory:
        """``memory`` as a segment reads it: with slots ``[m, B, D]`` a layer that are computed anew, where
        f_c learns from the language model's loss."""
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

    @property
    def weight(self) -> Tensor:
        """A weight ``[D]`` that no adapter or quantization replaces, for its dtype and device."""
        return self.memory_layers[0].norm_ff.weight


def build_transformer(config: NetworkConfig) -> MemoryStack:
    """The network of ``config``, without embedding and head."""
    D, drop, longest = config.d_model, config.dropout, config.longest_attention
    how = {name: getattr(config, name) for name in ("positions", "position_features", "clamp_len", "kernel")}
    attention = RelativeMultiHeadAttention(config.heads, D, drop, max_positions=longest, **how)
    parts = {"d_model": D, "self_attn": attention, "feed_forward": FeedForward(D, config.d_ff, drop)}
    parts |= {"dropout_prob": drop, "norm": config.norm, "gate": config.gate}
    return lookup("model", config.model).build(config, parts)


def initialise_weights(transformer: MemoryStack) -> None:
    """Let the modules of the layers draw their weights anew, the compression functions after all others and
    their decoders last. What a memory of your own has beside its layers is as its constructor leaves it."""
    turns: list[list[nn.Module]] = [[], [], []]
    for name, module in (*children_first(transformer.layers), ("", transformer.norm)):
        turns[("compress" in name.split(".")) + ("decoder" in name.split("."))].append(module)
    for modules in turns:
        reset_parameters(modules)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode within the block, and afterwards each of its modules in the mode it came in."""
    if not model.training:
        yield
        return
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def operations(D: int, Q: int, K: int) -> int:
    """Operations of one attention of Q queries over K keys of D features, for one stream: 2·Q·K·D each for
    scores by content, scores by position and weighted values, hidden ones included; 4·K·D² for keys and
    values; 4·Q·D² for queries and output. Position vectors, which all streams share, don't count."""
    return 6 * Q * K * D + 4 * (K + Q) * D * D


def memory_facts(config: NetworkConfig) -> dict[str, Any]:
    """What ``run.json`` says of a memory: how many positions before the segment one layer sees, and all
    layers together; a layer's keys without the segment's, M + C, as a mean; and the operations of all
    attentions per token, with full memories, and of what else a memory of your own declares."""
    kind, S = lookup("model", config.model), config.segment_len
    sizes = kind.attention_sizes(config)
    keys = max(sum(K for _, K in sizes) / config.n_layers - S, 0.0)
    of_layers = sum(operations(config.d_model, Q, K) // S for Q, K in sizes)
    return {
        "memory": {"one_layer": config.remembered_positions, "all_layers": sum(config.positions_of_layers)},
        "keys": int(keys) if keys.is_integer() else keys,
        "attention_operations": of_layers + kind.more_operations(config),
    }
