"""A stack of layers with memory: what Transformer-XL and the Compressive Transformer have in common."""

import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memformers.common.fields import Count, check_arguments
from memformers.common.text import UserError
from memformers.models.attention import RelativeMultiHeadAttention
from memformers.models.config import MemorySizes, NetworkConfig
from memformers.models.documents import first_visible_key, valid_afterwards
from memformers.models.layers import FeedForward, MemoryLayer, TransformerXLLayer
from memformers.models.memory import Memory, check_memory, check_streams
from memformers.models.registry import NoSettings, lookup

BYTES = 4
"""Of a number in float32."""
LONGEST_CYCLE = 10_000
"""Segments that are counted to find when layers with several rates hold the most together. In longer cycles,
which only unusual rates have, each layer's most counts: they meet at some time, or nearly."""


class MemoryStack(nn.Module):
    """``n_layers`` layers like ``layer``, or like those given, with fresh weights; in pre-norm a final norm.
    A model defines [`update`][]."""

    Config: ClassVar[type] = NoSettings
    """The frozen dataclass of settings that no other model has."""
    uses: ClassVar[tuple[str, ...]] = ()
    """The settings of built-in models that a user's memory uses too."""
    keeps_keys: ClassVar[bool] = True
    """Whether layers attend to memories and segment alone, so that generation may cache keys and values."""
    only_appends: ClassVar[bool] = True
    """Whether what a memory keeps stays as it is and in order, so that generation need not compute all keys
    again after a segment."""
    whole_slots: ClassVar[bool] = True
    """As in [`MemorySizes`][memformers.MemorySizes]."""

    @classmethod
    def memory_sizes(cls, config: NetworkConfig) -> Sequence[MemorySizes]:
        """How much each layer of the network of ``config`` remembers."""
        raise UserError(f"{cls.__qualname__} must define memory_sizes(cls, config), a class method.")

    @classmethod
    def may_shift(cls) -> bool:
        """Whether ``token_shift`` is possible."""
        return True

    @classmethod
    def build(
        cls, config: NetworkConfig, self_attn: RelativeMultiHeadAttention, feed_forward: nn.Module
    ) -> "MemoryStack":
        """The network of ``config``, with these modules in each layer."""
        layer = TransformerXLLayer(
            d_model=config.d_model, self_attn=self_attn, feed_forward=feed_forward,
            dropout_prob=config.dropout, norm=config.norm, gate=config.gate, token_shift=config.token_shift,
        )  # fmt: skip
        return cls(layer, config.n_layers)

    @classmethod
    def attention_sizes(cls, config: NetworkConfig) -> Sequence[tuple[int, float]]:
        """Queries and keys of each attention over a segment and full memory, on average: in a layer, S and
        what it holds, M + C, and S."""
        S = config.segment_len
        return [(S, size.mean_positions(S) + size.c_mem_len + S) for size in config.memory_sizes]

    @classmethod
    def more_operations(cls, config: NetworkConfig) -> int:
        """Operations of a token in the memory's other matrix products, all layers'; a multiply-add is two."""
        return 0

    @check_arguments
    def __init__(self, layer: MemoryLayer | Sequence[MemoryLayer], n_layers: Count):
        super().__init__()
        layers = [layer] * n_layers if isinstance(layer, MemoryLayer) else list(layer)
        if len(layers) != n_layers:
            raise UserError(f"expected n_layers={n_layers} layers, or one for all, got {len(layers)} layers.")
        self.layers = nn.ModuleList(map(copy.deepcopy, layers))
        reset_parameters([module for _, module in children_first(self.layers)])
        # In post-norm the last layer has normalized its sums already.
        self.norm = nn.LayerNorm(layers[0].d_model) if layers[0].norm == "pre" else nn.Identity()
        self.recompute = False
        """Whether the backward pass computes layers again from their inputs (arXiv 1604.06174)."""

    def forward(
        self,
        x: Tensor,
        memory: Memory | None = None,
        mask: Tensor | None = None,
        *,
        doc_starts: Tensor | None = None,
        through_memory: bool = False,
    ) -> tuple[Tensor, Memory, Tensor]:
        """Read a segment ``x [S, B, D]`` after ``memory``: the output ``[S, B, D]``, the next memory, and the
        loss that its compression learns from, a scalar, 0 if there is none.

        ``mask``, ``[S, K, B]`` or ``[S, K, 1]``, is true where a query may look, None for causal;
        ``doc_starts [S, B]`` where a document starts, whose queries see nothing before it. The next memory
        has a gradient only ``through_memory``. Raises ValueError for starts or a memory of another shape,
        dtype or device."""
        memory = check_memory(memory, x, self.sizes)
        check_streams("doc_starts", doc_starts, torch.bool, x.shape[:2], x.device)
        if mask is not None and any(layer.shift is not None for layer in self.memory_layers):
            raise UserError("a mask doesn't say where a token shift ends; give doc_starts instead.")
        if doc_starts is not None:
            memory = memory.reset(doc_starts[0])
        output, inputs = self.read(x, memory, mask, doc_starts)
        inputs = inputs if through_memory else [x.detach() for x in inputs]
        after, loss = self.remember(memory, inputs, doc_starts, len(x))
        return output, after if through_memory else after.detach(), loss

    def read(
        self, x: Tensor, memory: Memory, mask: Tensor | None = None, doc_starts: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The output for a segment ``x``, and what [`remember`][] makes the next memory of: each layer's
        input, all ``[S, B, D]``."""
        inputs, first = [], self.first_visible_keys(x, memory, doc_starts)
        before = memory.before or (None,) * len(first)
        layers = zip(self.memory_layers, memory.layers(len(first)), first, before, strict=True)
        recompute = self.recompute and torch.is_grad_enabled()
        for layer, past, key_start, previous in layers:
            inputs.append(x)
            # By position: only there a checkpoint looks for devices whose random states it must restore.
            arguments: tuple[Tensor | None, ...] = x, *past, mask, key_start
            if layer.shift is not None:
                arguments = *arguments, layer.shifted(x, previous, doc_starts)
            x = checkpoint(layer, *arguments, use_reentrant=False) if recompute else layer(*arguments)
        return self.norm(x), inputs

    def first_visible_keys(
        self, x: Tensor, memory: Memory, doc_starts: Tensor | None, *, windows: bool = True
    ) -> list[Tensor | None]:
        """The first key that each query of ``x [S, B, ·]`` may see in each layer, int64 ``[B, S]``; None
        where every query sees all keys up to its own, which without ``windows`` only documents prevent."""
        sizes = [(size.compression_rate, size.window if windows else None) for size in self.sizes]
        if doc_starts is None and memory.valid is None and not any(window for _, window in sizes):
            return [None] * len(sizes)
        first: dict[Any, Tensor | None] = {}  # the same in all layers of most models
        layers = list(zip(memory.lengths(len(sizes)), sizes, strict=True))
        for (M, C), (rate, window) in layers:
            if ((M, C), (rate, window)) not in first:
                visible = None if memory.valid is None else self.visible_past_keys(memory.valid, M, C, rate)
                first[(M, C), (rate, window)] = first_visible_key(x, M + C, visible, doc_starts, window)
        return [first[layer] for layer in layers]

    def visible_past_keys(self, valid: Tensor, mem_len: int, c_mem_len: int, rate: int) -> Tensor:
        """How many keys of M and C belong to the current document of ``valid [B]``: int64 ``[B]``."""
        slots = (valid - mem_len).div(rate, rounding_mode="floor")
        return valid.clamp(0, mem_len) + slots.clamp(0, c_mem_len)

    def remember(
        self, memory: Memory, inputs: Sequence[Tensor], doc_starts: Tensor | None, segment_len: int
    ) -> tuple[Memory, Tensor]:
        """The memory after a segment of ``segment_len`` tokens with ``inputs [S, B, D]`` and ``doc_starts [S,
        B]``, and the loss of compressing it, a scalar."""
        by_layer = zip(self.memory_layers, inputs, memory.before or repeat(None), strict=False)
        shifted = [layer.shifted(x, previous, doc_starts) for layer, x, previous in by_layer]
        after, loss = self.update(memory, inputs, shifted, doc_starts)
        if any(size.predecessors for size in self.sizes):
            after = replace(after, before=tuple(x[-1:].clone() for x in inputs))
        if doc_starts is None and memory.valid is None:
            return after, loss
        before, now = memory.positions(self.sizes), after.positions(self.sizes)
        valid = valid_afterwards(memory.valid, doc_starts, segment_len, before, now)
        return replace(after, valid=valid), loss

    def update(
        self, memory: Memory, inputs: Sequence[Tensor], shifted: Sequence[Tensor], doc_starts: Tensor | None
    ) -> tuple[Memory, Tensor]:
        """A model's [`remember`][], without ``valid`` and ``before``. What it remembers is ``shifted``: the
        ``inputs``, ``[S, B, D]`` both, after a token shift, if there is one."""
        raise NotImplementedError

    @property
    def sizes(self) -> list[MemorySizes]:
        """How much each layer remembers."""
        return [cast(MemoryLayer, layer).size for layer in self.layers]

    def resize(self, sizes: Sequence[MemorySizes]) -> None:
        """Let each layer remember as much as its size of ``sizes`` says."""
        for layer, size in zip(self.memory_layers, sizes, strict=True):
            layer.size = size

    @property
    def memory_layers(self) -> list[MemoryLayer]:
        return cast(list[MemoryLayer], list(self.layers))

    @property
    def compressions(self) -> list[nn.Module]:
        """Each layer's f_c; none for a model that only forgets."""
        return []

    @property
    def weight(self) -> Tensor:
        """A weight ``[D]`` that no adapter or quantization replaces, for its dtype and device."""
        norm: Any = self.memory_layers[0].norm_ff
        if norm.weight.is_meta and hasattr(norm, "_hf_hook"):  # accelerate loads it only for a call
            return torch.empty_like(norm.weight, device=norm._hf_hook.execution_device)
        return norm.weight


def build_transformer(config: NetworkConfig) -> MemoryStack:
    self_attn = RelativeMultiHeadAttention(
        config.heads, config.d_model, config.dropout, positions=config.positions,
        max_positions=config.longest_attention, position_features=config.position_features,
        position_base=config.position_base, clamp_len=config.clamp_len, kernel=config.kernel,
    )  # fmt: skip
    feed_forward = FeedForward(config.d_model, config.d_ff, config.dropout)
    transformer: MemoryStack = lookup(config.model).build(config, self_attn, feed_forward)
    transformer.resize(config.memory_sizes)
    return transformer


def initialise_weights(transformer: MemoryStack) -> None:
    """Let the layers and the final norm draw their weights anew, the compression functions after all others.
    Modules that a user's memory adds keep their weights."""
    named = [*children_first(transformer.layers), ("", transformer.norm)]
    named.sort(key=lambda item: "compress" in item[0].split("."))
    reset_parameters([module for _, module in named])


def reset_parameters(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def children_first(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules within ``module``, by name, and then itself: its ``reset_parameters`` has the last word."""
    for child_name, child in module.named_children():
        yield from children_first(child, f"{name}.{child_name}")
    yield name, module


def all_modules(model: nn.Module) -> list[nn.Module]:
    """What ``model.modules()`` yields, in another order and in an eighth of the time."""
    modules = [model]
    known = {model}
    for module in modules:
        for child in module._modules.values():
            if child is not None and child not in known:
                known.add(child)
                modules.append(child)
    return modules


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode within the block, and afterwards each of its modules in the mode it came in."""
    training = [module for module in all_modules(model) if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def operations(D: int, Q: int, K: float) -> float:
    """Operations of one stream's attention of Q queries over K keys, hidden ones too: 2·Q·K·D each for scores
    by content and position and weighted values, 4·(K + Q)·D² for the maps, none for shared positions."""
    return 6 * Q * K * D + 4 * (K + Q) * D * D


def memory_facts(config: NetworkConfig) -> dict[str, Any]:
    """What ``run.json`` says of a full memory, which is read in segments of S tokens.

    - ``memory``: the positions that one layer and all together see at most.
    - ``keys``: those of a layer's memory, the mean over layers, at most; ``mean_keys``: on average over
      segments; ``configured_keys``: M + C. They differ where c does not divide both M and S.
    - ``state_bytes``: what a stream carries from segment to segment, layer inputs in float32, at most, and
      ``mean_state_bytes`` on average; ``cached_bytes``: keys and values instead, which generation keeps.
    - ``attention_operations``: per token, on average.
    """
    kind = lookup(config.model)
    S, D, n_layers = config.segment_len, config.d_model, config.n_layers
    sizes = config.memory_sizes
    attentions = kind.attention_sizes(config)

    # Positions of all layers: those that wait for a whole slot differ from segment to segment.
    configured = sum(size.mem_len for size in sizes)
    mean = sum(size.mean_positions(S) for size in sizes)
    most = most_positions(sizes, S)

    mean_keys = max(sum(K for _, K in attentions) - n_layers * S, 0.0)  # of all layers together
    keys = mean_keys + most - mean
    configured_keys = mean_keys + configured - mean
    always_held = sum(size.c_mem_len + size.slot_input_positions + size.predecessors for size in sizes)
    farthest = [size.full_reach(S) - config.same_length for size in sizes]
    operations_of_layers = sum(operations(D, Q, K) // S for Q, K in attentions)
    return {
        "memory": {"one_layer": max(farthest), "all_layers": sum(farthest)},
        "keys": plain_number(keys / n_layers),
        "mean_keys": plain_number(mean_keys / n_layers),
        "configured_keys": plain_number(configured_keys / n_layers),
        "state_bytes": (most + always_held) * D * BYTES,
        "mean_state_bytes": plain_number((mean + always_held) * D * BYTES),
        "cached_bytes": round(2 * keys * D * BYTES),
        "attention_operations": int(operations_of_layers) + kind.more_operations(config),
    }


def most_positions(sizes: Sequence[MemorySizes], segment_len: int) -> int:
    """The most positions that full memories of layers with these ``sizes`` have together after a segment."""
    layers_of = Counter(sizes)  # mostly one size, or two
    # After a cycle of segments, all layers hold again what they held.
    cycle = math.lcm(*(size.group // math.gcd(segment_len, size.group) for size in layers_of))
    if cycle > LONGEST_CYCLE:
        return sum(size.most_positions(segment_len) for size in sizes)
    totals = []
    for n_segments in range(cycle):
        n_tokens = n_segments * segment_len
        totals.append(sum(n * size.full_positions(n_tokens) for size, n in layers_of.items()))
    return max(totals)


def plain_number(value: float) -> int | float:
    """``value`` as an integer if it is one."""
    return int(value) if value == int(value) else value
