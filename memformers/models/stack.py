"""A stack of layers with memory: what Transformer-XL and the Compressive Transformer have in common."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_arguments
from memformers.models.attention import RelativeMultiHeadAttention
from memformers.models.config import NetworkConfig
from memformers.models.documents import (
    document_length,
    first_visible_key,
    valid_afterwards,
    visible_past_keys,
)
from memformers.models.layers import AttentionCache, FeedForward, MemoryLayer
from memformers.models.memory import (
    LayerMemory,
    Memory,
    check_streams,
)
from memformers.models.memory_checks import check_memory, check_updated
from memformers.models.registry import lookup
from memformers.models.rules.base import MemoryRule, UpdateContext, is_built_in
from memformers.models.sizes import MemorySizes

if TYPE_CHECKING:
    from memformers.common.types import typed_like


class TokenReader(Protocol):
    """A faster way through all layers, for a single token of each stream."""

    def read(
        self, x: Tensor, inputs: Tensor, previous: Tensor | None, key_starts: Sequence[Tensor | None]
    ) -> Tensor:
        """``x [1, B, D]`` to the last layer's output ``[1, B, D]``. Writes each layer's input to ``inputs
        [n_layers, B, D]``; ``previous`` are those of the last token, None for none; ``key_starts [B, 1]``
        each layer's first visible key."""
        ...


class SegmentCache(Protocol):
    """Cached keys and values of all layers in a running segment."""

    layers: Sequence[AttentionCache]
    inputs: Tensor
    """``[n_layers, S, B, D]``: each layer's inputs in the segment, as far as it was read."""
    n_read: int
    """How many tokens of the segment have been read."""

    @property
    def token_path(self) -> TokenReader | None:
        """A faster way for single tokens, if there is one."""
        ...


class MemoryStack(nn.Module):
    """``n_layers`` layers like ``layer``, or like those given, with fresh weights. Each has one of ``rules``,
    which decides what it remembers. Pre-norm adds a final norm. Raises ValueError unless there is a layer, or
    one for each, and a rule for each.

    Examples:
        >>> import torch
        >>> from memformers import FeedForward, MemoryLayer, MemorySizes, MemoryStack
        >>> from memformers import RelativeMultiHeadAttention, TransformerXLRule
        >>> layer = MemoryLayer(
        ...     d_model=64, self_attn=RelativeMultiHeadAttention(4, 64), feed_forward=FeedForward(64, 256),
        ...     dropout_prob=0.1)
        >>> rules = [TransformerXLRule(MemorySizes(mem_len)) for mem_len in (16, 48)]
        >>> stack = MemoryStack(layer, 2, rules)
        >>> memory = None
        >>> for _ in range(4):
        ...     output, memory, _ = stack(torch.randn(16, 3, 64), memory)  # [S, B, D]
        >>> memory
        Memory(2 layers, mem_len=16|48, n_slots=0, streams=3, torch.float32)
    """

    @check_arguments
    def __init__(
        self, layer: MemoryLayer | Sequence[MemoryLayer], n_layers: Count, rules: Sequence[MemoryRule]
    ):
        super().__init__()
        # One layer is a pattern for all.
        layers = [layer] * n_layers if isinstance(layer, MemoryLayer) else list(layer)
        if len(layers) != n_layers:
            raise UserError(f"expected n_layers={n_layers} layers, or one for all, got {len(layers)} layers.")
        if len(rules) != n_layers:
            raise UserError(f"expected n_layers={n_layers} rules, one for each layer, got {len(rules)}.")
        self.layers = nn.ModuleList(map(copy.deepcopy, layers))
        # In post-norm the last layer has normalized its sums already.
        self.norm = nn.LayerNorm(layers[0].d_model) if layers[0].norm == "pre" else nn.Identity()
        self.rules = nn.ModuleList(rules)
        self.activation_checkpointing = False
        """Whether the backward pass computes layers again from their inputs (arXiv 1604.06174)."""
        self.compiles_layers_as_one = False
        """Whether ``torch.compile`` compiles layers with the same shapes as one, which takes less than half
        of the time. With learned positions and symbolic lengths, torch 2.13 fails at it."""
        self.sizes = self._sizes_of_rules()
        """How much each layer remembers."""
        # Copies would start with equal weights.
        reset_parameters(module for _, module in children_first(self.layers))
        reset_parameters(module for f_c in self.compressions for _, module in children_first(f_c))

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
        memory = self.checked(x, memory, mask, doc_starts)
        # Documents: where each query's keys begin, and how long the document at the end of the segment is.
        key_starts = self.first_visible_keys(x, memory, doc_starts)
        n_valid = document_length(memory.n_valid, doc_starts, len(x))  # [B], at the end of the segment
        remembered = []
        losses = []
        by_layer = zip(self.memory_layers, self.memory_rules, memory.layers, key_starts, strict=True)
        for i, (layer, rule, past, key_start) in enumerate(by_layer):
            # Attend to what is remembered and to the segment.
            kv_input = layer.shifted(x, past.shift_state, doc_starts)  # [S, B, D]
            output = self._attend(layer, x, rule.recall(past), mask, key_start, kv_input)

            # Then remember the segment's inputs, detached: a gradient would reach into all earlier segments.
            if not through_memory:
                kv_input = kv_input.detach()
            context = UpdateContext(layer, x if through_memory else x.detach(), n_valid)
            layer_memory, loss = self._update(i, rule, past, kv_input, context)
            remembered.append(layer_memory)
            if loss is not None:
                losses.append(loss)
            x = output

        after = self.with_documents(memory, remembered, doc_starts, len(x))
        total = torch.stack(losses).sum() if losses else x.new_zeros(())
        return self.norm(x), after if through_memory else after.detach(), total

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def read_cached(
        self, x: Tensor, memory: Memory, cache: "SegmentCache", doc_starts: Tensor | None
    ) -> Tensor:
        """Read the next tokens ``x [t, B, D]`` of a segment after ``memory``: the output ``[t, B, D]`` that
        [`forward`][memformers.models.stack.MemoryStack.forward] has for them, from the keys in ``cache``, to
        which theirs are appended. ``doc_starts [·, B]`` are those of the segment so far."""
        begin = cache.n_read
        end = begin + len(x)
        segment = cache.inputs[0, :end]  # [·, B, D]
        key_starts = self.first_visible_keys(segment, memory, doc_starts, windows=len(x) > 1)
        key_starts = [None if starts is None else starts[:, begin:] for starts in key_starts]  # [B, t]
        new_starts = None if doc_starts is None else doc_starts[begin:]
        # A single token has a faster way through layers of the usual kind.
        if len(x) == 1 and cache.token_path:
            previous = self.previous_inputs(memory, cache, new_starts)
            x = cache.token_path.read(x, cache.inputs[:, begin], previous, key_starts)
            cache.n_read = end
            return self.norm(x)

        by_layer = zip(self.memory_layers, cache.layers, memory.layers, key_starts, strict=True)
        for inputs, (layer, layer_cache, past, key_start) in zip(cache.inputs, by_layer, strict=True):
            # The memory is made of all inputs at the end of the segment.
            inputs[begin:end] = x
            shift_state = inputs[begin - 1 : begin] if begin else past.shift_state
            kv_input = layer.shifted(x, shift_state, new_starts)
            x = layer(x, key_start=key_start, kv_input=kv_input, cache=layer_cache)
        cache.n_read = end
        return self.norm(x)

    def previous_inputs(
        self, memory: Memory, cache: "SegmentCache", doc_starts: Tensor | None
    ) -> Tensor | None:
        """Each layer's input before the next token of a segment after ``memory``, for a token shift:
        ``[n_layers, B, D]``, 0 where ``doc_starts [1, B]`` is true; None if no layer has one."""
        if all(layer.shift is None for layer in self.memory_layers):
            return None
        if cache.n_read:
            previous = cache.inputs[:, cache.n_read - 1]
        else:
            # A layer may have no state: it has no past, or remembers nothing.
            previous = torch.zeros_like(cache.inputs[:, 0])
            for layer_previous, past in zip(previous, memory.layers, strict=True):
                if past.shift_state is not None:
                    layer_previous.copy_(past.shift_state[0])
        return previous if doc_starts is None else previous.masked_fill(doc_starts[0, :, None], 0)

    def remember(
        self, memory: Memory, inputs: Sequence[Tensor], doc_starts: Tensor | None, segment_len: int
    ) -> Memory:
        """The memory after a segment of ``segment_len`` tokens with each layer's ``inputs [S, B, D]`` and
        ``doc_starts [S, B]``, which [`forward`][memformers.models.stack.MemoryStack.forward] returns too."""
        memory = check_memory(memory, inputs[0], self.sizes)
        n_valid = document_length(memory.n_valid, doc_starts, segment_len)
        remembered = []
        by_layer = zip(self.memory_layers, self.memory_rules, memory.layers, inputs, strict=True)
        for i, (layer, rule, past, x) in enumerate(by_layer):
            kv_input = layer.shifted(x, past.shift_state, doc_starts)
            layer_memory, _ = self._update(i, rule, past, kv_input, UpdateContext(layer, x, n_valid))
            remembered.append(layer_memory)
        return self.with_documents(memory, remembered, doc_starts, segment_len)

    def _attend(
        self, layer: MemoryLayer, x: Tensor, past: LayerMemory, mask: Any, key_start: Any, kv_input: Tensor
    ) -> Tensor:
        """The output ``[S, B, D]`` of ``layer``."""
        # None says that keys are made of x: a checkpoint calls the layer with other tensors for both.
        inputs = (x, past, mask, key_start, None if kv_input is x else kv_input)
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(layer, *inputs, use_reentrant=False)
        # A user's layer may do what a region can't, such as change a buffer.
        is_compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        if self.compiles_layers_as_one and is_compiled and type(layer) is MemoryLayer:
            return compiled_once(layer, *inputs)
        return layer(*inputs)

    def _update(
        self, i: int, rule: MemoryRule, past: LayerMemory, x: Tensor, context: UpdateContext
    ) -> tuple[LayerMemory, Tensor | None]:
        """What the rule of layer i makes of its memory and ``x [S, B, D]``, checked, and its loss."""
        updated = rule.update(past, x, context)
        if not is_built_in(rule):
            check_updated(updated, x, self.sizes[i], type(rule))
        memory, loss = updated

        # Under autocast, products and inputs have different dtypes.
        if memory.slots.dtype != x.dtype:
            memory = replace(memory, slots=memory.slots.to(x.dtype))
        if self.sizes[i].has_shift_state:
            memory = replace(memory, shift_state=context.x[-1:].clone())
        return memory, loss

    def checked(
        self, x: Tensor, memory: Memory | None, mask: Tensor | None, doc_starts: Tensor | None
    ) -> Memory:
        """The memory before a segment ``x [S, B, D]`` with ``mask [S, K, B or 1]`` and ``doc_starts [S, B]``:
        an empty one for None, and empty for streams in which a document starts with the segment. Raises
        ValueError for arguments that don't fit."""
        memory = check_memory(memory, x, self.sizes)
        check_streams("doc_starts", doc_starts, torch.bool, x.shape[:2], x.device)
        if mask is not None and any(layer.shift is not None for layer in self.memory_layers):
            raise UserError("a mask doesn't say where a token shift ends; give doc_starts instead.")
        return memory if doc_starts is None else memory.reset(doc_starts[0])

    def with_documents(
        self, memory: Memory, remembered: Sequence[LayerMemory], doc_starts: Tensor | None, segment_len: int
    ) -> Memory:
        """The memory after a segment of S tokens with ``doc_starts [S, B]`` that follows ``memory``;
        ``remembered`` is each layer's part."""
        after = Memory(tuple(remembered))
        if doc_starts is None and memory.n_valid is None:
            return after
        # Count only as far as the longest memory reaches.
        n_before = memory.n_positions(self.sizes)
        n_after = after.n_positions(self.sizes)
        n_valid = valid_afterwards(memory.n_valid, doc_starts, segment_len, n_before, n_after)
        return replace(after, n_valid=n_valid)

    def first_visible_keys(
        self, x: Tensor, memory: Memory, doc_starts: Tensor | None, *, windows: bool = True
    ) -> list[Tensor | None]:
        """The first key that each query of ``x [S, B, ·]`` may see in each layer, int64 ``[B, S]``; None if
        every query sees all keys up to its own. Without ``windows``, only documents hide more."""
        # Without documents and windows, read no length: a compiled graph would depend on it.
        has_windows = windows and any(layer.window is not None for layer in self.memory_layers)
        if memory.n_valid is None and doc_starts is None and not has_windows:
            return [None] * len(self.layers)

        # Layers with equal memories see equally many keys. In most models, all layers do.
        key_starts: list[Tensor | None] = []
        known: dict[Any, Tensor | None] = {}
        for layer, past, size in zip(self.memory_layers, memory.layers, self.sizes, strict=True):
            window = layer.window if windows else None
            key = (past.mem_len, past.n_slots, size.slot_positions, window)
            if key not in known:
                n_visible = None
                if memory.n_valid is not None:
                    n_visible = visible_past_keys(
                        memory.n_valid, past.mem_len, past.n_slots, size.slot_positions
                    )
                n_past = past.mem_len + past.n_slots
                known[key] = first_visible_key(x, n_past, n_visible, doc_starts, window)
            key_starts.append(known[key])
        return key_starts

    def resize(self, config: NetworkConfig) -> None:
        """Set how much each layer remembers, and how many keys it sees, from ``config``."""
        for layer, rule, size, window in zip(
            self.memory_layers, self.memory_rules, config.memory_sizes, config.windows, strict=True
        ):
            rule.resize(config, size)
            layer.window = window
        self.sizes = list(config.memory_sizes)

    def _sizes_of_rules(self) -> list[MemorySizes]:
        sizes = []
        for layer, rule in zip(self.memory_layers, self.memory_rules, strict=True):
            has_shift_state = layer.shift is not None and rule.remembers
            sizes.append(replace(rule.size, has_shift_state=has_shift_state))
        return sizes

    @property
    def memory_layers(self) -> list[MemoryLayer]:
        """The layers, for type checkers."""
        return cast(list[MemoryLayer], list(self.layers))

    @property
    def memory_rules(self) -> list[MemoryRule]:
        """The rule of each layer, for type checkers."""
        return cast(list[MemoryRule], list(self.rules))

    @property
    def compressions(self) -> list[nn.Module]:
        """Each layer's f_c; none for a model that has none."""
        f_cs = [getattr(rule, "f_c", None) for rule in self.memory_rules]
        return [f_c for f_c in f_cs if f_c is not None]

    @property
    def weight(self) -> Tensor:
        """A weight ``[D]`` that no adapter or quantization replaces, for its dtype and device."""
        norm: Any = self.memory_layers[0].norm_ff
        if norm.weight.is_meta and hasattr(norm, "_hf_hook"):  # accelerate loads it only for a call
            return torch.empty_like(norm.weight, device=norm._hf_hook.execution_device)
        return norm.weight


@torch.compiler.nested_compile_region
def compiled_once(layer: MemoryLayer, *inputs: Any) -> Tensor:
    """The output of ``layer``; ``torch.compile`` compiles all layers with the same shapes as one."""
    return layer(*inputs)


def build_transformer(config: NetworkConfig) -> MemoryStack:
    """The network of ``config``: one layer, copied, and the rules of its model."""
    kind: type[MemoryRule] = lookup(config.model)
    # A user's memory may have its own kind of layer or of network.
    layer = kind.layer(
        d_model=config.d_model,
        self_attn=RelativeMultiHeadAttention(
            config.n_heads, config.d_model, config.dropout, positions=config.positions,
            max_positions=config.longest_attention, position_features=config.position_features,
            position_base=config.position_base, clamp_len=config.clamp_len, kernel=config.kernel,
        ),
        feed_forward=FeedForward(config.d_model, config.d_ff, config.dropout),
        dropout_prob=config.dropout,
        norm=config.norm,
        gate=config.gate,
        token_shift=config.token_shift,
    )  # fmt: skip
    stack = kind.stack or MemoryStack
    transformer = stack(layer, config.n_layers, kind.build(config))
    transformer.resize(config)
    return transformer


def initialise_weights(transformer: MemoryStack) -> None:
    """Let the layers and the final norm draw their weights anew, the compression functions after all others.
    Modules that a user's rule adds keep their weights; those of a user's layer are drawn anew, and its own
    ``reset_parameters`` has the last word."""
    # From one seed, models then start alike in all that they share.
    reset_parameters(module for _, module in children_first(transformer.layers))
    reset_parameters([transformer.norm])
    reset_parameters(module for f_c in transformer.compressions for _, module in children_first(f_c))


def reset_parameters(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def children_first(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules within ``module``, by name, and then itself: its ``reset_parameters`` has the last word."""
    for child_name, child in module.named_children():
        yield from children_first(child, f"{name}.{child_name}")
    yield name, module


def all_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model.modules()``, in a different order and in an eighth of the time."""
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
    """The model in eval mode within the block; afterwards each module has its previous mode again."""
    training = [module for module in all_modules(model) if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
