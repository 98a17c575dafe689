"""Counts the operations and the memory of a training step, on the model itself but without data.

Its tensors have only shapes and types: for operations they are on PyTorch's meta device, and for bytes they
are fake tensors of a CPU, which autocast supports. A step has ``batch_size`` streams with full memories.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from memformers.kernels.dispatch import SUPPORT, Support
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.training.config import TrainConfig

Counts = Counter[str]
"""Numbers by name."""


@cache
def over_layers(count: Callable[[TrainConfig], Counts], config: TrainConfig) -> Counts:
    """``count(config)``, computed from the counts for one layer and for two where all layers are alike."""
    if len(set(config.model.memory_sizes)) > 1:
        return count(config)
    own = config.model.memory_sizes[0]
    alike = {name: getattr(own, name) for name in ("mem_len", "c_mem_len", "compression_rate")}
    config = replace(config, model=replace(config.model, **alike))
    one, two = (count(replace(config, model=replace(config.model, n_layers=n))) for n in (1, 2))
    return Counter({name: one[name] + (config.model.n_layers - 1) * (two[name] - one[name]) for name in two})


def flops(config: TrainConfig) -> Counts:
    """Floating-point operations of a step's matrix products, forward and backward, by the part of the model
    that needs them; a product of ``[m, k]`` and ``[k, n]`` has 2·m·k·n.

    They are counted with the naive kernel, which computes every score, also those that the causal mask hides;
    the reconstruction loss computes its attention by plain products. If layers are computed again, only the
    total is right.
    """
    with torch.device("meta"), sdpa_kernel(SDPBackend.MATH):
        lm = built(replace(config, model=replace(config.model, kernel="naive")))
        inputs = full_inputs(lm, config.batch_size)
        with FlopCounterMode(display=False) as counter, (parts := Parts(lm, counter.get_total_flops)):
            with saved_tensors_hooks(lambda tensor: (tensor, parts.part), parts.take_back):
                loss(lm, *inputs).backward()
            parts.turn_to("")
    return parts.flops


PARTS = {"layers": "projections", "position": "positions", "feed_forward": "feed forward",
         "compress": "compression", "head": "head"}  # fmt: skip
"""The part for modules with these names, and for those in a list with such a name."""


class Parts(TorchFunctionMode):
    """Counts the operations of ``lm`` by part; ``total`` returns the number of all so far. In the backward
    pass, operations belong to the part that kept the tensor which is read."""

    def __init__(self, lm: MemoryLM, total: Callable[[], int]):
        super().__init__()
        self.flops, self.total, self.counted = Counts(), total, 0
        self.part = "reconstruction"  # which has no module
        for name, module in lm.named_modules():
            if part := PARTS.get(name.rstrip(".0123456789").rpartition(".")[2]):
                module.forward = self.within(part, module.forward)

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """In a layer, einsum belongs to the kernel, and projections without a gradient are those of
        memory."""
        if self.part == "projections" and function is torch.einsum:
            function = self.within("scores", function)
        elif self.part == "projections" and function is F.linear and not args[0].requires_grad:
            function = self.within("memory projections", function)
        return function(*args, **(kwargs or {}))

    def within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose operations are counted for ``part``."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            before = self.turn_to(part)
            result = function(*args, **kwargs)
            self.turn_to(before)
            return result

        return counted

    def turn_to(self, part: str) -> str:
        """Count the next operations for ``part``; returns the previous part."""
        before, total = self.part, self.total()
        self.flops[before] += total - self.counted
        self.part, self.counted = part, total
        return before

    def take_back(self, kept: tuple[Tensor, str]) -> Tensor:
        """The tensor that a part kept; the next operations are counted for this part."""
        self.turn_to(kept[1])
        return kept[0]


def kept_bytes(config: TrainConfig) -> Counts:
    """``kept``: bytes that the forward pass keeps for the backward pass, without the weights; with
    ``activation_checkpointing`` also what one layer keeps while it is computed again. ``memories``: bytes of
    the memories before the step. A memory that is not longer than a segment stores all inputs of that
    segment."""
    rules = nullcontext() if config.step.device == "cpu" else OnGPU()
    with torch.device("meta"):
        lm = built(config)
    # The fused kernel is refused on a CPU, but with fake tensors it only makes fake ones.
    allowed = patch.dict(SUPPORT, fused=Support())
    with allowed, FakeTensorMode(allow_non_fake_inputs=True), rules:
        lm.to_empty(device="cpu")
        inputs = full_inputs(lm, config.batch_size)
        with torch.autocast("cpu", torch.bfloat16, enabled=config.step.precision == "bfloat16"):
            memories = *inputs[1].mem, *inputs[1].c_mem
            kept = kept_by(lm, lambda: loss(lm, *inputs), memories)
            if lm.transformer.recompute:
                lm.transformer.recompute = False
                kept += (kept_by(lm, lambda: loss(lm, *inputs), memories) - kept) // config.model.n_layers
    return Counts(kept=kept, memories=held(memories))


def kept_by(lm: MemoryLM, compute: Callable[[], Tensor], memories: Iterable[Tensor] = ()) -> int:
    """Bytes that ``compute`` keeps for the backward pass of its result, without the weights of ``lm`` and
    without ``memories``, which layers that are computed again keep as inputs."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    return held(kept, but=(*lm.parameters(), *memories))


def held(tensors: Iterable[Tensor], but: Iterable[Tensor] = ()) -> int:
    """Bytes of the storages of ``tensors``, each counted once, without those of ``but``."""
    storages = [{(s := t.untyped_storage())._cdata: s.nbytes() for t in of} for of in (tensors, but)]
    return sum(size for at, size in storages[0].items() if at not in storages[1])


class OnGPU(TorchFunctionMode):
    """Keeps on a CPU the same as a GPU: one byte a number for dropout."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``function`` as on a GPU."""
        kwargs = kwargs or {}
        if function is F.dropout and kwargs["training"] and kwargs["p"]:
            return torch.native_dropout(args[0], kwargs["p"], True)[0]
        return function(*args, **kwargs)


def built(config: TrainConfig) -> MemoryLM:
    """The model that is trained; ``auto`` means the naive kernel."""
    kernel = "naive" if config.model.kernel == "auto" else config.model.kernel
    lm = MemoryLM(replace(config.model, kernel=kernel))
    lm.transformer.recompute = config.step.activation_checkpointing
    return lm


@torch.no_grad()
def full_inputs(lm: MemoryLM, streams: int) -> tuple[Tensor, Memory]:
    """Tokens ``[S, B]``, and the memory before them, at its full length. If ``compression_rate`` doesn't
    divide the lengths, they repeat in a cycle, and this is the memory before the step of the cycle that
    compresses most."""
    S, lengths, n_layers = lm.config.segment_len, lm.config.memory_sizes, lm.config.n_layers
    memory, seen = Memory(()), dict[tuple[tuple[int, int], ...], Memory]()
    while (at := tuple(memory.lengths(n_layers))) not in seen:
        seen[at] = memory
        inputs = [torch.empty(S, streams, lm.config.d_model) for _ in lm.transformer.layers]
        memory, _ = lm.transformer.remember(memory, inputs, lengths)
    circle = list(seen.values())[list(seen).index(at) :]

    def work(memory: Memory) -> tuple[int, int]:
        """Slots that are made after it, and positions in it, of all layers."""
        found = [M for M, _ in memory.lengths(n_layers)]
        each = zip(found, lengths, strict=True)
        return sum(own.n_evicted(M + S) // own.compression_rate for M, own in each), sum(found)

    return torch.zeros(S, streams, dtype=torch.int64), max(circle, key=work)


def loss(lm: MemoryLM, tokens: Tensor, memory: Memory) -> Tensor:
    """A step's loss, a scalar: the model's own forward pass without the check of the tokens' values, which
    fake tensors don't have. The targets are another tensor."""
    x = lm.dropout(lm.embed(tokens))  # [S, B, D]
    hidden, _, auxiliary_loss = lm.transformer.step(x, memory, lm.config.memory_sizes)
    return F.cross_entropy(lm.predict(hidden).flatten(0, 1), tokens.clone().flatten()) + auxiliary_loss
