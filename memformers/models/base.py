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
from memformers.models import documents
from memformers.models.attention import Divided, Reads, RelativeMultiHeadAttention
from memformers.models.config import NetworkConfig
from memformers.models.layers import FeedForward, MemoryLayer
from memformers.models.memory import Memory, check_memory
from memformers.models.memory_sizes import Sizes
from memformers.models.parts import check_returned, children_first, reset_parameters
from memformers.models.registry import NoSettings, lookup

BYTES = 4
"""Of a number in float32."""


class MemoryStack(nn.Module):
    """``n_layers`` layers like ``layer``, or like those given, with fresh weights; in pre-norm a final norm.
    A model defines [`update_memory`][], and [`recompute_slots`][] if its slots learn from a later loss."""

    Config: ClassVar[type] = NoSettings
    """The frozen dataclass of settings that no other model has."""
    uses: ClassVar[tuple[str, ...]] = ()
    """The settings of other models that a memory of your own uses too."""
    keeps_keys: ClassVar[bool] = True
    """Whether layers attend to memories and segment alone, so that generation may keep keys and values."""

    @classmethod
    def memory_sizes(cls, config: NetworkConfig) -> Sizes:
        """How much each layer of the network of ``config`` remembers."""
        raise NotImplementedError

    @classmethod
    def build(cls, config: NetworkConfig, parts: Mapping[str, Any]) -> "MemoryStack":
        """The network of ``config``, with layers of these ``parts``, the arguments of a [`MemoryLayer`][]."""
        raise NotImplementedError

    @classmethod
    def attention_sizes(cls, config: NetworkConfig) -> list[tuple[int, int]]:
        """Queries and keys of each attention over a segment and full memory: in a layer, S and M + C + S."""
        return [(config.segment_len, own.keys + config.segment_len) for own in config.memory_sizes]

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
        memory: Memory | Sequence[Tensor] | None = None,
        mask: Tensor | None = None,
        *,
        doc_starts: Tensor | None = None,
        sizes: Sizes | None = None,
        through_memory: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Read a segment ``x [S, B, D]``: the output ``[S, B, D]`` and each layer's input, ``[S, B, D]``, for
        [`remember`][], with gradient only ``through_memory``. Raises ValueError for what doesn't fit.

        ``memory`` may be its positions alone, ``[M, B, D]`` each. ``mask``, ``[S, K, B]`` or ``[S, K, 1]``,
        is true where a query may look, None for causal; ``doc_starts [S, B]`` where a document begins, of
        which alone its queries see keys. ``sizes`` give the windows, and what the memory is checked against.
        """
        memory = Memory(tuple(memory)) if isinstance(memory, list | tuple) else memory
        memory = check_memory(memory, x, len(self.layers), sizes)
        documents.check_streams("doc_starts", doc_starts, torch.bool, x.shape[:2], x.device)
        memory = self.recompute_slots(memory, sizes) if sizes else memory
        first, inputs = self.first_seen(x, memory, doc_starts, sizes), []
        reads = keys_by_head(memory, sizes, len(self.layers))
        for i, layer in enumerate(self.memory_layers):
            inputs.append(x if through_memory else x.detach())
            past = memory.mem[i] if memory.mem else None, memory.c_mem[i] if memory.c_mem else None
            # By position: only there a checkpoint looks for devices whose random states it must restore.
            given = x, *past, mask, first[i], *([] if reads[i] is None else [reads[i]])
            recompute = self.recompute and torch.is_grad_enabled()
            x = checkpoint(layer, *given, use_reentrant=False) if recompute else layer(*given)  # [S, B, D]
        return self.norm(x), inputs

    def step(
        self,
        x: Tensor,
        memory: Memory | None,
        sizes: Sizes,
        doc_starts: Tensor | None = None,
        through_memory: bool = False,
    ) -> tuple[Tensor, Memory, Tensor]:
        """[`forward`][] and [`remember`][]: a segment ``x [S, B, D]``, with ``doc_starts [S, B]``, to the
        output ``[S, B, D]``, the next memory and the loss of compressing it, a scalar."""
        if doc_starts is not None:
            documents.check_streams("doc_starts", doc_starts, torch.bool, x.shape[:2], x.device)
            memory = check_memory(memory, x, len(self.layers), sizes).hidden_from(doc_starts[0])
        output, inputs = self(x, memory, doc_starts=doc_starts, sizes=sizes, through_memory=through_memory)
        return output, *self.remember(memory, inputs, sizes, doc_starts, len(x), through_memory)

    def first_seen(
        self, x: Tensor, memory: Memory, doc_starts: Tensor | None, sizes: Sizes | None = None
    ) -> list[Tensor | None]:
        """The first key that each query of ``x [S, B, ·]`` may see in each layer, int64 ``[B, S]``; None
        where every query sees all keys up to its own."""
        windows = [own.window for own in sizes] if sizes else [None] * len(self.layers)
        if doc_starts is None and memory.valid is None and not any(windows):
            return [None] * len(self.layers)
        found: dict[Any, Tensor | None] = {}  # the same in all layers of most models
        each = []
        for i, ((M, C), window) in enumerate(zip(memory.lengths(len(self.layers)), windows, strict=True)):
            # What a slot stands for is asked of a compression only where it matters.
            rate = self.compression_rates[i] if C and memory.valid is not None else 1
            if (kind := (M, C, rate, window)) not in found:
                seen = None if memory.valid is None else self.keys_seen(memory.valid, M, C, rate)
                found[kind] = documents.first_seen(doc_starts, seen, window, x, M + C)
            each.append(found[kind])
        return each

    def keys_seen(self, valid: Tensor, mem_len: int, c_mem_len: int, rate: int) -> Tensor:
        """[`seen_of_past`][memformers.models.documents.seen_of_past], int64 ``[B]``, for ``valid [B]``."""
        return documents.seen_of_past(valid, mem_len, c_mem_len, rate)

    def remember(
        self,
        memory: Memory | None,
        inputs: Sequence[Tensor],
        sizes: Sizes,
        doc_starts: Tensor | None = None,
        segment_len: int | None = None,
        through_memory: bool = False,
    ) -> tuple[Memory, Tensor]:
        """The memory after a segment of ``inputs [S, B, D]`` and ``doc_starts [S, B]``, with gradient only
        ``through_memory``, and the loss of compressing it, a scalar. ``segment_len``: S if not theirs."""
        memory, S = memory or Memory(), len(inputs[0]) if segment_len is None else segment_len
        after, loss = self.update_memory(memory, inputs, sizes, doc_starts)
        try:
            check_memory(after, inputs[0], len(self.layers), sizes, complete=True)
            check_returned(type(self), "update_memory", loss, ())
        except UserError as error:
            raise UserError(f"{type(self).__qualname__}.update_memory: {error}") from None
        before, now = memory.positions(sizes), after.positions(sizes)
        valid = documents.valid_afterwards(memory.valid, doc_starts, S, before, now)
        after = self.without_hidden(replace(after, valid=valid), sizes)
        return after if through_memory else after.detach(), loss

    def without_hidden(self, memory: Memory, sizes: Sizes) -> Memory:
        """``memory`` without numbers that are not finite before each stream's running document."""
        if memory.valid is None:
            return memory
        mem, c_mem, behind, without = [], [], [], documents.without_hidden
        for i, ((M, C), own) in enumerate(zip(memory.lengths(len(sizes)), sizes, strict=True)):
            c = own.compression_rate
            seen = self.keys_seen(memory.valid, M, C, c)  # [B]
            hidden = torch.arange(C + M, device=seen.device)[:, None] < C + M - seen  # [C + M, B]
            mem += [without(x, hidden[C:]) for x in memory.mem[i : i + 1]]
            c_mem += [without(x, hidden[:C]) for x in memory.c_mem[i : i + 1]]
            slots = [(x, hidden[C - len(x) // c : C]) for x in memory.slot_inputs[i : i + 1]]
            behind += [without(x, each.repeat_interleave(c, dim=0)) for x, each in slots]
        return replace(memory, mem=tuple(mem), c_mem=tuple(c_mem), slot_inputs=tuple(behind))

    def update_memory(
        self, memory: Memory, inputs: Sequence[Tensor], sizes: Sizes, doc_starts: Tensor | None
    ) -> tuple[Memory, Tensor]:
        """A model's [`remember`][], of ``inputs [S, B, D]`` and ``doc_starts [S, B]``, but for ``valid``."""
        raise NotImplementedError

    def recompute_slots(self, memory: Memory, sizes: Sizes) -> Memory:
        """``memory`` with slots ``[m, B, D]`` computed anew, where f_c learns from the model's loss."""
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
        """Each layer's f_c; none for a model that only forgets."""
        return []

    @property
    def weight(self) -> Tensor:
        """A weight ``[D]`` that no adapter or quantization replaces, for its dtype and device."""
        return self.memory_layers[0].norm_ff.weight


def keys_by_head(memory: Memory, sizes: Sizes | None, n_layers: int) -> list[Reads]:
    """Which keys of ``memory`` each head reads, a layer; None where all read all."""
    if not sizes or not any(own.heads or own.divided for own in sizes):
        return [None] * n_layers
    found: list[Reads] = []
    for own, (M, C) in zip(sizes, memory.lengths(n_layers), strict=True):
        heads, divided = own.of_heads(M, C), own.divided and own.newest < M
        each = None if heads is None else tuple(map(sum, heads))
        found.append(Divided(own.newest) if divided else each)
    return found


def build_transformer(config: NetworkConfig) -> MemoryStack:
    """The network of ``config``, without embedding and head."""
    D, drop, longest = config.d_model, config.dropout, config.longest_attention
    how = {name: getattr(config, name) for name in ("positions", "position_features", "clamp_len", "kernel")}
    attention = RelativeMultiHeadAttention(config.heads, D, drop, max_positions=longest, **how)
    parts = {"d_model": D, "self_attn": attention, "feed_forward": FeedForward(D, config.d_ff, drop)}
    parts |= {"dropout_prob": drop, "norm": config.norm, "gate": config.gate}
    return lookup("model", config.model).build(config, parts)


def initialise_weights(transformer: MemoryStack) -> None:
    """Let the layers and the final norm draw their weights anew, the compression functions after all others
    and their decoders last. What a memory of your own has beside them keeps its weights."""
    named = [*children_first(transformer.layers), ("", transformer.norm)]
    named.sort(key=lambda each: sum(part in each[0].split(".") for part in ("compress", "decoder")))
    reset_parameters([module for _, module in named])


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode within the block, and afterwards each of its modules in the mode it came in."""
    training = [module for module in model.modules() if module.training] if model.training else []
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def operations(D: int, Q: int, K: int) -> int:
    """Operations of one stream's attention of Q queries over K keys, hidden ones too: 2·Q·K·D each for scores
    by content and position and weighted values, 4·(K + Q)·D² for the maps, none for shared positions."""
    return 6 * Q * K * D + 4 * (K + Q) * D * D


def memory_facts(config: NetworkConfig) -> dict[str, Any]:
    """What ``run.json`` says of a full memory: the positions that one layer and all together see, a layer's
    mean keys M + C, a stream's bytes, in float32, as layer inputs, which are carried from segment to segment,
    and as keys and values, which generation keeps; and operations per token."""
    kind, S = lookup("model", config.model), config.segment_len
    sizes = kind.attention_sizes(config)
    keys = max(sum(K for _, K in sizes) / config.n_layers - S, 0.0)
    of_layers = sum(operations(config.d_model, Q, K) // S for Q, K in sizes)
    return {
        "memory": {"one_layer": config.remembered_positions, "all_layers": sum(config.positions_of_layers)},
        "keys": int(keys) if keys.is_integer() else keys,
        "state_bytes": sum(own.carried for own in config.memory_sizes) * config.d_model * BYTES,
        "cached_bytes": round(2 * keys * config.n_layers * config.d_model * BYTES),
        "attention_operations": of_layers + kind.more_operations(config),
    }
