"""What your memory defines, and what it gets for it: the layers, documents, saving, generation."""

import inspect
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from memformers.common.text import UserError
from memformers.models.attention import RelativeMultiHeadAttention
from memformers.models.base import MemoryStack
from memformers.models.config import SHARED_SETTINGS, ModelConfig, NetworkConfig
from memformers.models.documents import valid_afterwards
from memformers.models.layers import MemoryLayer
from memformers.models.memory import UNBOUNDED, Memory, check_memory, check_returned

JSON = (int, float, str, tuple, type(None))
"""The types of its settings: bool is an int."""


class CustomMemory(MemoryStack):
    """The base class of your memory. A layer remembers its newest M inputs as they are, and before them C
    slots ``[C, B, D]``, which your class fills; queries attend to all of them and to the segment. Define:

    - ``memory_sizes(config)``: each layer's [`MemorySizes`][memformers.MemorySizes].
    - ``grow(layer, slots, evicted, belongs)``: the slots after some positions have left the newest M; or, for
      a memory that grows in another way, all of ``update_memory``.

    Optionally:

    - ``Config``, a frozen dataclass of its settings, with types, defaults and a text below each: options of
      the command, settings of arms, and ``self.settings``. ``uses``: settings of built-in models that it
      uses.
    - ``layer``, the class of its layers, whose ``forward`` gets the slots as ``c_mem``; ``read``, if the
      segment is read in another way altogether.
    - ``visible_past_keys``, if a query may see only some of the slots.
    - ``keeps_keys = True``, if ``read`` and ``layer`` are those of this class, for faster generation.
    - ``attention_sizes`` and ``more_operations``, for the reported cost, if it isn't that of M + C + S keys.

    Modules that ``__init__(config, self_attn, feed_forward)`` adds keep the weights that it gives them. A
    class whose ``Config`` or ``uses`` can't be used raises a ValueError when it is defined.

    Examples:
        >>> import torch
        >>> from memformers import CustomMemory, MemoryLM, MemorySizes, ModelConfig
        >>> class Mean(CustomMemory):
        ...     @classmethod
        ...     def memory_sizes(cls, config):
        ...         return [MemorySizes(mem_len=16, c_mem_len=1, compression_rate=64)] * config.n_layers
        ...     def grow(self, layer, slots, evicted, belongs):
        ...         return 0.9 * slots + 0.1 * evicted.mean(0, keepdim=True)
        >>> model = MemoryLM(ModelConfig(model=Mean, vocab_size=65))
        >>> memory = model(torch.randint(65, (64, 2))).memory
        >>> memory.mem_len, memory.c_mem_len
        (16, 1)
    """

    uses: ClassVar[tuple[str, ...]] = ("mem_len",)
    """The settings of built-in models that it uses, some of [`SHARED_SETTINGS`][]. With ``memory_warmup``,
    training starts with a shorter memory: its newest positions, and then its newest slots."""
    layer: ClassVar[type[MemoryLayer]] = MemoryLayer
    """The class of its layers."""
    keeps_keys: ClassVar[bool] = False
    """Whether generation may keep keys, and need not read the running segment again for each token."""
    only_appends = False
    whole_slots = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        wrong = [name for name in cls.uses if name not in SHARED_SETTINGS]
        problems = [f"uses has {name!r}, not one of {SHARED_SETTINGS}" for name in wrong]
        if not isinstance(inspect.getattr_static(cls, "memory_sizes"), classmethod | staticmethod):
            problems.append("memory_sizes is not a class method; write @classmethod above it")
        if not is_dataclass(cls.Config) or not cls.Config.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            problems.append("Config is not a frozen dataclass; write @dataclass(frozen=True) above it")
        shared = {field.name for field in fields(ModelConfig)}
        for field in fields(cls.Config) if is_dataclass(cls.Config) else ():
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if default is MISSING:
                problems.append(f"Config: {field.name} has no default")
            elif not isinstance(default, JSON):
                problems.append(f"Config: {field.name}={default!r} can't be written to config.json")
            if field.name in shared:
                problems.append(f"Config: {field.name} is a setting of all models; rename it")
        if problems:
            raise UserError(f"{cls.__qualname__}.{problems[0]}.")

    def __init__(self, config: NetworkConfig, self_attn: RelativeMultiHeadAttention, feed_forward: nn.Module):
        shift: Any = {"token_shift": True} if config.token_shift else {}  # a layer may do without
        layer = self.layer(
            d_model=config.d_model, self_attn=self_attn, feed_forward=feed_forward,
            dropout_prob=config.dropout, norm=config.norm, gate=config.gate, **shift,
        )  # fmt: skip
        super().__init__(layer, config.n_layers)
        self.settings = config.memory_config

    @classmethod
    def may_shift(cls) -> bool:
        """Whether it reads, and its layers attend, as built-in models do."""
        usual = MemoryStack.read, MemoryLayer.forward, MemoryLayer.attend
        return (cls.read, cls.layer.forward, cls.layer.attend) == usual

    @classmethod
    def build(
        cls, config: NetworkConfig, self_attn: RelativeMultiHeadAttention, feed_forward: nn.Module
    ) -> "CustomMemory":
        arguments, init = "config, self_attn, feed_forward", f"{cls.__qualname__}.__init__"
        try:
            inspect.signature(cls).bind(config, self_attn, feed_forward)
        except TypeError as error:
            raise UserError(f"{init} must take {arguments}: {error}.") from None
        network = cls(config, self_attn, feed_forward)
        if "layers" not in vars(network).get("_modules", {}):
            raise UserError(f"{init} must start with super().__init__({arguments}).")
        if config.token_shift and any(type(x) is not cls.layer or x.shift is None for x in network.layers):
            raise UserError(f"{cls.__qualname__}.__init__ replaces the layers; use token_shift=False.")
        return network

    def grow(self, layer: int, slots: Tensor, evicted: Tensor, belongs: Tensor) -> Tensor:
        """The new slots ``[C, B, D]`` of layer ``layer``, from 0. ``slots [C, B, D]`` are the old ones, zeros
        in a stream that has none. ``evicted [n, B, D]``, n ≥ 1, oldest first, are the positions that now
        leave the newest M, zeros if they belong to an earlier document. ``belongs``, boolean ``[n, B]``,
        marks those of the current document."""
        raise UserError(f"{type(self).__qualname__} defines neither grow nor update_memory; write one.")

    def update(
        self, memory: Memory, inputs: Sequence[Tensor], shifted: Sequence[Tensor], doc_starts: Tensor | None
    ) -> tuple[Memory, Tensor]:
        """[`update_memory`][], of ``shifted [S, B, D]``."""
        updated: Any = self.update_memory(memory, shifted, doc_starts)
        if not isinstance(updated, tuple) or len(updated) != 2:
            name = f"{type(self).__qualname__}.update_memory"
            raise UserError(f"expected {name} to return a memory and a loss, got {type(updated).__name__}.")
        return updated

    def update_memory(
        self, memory: Memory, inputs: Sequence[Tensor], doc_starts: Tensor | None
    ) -> tuple[Memory, Tensor]:
        """The memory after a segment whose ``read`` returned ``inputs``, ``[S, B, D]`` a layer, here after a
        token shift, if there is one; and a loss to be added to the language model's, a scalar."""
        B, device, mem, c_mem = inputs[0].shape[1], inputs[0].device, [], []
        valid = torch.full((B,), UNBOUNDED, device=device) if memory.valid is None else memory.valid
        for layer, (x, size) in enumerate(zip(inputs, self.sizes, strict=True)):
            whole = torch.cat([memory.mem[layer], x]) if memory.mem else x  # [M + S, B, D]
            L, n = len(whole), max(len(whole) - size.mem_len, 0)
            slots = memory.c_mem[layer] if memory.c_mem else x[:0]
            if size.c_mem_len and (n or len(slots)):
                missing = size.c_mem_len - len(slots)  # at first, and while memory grows in training
                slots = torch.cat((x.new_zeros(missing, *x.shape[1:]), slots))
                # How many of the newest positions belong to the document that runs at the end.
                newest = valid_afterwards(valid, doc_starts, len(x), UNBOUNDED, UNBOUNDED)  # [B]
                assert newest is not None
                slots = slots.where((newest > L)[:, None], 0.0)
                if n:
                    belongs = torch.arange(L, L - n, -1, device=device)[:, None] <= newest  # [n, B]
                    grown = self.grow(layer, slots, whole[:n].where(belongs[..., None], 0.0), belongs)
                    check_returned(type(self), "grow", grown, slots.shape)
                    slots = grown.to(x.dtype)
            mem.append(whole[n:])
            c_mem.append(slots)
        return Memory(tuple(mem), tuple(c_mem) if any(map(len, c_mem)) else ()), inputs[0].new_zeros(())

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Memory, Tensor]:
        """[`MemoryStack.forward`][memformers.models.base.MemoryStack.forward], whose output must be ``[S, B,
        D]`` as ``x`` is."""
        output, memory, loss = super().forward(x, *args, **kwargs)
        check_returned(type(self), "read", output, x.shape)
        return output, memory, loss

    def remember(
        self, memory: Memory, inputs: Sequence[Tensor], doc_starts: Tensor | None, segment_len: int
    ) -> tuple[Memory, Tensor]:
        """[`MemoryStack.remember`][memformers.models.base.MemoryStack.remember], of ``inputs [S, B, D]``,
        whose result must fit the sizes."""
        after, loss = super().remember(memory, inputs, doc_starts, segment_len)
        try:
            check_memory(after, inputs[0], self.sizes)
            check_returned(type(self), "update_memory", loss, ())
        except UserError as error:
            raise UserError(f"{type(self).__qualname__}.update_memory: {error}") from None
        return after, loss

    def visible_past_keys(self, valid: Tensor, mem_len: int, c_mem_len: int, rate: int) -> Tensor:
        """How many of the newest keys of a memory belong to the current document of ``valid [B]`` positions:
        all slots as soon as one position has left the newest M; int64 ``[B]``."""
        return valid.clamp(0, mem_len) + c_mem_len * (valid > mem_len)
