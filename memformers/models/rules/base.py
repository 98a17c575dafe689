"""What a rule is: how the memory of one layer changes with each segment. Your own memory is one, too."""

import inspect
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.models.config import LENGTHS, ModelConfig, NetworkConfig
from memformers.models.layers import MemoryLayer
from memformers.models.memory import LayerMemory, cut
from memformers.models.registry import NO_SETTINGS, NoSettings
from memformers.models.sizes import MemorySizes

if TYPE_CHECKING:
    from memformers.models.stack import MemoryStack

JSON = (int, float, str, tuple, type(None))
"""The types of a rule's settings: bool is an int."""
ROUNDING = 10_000
"""Scores that differ by less than one part in this count as equal: copies' scores differ only by rounding."""


@dataclass(frozen=True)
class UpdateContext:
    """Facts about a segment that a rule can use, besides the inputs that it remembers.

    Examples:
        >>> import torch
        >>> from memformers import LayerMemory, MemoryLM, MemoryRule, ModelConfig
        >>> class Normalized(MemoryRule):  # remembers what attention sees of the newest input
        ...     def update(self, past, x, context):
        ...         return LayerMemory(x[:0], context.layer.attention_input(x[-1:])), None
        >>> model = MemoryLM(ModelConfig(model=Normalized, vocab_size=65, c_mem_len=1))
        >>> model(torch.randint(65, (64, 2))).memory  # of tokens [S, B]
        Memory(4 layers, mem_len=0, n_slots=1, streams=2, torch.float32)
    """

    layer: MemoryLayer
    """The layer whose memory it is."""
    x: Tensor
    """``[S, B, D]``: the layer's inputs without token shift; queries are made from them."""
    n_valid: Tensor | None
    """int64 ``[B]``: how many of the newest positions, the segment's included, belong to the document that
    runs at its end, exact up to what the memory covers, then a lower bound; None for all."""


class Window(NamedTuple):
    """The result of [`MemoryRule.push`][]."""

    mem: Tensor
    """``[M, B, D]``: the newest positions."""
    slots: Tensor
    """``[C, B, D]``: the slots so far; ``[0, B, D]`` until the first position leaves ``mem``. They are zeros
    where nothing was written (queries see these, too) and in streams whose document has no slots yet."""
    evicted: Tensor
    """``[n, B, D]``: the positions that leave ``mem``, oldest first, zeros where they belong to an earlier
    document."""
    belongs: Tensor
    """Boolean ``[n, B]``: which of them belong to the current document."""
    state: dict[str, Tensor]
    """The rule's own ``[·, B, …]``, zeros in streams in which a document starts within the segment."""


class Candidates(NamedTuple):
    """The result of [`MemoryRule.candidates`][]: the positions that a rule chooses among."""

    mem: Tensor
    """``[M, B, D]``: the newest positions."""
    older: Tensor
    """``[n, B, D]``: the positions kept so far and those that leave ``mem``, oldest first."""
    belongs: Tensor
    """Boolean ``[n, B]``: which of ``older`` belong to the current document."""

    def chosen(self, score: Tensor, n_kept: int) -> Tensor:
        """The indices ``[n_kept, B]``, in order of time, of the positions in ``older`` with the highest
        ``score [n, B]``, from −1 to 1. Other documents' positions rank last. All indices if there are
        fewer."""
        return highest(score.masked_fill(~self.belongs, -2.0).T, n_kept)

    def take(self, chosen: Tensor) -> Tensor:
        """The ``chosen [C, B]`` of ``older``: ``[C, B, D]``."""
        return self.older.gather(0, chosen[..., None].expand(-1, -1, self.older.shape[2]))


def highest(score: Tensor, n_kept: int) -> Tensor:
    """The indices ``[n_kept, B]``, in order, of the highest of ``score [B, n]``, which is NaN or in the order
    of 1; all if n is less. Of equal scores, the newest come first."""
    # Scores of copies differ only by rounding: the newer one stays, whatever else is in the batch. No two
    # ranks are equal, so no stable sort is needed, which ONNX doesn't have. NaN is chosen last of all.
    n = score.shape[1]
    rounded = (ROUNDING * score.nan_to_num(nan=-3.0)).round().long()
    rank = rounded * n + torch.arange(n, device=score.device)  # [B, n]
    return rank.topk(min(n_kept, n)).indices.sort().values.T


class MemoryRule(nn.Module):
    """What one layer remembers: its newest M inputs, unchanged, and before them C slots, which the rule
    fills. Queries attend to all of them and to the segment. Derive your memory from this class and define
    ``update``.

    Optionally:

    - ``Config``: a frozen dataclass of settings, with types, defaults and a text below each. They become
      options of the command, settings of arms, and ``self.settings``.
    - ``n_slots``, if C is always the same number and not the setting ``c_mem_len``; or ``sizes(config)``, the
      [`MemorySizes`][memformers.MemorySizes] of each layer.
    - ``append_only = True``, if slots never change or move once written, one for each ``slot_positions`` of
      ``sizes`` that leave. Generation then keeps their keys.
    - ``layer`` or ``stack``, the classes of its layers or of the whole network, if they read differently.

    Args:
        size: How much the layer remembers.
        settings: An instance of ``Config``.

    Examples:
        >>> import torch
        >>> from memformers import LayerMemory, MemoryLM, MemoryRule, ModelConfig
        >>> class Mean(MemoryRule):
        ...     def update(self, past, x, context):
        ...         window = self.push(past, x, context)
        ...         slots = window.slots
        ...         for evicted in window.evicted:
        ...             slots = 0.9 * slots + 0.1 * evicted
        ...         return LayerMemory(window.mem, slots), None
        >>> model = MemoryLM(ModelConfig(model=Mean, vocab_size=65, mem_len=16, c_mem_len=1))
        >>> model(torch.randint(65, (64, 2))).memory  # of tokens [S, B]
        Memory(4 layers, mem_len=16, n_slots=1, streams=2, torch.float32)
    """

    Config: ClassVar[type] = NoSettings
    """The frozen dataclass of settings that no other memory has."""
    n_slots: ClassVar[int | None] = None
    """C, in slots; None for the setting ``c_mem_len``."""
    append_only: ClassVar[bool] = False
    """Whether the memory only appends slots, so that cached keys stay valid."""
    remembers: ClassVar[bool] = True
    """Whether anything is remembered at all."""
    layer: ClassVar[type[MemoryLayer]] = MemoryLayer
    """The class of its layers."""
    stack: ClassVar["type[MemoryStack] | None"] = None
    """The class of the whole network; None for [`MemoryStack`][memformers.models.stack.MemoryStack]."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if problem := problem_of_settings(cls.Config):
            raise UserError(f"{cls.__qualname__}.Config{problem}.")

    def __init__(self, size: MemorySizes, settings: Any = NO_SETTINGS):
        super().__init__()
        self.size = size
        self.settings = settings

    @property
    def mem_len(self) -> int:
        """M, in positions."""
        return self.size.mem_len

    @property
    def c_mem_len(self) -> int:
        """C, in slots."""
        return self.size.c_mem_len

    @classmethod
    def sizes(cls, config: NetworkConfig) -> Sequence[MemorySizes]:
        """How much each layer of the network of ``config`` remembers."""
        sizes = []
        by_layer = zip(*map(config.per_layer, LENGTHS), strict=True)
        for mem_len, c_mem_len, rate in by_layer:
            n_slots = c_mem_len if cls.n_slots is None else cls.n_slots
            sizes.append(MemorySizes(mem_len, n_slots, rate))
        return sizes

    @classmethod
    def may_shift(cls) -> bool:
        """Whether its network and layers read like built-in ones. A token shift requires this."""
        attends_as_usual = (cls.layer.forward, cls.layer.attend) == (MemoryLayer.forward, MemoryLayer.attend)
        return cls.stack is None and attends_as_usual

    @classmethod
    def build(cls, config: NetworkConfig) -> Sequence["MemoryRule"]:
        """The rule of each layer of the network of ``config``. Raises ValueError for a constructor that
        doesn't take ``(size, settings)``."""
        init = f"{cls.__qualname__}.__init__"
        try:
            inspect.signature(cls).bind(config.memory_sizes[0], config.memory_config)
        except TypeError as error:
            raise UserError(f"{init} must take (size, settings): {error}.") from None
        rules = [cls(size, config.memory_config) for size in config.memory_sizes]
        if "size" not in vars(rules[0]):
            raise UserError(f"{init} must start with super().__init__(size, settings).")
        return rules

    def resize(self, config: NetworkConfig, size: MemorySizes) -> None:
        """Remember as much as ``size`` says, in the network of ``config``."""
        self.size = size

    def update(
        self, past: LayerMemory, x: Tensor, context: UpdateContext
    ) -> tuple[LayerMemory, Tensor | None]:
        """The memory after a segment of inputs ``x [S, B, D]``, after a token shift if there is one; and a
        loss to be added to the language model's, a scalar, None for none."""
        raise UserError(f"{type(self).__qualname__} must define update(self, past, x, context).")

    def recall(self, past: LayerMemory) -> LayerMemory:
        """The memory ``past`` as the layer reads it."""
        return past

    def push(self, past: LayerMemory, x: Tensor, context: UpdateContext) -> Window:
        """Append ``x [S, B, D]`` to the newest M positions of ``past``. Returns the positions that stay,
        those that leave, and the rule's own state. Slots and evicted positions contain nothing of an earlier
        document."""
        # The oldest positions leave, until M stay.
        n_past = past.mem_len + len(x)
        n_evicted = max(n_past - self.mem_len, 0)
        age = torch.arange(n_past, n_past - n_evicted, -1, device=x.device)[:, None]  # [n, 1], 1: the newest
        n_valid = context.n_valid
        if n_valid is None:
            belongs = (age > 0).expand(n_evicted, x.shape[1])
        else:
            belongs = age <= n_valid  # [n, B]
        # Zeros replace everything of an earlier document.
        evicted = cut((past.mem, x), 0, n_evicted).where(belongs[..., None], 0.0)
        slots = past.slots
        if self.c_mem_len and (n_evicted or len(slots)):
            n_missing = self.c_mem_len - len(slots)  # at first, and while memory grows in training
            slots = torch.cat((x.new_zeros(n_missing, *x.shape[1:]), slots))
            if n_valid is not None:
                slots = slots.where((n_valid > n_past)[:, None], 0.0)
        state = dict(past.state)
        if n_valid is not None:
            # Where a document starts with the segment, the memory was reset before.
            is_new = n_valid < len(x)  # [B]
            for name, tensor in state.items():
                state[name] = tensor.masked_fill(is_new.view(1, -1, *[1] * (tensor.dim() - 2)), 0)
        return Window(cut((past.mem, x), n_evicted), slots, evicted, belongs, state)

    def candidates(
        self, past: LayerMemory, x: Tensor, context: UpdateContext, expiry_rate: int | None = None
    ) -> Candidates:
        """Append ``x [S, B, D]`` to the newest M positions of ``past``, for a rule that keeps C older ones
        unchanged, in place of slots. Returns the positions that stay and the older ones to choose among. With
        an ``expiry_rate``, the oldest kept one expires each time that this number of positions leaves, unless
        there is a free place. Such a rule's [`MemorySizes`][memformers.MemorySizes] have
        ``slot_positions=1``."""
        recent = (past.mem, x)
        n_recent = past.mem_len + len(x)
        n_evicted = max(n_recent - self.mem_len, 0)
        # The oldest kept ones expire, as long as there is no free place.
        n_expired = 0
        if expiry_rate is not None:
            n_free = self.c_mem_len - past.n_slots
            n_expired = max(-(-n_evicted // expiry_rate) - n_free, 0)
        older = torch.cat((past.slots[n_expired:], cut(recent, 0, n_evicted)))  # [n, B, D]
        # A document keeps all positions as long as there is a place, so its length tells which belong to it.
        age = torch.arange(len(older), 0, -1, device=x.device)[:, None] + n_recent - n_evicted
        n_valid = context.n_valid
        belongs = age > 0 if n_valid is None else age <= n_valid
        return Candidates(cut(recent, n_evicted), older, belongs.expand(-1, x.shape[1]))


def is_built_in(rule: MemoryRule) -> bool:
    """Whether ``rule`` is one of this package, and need not be checked."""
    return type(rule).__module__.startswith("memformers.")


def problem_of_settings(config: Any) -> str:
    """Why ``config`` can't be the settings of a memory, as the end of a sentence; empty if it can."""
    parameters: Any = getattr(config, "__dataclass_params__", None)
    if not is_dataclass(config) or not parameters.frozen:
        return " is not a frozen dataclass; write @dataclass(frozen=True) above it"
    shared = {field.name for field in fields(ModelConfig)}
    for field in fields(config):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if default is MISSING:
            return f": {field.name} has no default"
        if not isinstance(default, JSON):
            return f": {field.name}={default!r} can't be written to config.json"
        if field.name in shared:
            return f": {field.name} is a setting of all models; rename it"
    return ""
