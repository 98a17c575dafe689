"""What every memory must satisfy, checked with a small network in double precision: ``memformers check``, and
[`assert_conforms`][] in a test."""

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from memformers.common.errors import UserError
from memformers.generation.incremental import Stepper
from memformers.models.base import MemoryStack, operations
from memformers.models.config import ModelConfig, is_used
from memformers.models.custom_memory import CustomMemory
from memformers.models.language_model import LMOutput, MemoryLM
from memformers.models.memory import Memory, memory_from_tensors, memory_tensors

SMALL: dict[str, Any] = {
    "vocab_size": 11, "d_model": 12, "heads": 3, "n_layers": 2, "d_ff": 16, "segment_len": 6, "mem_len": 8,
    "c_mem_len": 4, "compression_rate": 2,
}  # fmt: skip
TOLERANCE = 1e-9
"""The largest difference between what must be equal."""
CHECKS = ("segments", "documents", "streams", "causality", "size", "keys", "cost", "saving", "stepping",
          "gradients")  # fmt: skip


def conformance(model: str | type[MemoryStack], **settings: Any) -> Iterator[tuple[str, str, str]]:
    """For each check its name, what it asks, and one sentence that says what differs, or what the memory's
    own code raised; an empty one if nothing does. ``model`` and ``settings`` are those of a
    [`ModelConfig`][memformers.models.config.ModelConfig]. Raises UserError for one that can't be built."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ModelConfig(**{**SMALL, **settings, "model": model})
        try:
            checks = Checks(config)
        except UserError:
            raise
        except Exception as error:  # of the code that is checked
            yield "building", "The network can be built.", f"{type(error).__name__}: {error}"
            return
        for parameter in checks.lm.parameters():
            if not parameter.any():  # what begins at zero would hide what it does
                torch.nn.init.normal_(parameter, std=0.5)
        for name in CHECKS:
            check = getattr(checks, name)
            try:
                said = check()
            except Exception as error:  # of the code that is checked
                said = f"{'' if isinstance(error, UserError) else f'{type(error).__name__}: '}{error}"
            yield name, " ".join(check.__doc__.split()), said


def assert_conforms(model: str | type[MemoryStack], **settings: Any) -> None:
    """Raise AssertionError, with a line for each check of [`conformance`][] that failed; the arguments and
    other errors are those of it."""
    if failed := [f"{name}: {said}" for name, _, said in conformance(model, **settings) if said]:
        raise AssertionError("\n".join(failed))


class Checks:
    """The checks of a small network, each of which returns a sentence where something is wrong."""

    def __init__(self, config: ModelConfig):
        self.lm = MemoryLM(config).double().eval()
        self.config, self.sizes, self.S = config, config.memory_sizes, config.segment_len
        rates = [own.compression_rate for own in self.sizes]
        self.waiting = max(rates) - 1 if is_used("compression_rate", config.model) else 0
        """How many positions of a layer wait at most until they fill a slot."""
        self.filling = (config.remembered_positions // self.S + 3) * self.S
        """A number of tokens in whole segments after which every memory is full."""

    @cached_property
    def memory(self) -> Memory:
        """A full one, of two streams."""
        return self.read(self.tokens(self.filling)).memory

    def tokens(self, length: int, streams: int = 2) -> Tensor:
        """A text, ``[length, streams]``."""
        return torch.randint(self.config.n_tokens, (length, streams))

    def read(
        self, text: Tensor, memory: Any = None, starts: Any = None, first: int = 0, **how: Any
    ) -> LMOutput:
        """What the network makes of ``text [T, B]``, with these ``starts [T, B]``, in whole segments, before
        which comes one of ``first`` tokens: all logits, the memory, and the sum of the auxiliary losses."""
        parts = [first] * (first > 0) + [self.S] * ((len(text) - first) // self.S)
        all_starts = [None] * len(parts) if starts is None else starts.split(parts)
        logits, losses = [], torch.zeros((), dtype=torch.float64)
        for part, part_starts in zip(text.split(parts), all_starts, strict=True):
            output = self.lm(part, memory, doc_starts=part_starts, **how)
            memory, losses = output.memory, losses + output.auxiliary_loss
            logits.append(output.logits)
        assert memory is not None
        return LMOutput(torch.cat(logits), memory, losses)

    def segments(self) -> str:
        """Reading in segments equals reading in one pass, as long as the memory keeps every position."""
        M = min(m for own in self.sizes for m, _ in own.heads or [(own.newest, 0)])
        if not M:
            return ""  # nothing is kept as it is
        text = self.tokens(M + self.S)
        found, wanted = self.read(text, first=M % self.S).logits, self.lm(text).logits
        return differs(found, wanted, "a text read in segments", "the same text in one pass")

    def documents(self) -> str:
        """A stream that was reset equals a fresh one, and changes no other."""
        S, M = self.S, max(own.mem_len for own in self.sizes)
        rate = math.lcm(*(own.compression_rate for own in self.sizes))
        begin = rate * ((M + S) // rate + 1)  # the edge of a slot
        text = self.tokens(S * (begin // S + 4))
        starts = torch.zeros_like(text, dtype=torch.bool)
        starts[begin, 0] = True
        fresh = self.read(text[begin:, :1], first=S - begin % S)
        read = [("doc_starts", self.read(text, starts=starts), fresh, self.read(text))]
        both = math.lcm(S, rate)
        memory = self.read(self.tokens(both * (M // both + 2))).memory
        text, reset = self.tokens(3 * S), memory.reset(torch.tensor([True, False]))
        read += [("Memory.reset", self.read(text, reset), self.read(text[:, :1]), self.read(text, memory))]
        said = ""
        for by, (found, *_), (alone, *_), (other, *_) in read:
            after = found[-len(alone) :, :1]
            said = said or differs(after, alone, f"a stream after {by}", "a fresh stream")
            beside = f"a stream beside one with {by}"
            said = said or differs(found[:, 1:], other[:, 1:], beside, "the same without it")
        return said

    def streams(self) -> str:
        """The streams of a batch don't change each other."""
        text = self.tokens(self.filling, 3)
        alone = torch.cat([self.read(stream).logits for stream in text.split(1, dim=1)], dim=1)
        return differs(self.read(text).logits, alone, "a stream in a batch", "the stream alone")

    def causality(self) -> str:
        """No output depends on a later token, nor has a gradient from it."""
        text = self.tokens(self.S)
        before = self.lm(text, self.memory).logits
        for t in range(1, len(text)):
            changed = text.clone()
            changed[t] = (changed[t] + 1) % self.config.n_tokens
            what = f"the output before token {t} of a segment, when that token is another one,"
            if said := differs(self.lm(changed, self.memory).logits[:t], before[:t], what, "what it was"):
                return said
        x = self.lm.embed(text).detach().requires_grad_()
        output, _ = self.lm.transformer(x, self.memory, sizes=self.sizes)
        for t, score in enumerate((output * torch.rand_like(output)).sum((1, 2))):
            (grad,) = torch.autograd.grad(score, x, retain_graph=True)
            later = grad.abs().flatten(1).amax(1)[t + 1 :]  # [S]
            if len(wrong := (~(later <= TOLERANCE)).nonzero()):
                last = int(wrong[-1])
                return (
                    f"the output at position {t} of a segment has a gradient from the input at position "
                    f"{t + 1 + last}, up to {later[last]:.2g}."
                )
        return ""

    def size(self) -> str:
        """The memory stops growing."""
        memory, sizes, whole = Memory(()), [], self.filling // self.S
        for text in self.tokens(4 * self.filling).split(self.S):
            memory = self.lm(text, memory).memory
            sizes.append(sum(x[:, 0].numel() for part in memory.parts.values() for x in part))
        early, late = max(sizes[: 2 * whole]), max(sizes[2 * whole :])
        said = (
            f"a stream's memory has {early} numbers after {2 * whole} segments and {late} after {4 * whole}."
        )
        return said if late > early else ""

    def keys(self) -> str:
        """Each layer remembers as many positions and slots as it declares, and reads them all."""
        lengths = self.memory.lengths(self.config.n_layers)
        for layer, ((M, C), own) in enumerate(zip(lengths, self.sizes, strict=True)):
            if not own.mem_len - self.waiting <= M <= own.longest_memory or own.c_mem_len != C:
                return (
                    f"layer {layer} remembers {M} positions and {C} slots, but memory_sizes declares "
                    f"{own.mem_len} and {own.c_mem_len}."
                )
        memory = self.memory.detach()
        parts = {"position": memory.mem, "slot": memory.c_mem}
        read = [
            (what, i, x.requires_grad_()) for what, xs in parts.items() for i, x in enumerate(xs) if len(x)
        ]
        score = self.lm(self.tokens(self.S), memory).logits.square().sum()
        of_all = [x for _, _, x in read]
        grads = torch.autograd.grad(score, of_all, materialize_grads=True, allow_unused=True) if read else ()
        for (what, layer, _), grad in zip(read, grads, strict=True):
            unread = (grad == 0).flatten(1).all(1)
            if what == "position" and self.config.same_length:
                unread[0] = False  # the query's own position takes its place in the window
            if unread.any():
                at = int(unread.nonzero()[0])
                return f"{what} {at} of layer {layer} changes no output of the next segment."
        return ""

    def cost(self) -> str:
        """Attention gets as many keys, and a token takes as many operations, as the memory declares."""
        if self.S == 1:
            return ""  # PyTorch doesn't count products of single numbers
        shared = {
            each.name: getattr(self.config, each.name)
            for each in fields(self.config)
            if is_used(each.name, "transformer") and each.name not in ("model", "own")
        }
        alone, kind = ModelConfig(model="transformer", **shared), type(self.lm.transformer)
        more, sizes = kind.more_operations(self.config), kind.attention_sizes(self.config)
        if self.waiting and len(sizes) == len(self.sizes):  # of some positions that were compressed already
            lengths = zip(sizes, self.memory.lengths(len(self.sizes)), self.sizes, strict=False)
            sizes = [(Q, K - own.mem_len + M) for (Q, K), (M, _), own in lengths]
        of_memory = sum(operations(self.config.d_model, *each) for each in sizes)
        of_memory -= len(self.sizes) * operations(self.config.d_model, self.S, self.S)
        if (beside := (counted(self.config) - counted(alone) - of_memory) // self.S) == more:
            return ""
        said = ", ".join(f"{Q} queries and {K} keys" for Q, K in sizes)
        return (
            f"beside attention of {said}, as attention_sizes declares, a token takes {beside:,} operations, "
            f"but more_operations declares {more:,}."
        )

    def saving(self) -> str:
        """A model and a memory that were saved and loaded compute the same."""
        text = self.tokens(self.S)
        with TemporaryDirectory() as folder:
            self.lm.save_pretrained(Path(folder) / "model")
            loaded = MemoryLM.from_pretrained(Path(folder) / "model", model=type(self.lm.transformer))
        again = loaded(text, memory_from_tensors(memory_tensors(self.memory), self.config.n_layers)).logits
        return differs(again, self.lm(text, self.memory).logits, "a model that was loaded", "the saved one")

    def stepping(self) -> str:
        """Reading token by token, as generation does, equals reading in segments."""
        if self.config.model == "transformer":
            return ""  # it is read with a sliding window
        text, decoder = self.tokens(self.filling), Stepper(self.lm, 2)
        found = torch.stack([decoder.read(token)[-1] for token in text.split(1)])
        return differs(
            found, self.read(text).logits, "a text read token by token", "the same text in segments"
        )

    def gradients(self) -> str:
        """Every parameter gets a gradient from the losses."""
        self.lm.train()  # where a compression may learn from the language model's loss
        text = self.tokens(self.filling)
        logits, _, losses = self.read(text, through_memory=is_used("tbptt", self.config.model))
        loss = cross_entropy(logits[:-1].flatten(0, 1), text[1:].flatten()) + losses
        names, parameters = zip(*self.lm.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        for name, parameter, grad in zip(names, parameters, grads, strict=True):
            if grad is None or not grad.any():
                return f"{name} {list(parameter.shape)} gets no gradient from any loss."
            if not grad.isfinite().all():
                return f"{name} {list(parameter.shape)} gets a gradient that is not finite."
        return ""


def counted(config: ModelConfig) -> int:
    """The operations of matrix products for a segment of one stream, with a full memory and without what all
    streams share."""
    # The naive kernel computes every score, as is declared.
    one, counts = Checks(replace(config, kernel="naive")), []
    for streams in (1, 2):
        memory = one.read(one.tokens(one.filling, streams)).memory
        text = one.tokens(one.S, streams)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            x = one.lm.embed(text)
            _, inputs = one.lm.transformer(x, memory, sizes=one.sizes)
            if isinstance(one.lm.transformer, CustomMemory):
                one.lm.transformer.remember(memory, inputs, one.sizes, segment_len=len(x))
        counts.append(counter.get_total_flops())
    return counts[1] - counts[0]


def differs(found: Tensor, wanted: Tensor, what: str, than: str) -> str:
    """A sentence if ``found [T, B, ·]`` is not ``wanted``, of the same shape."""
    difference = (found - wanted).abs().amax(-1)
    if not len(wrong := (~(difference <= TOLERANCE)).nonzero()):  # NaN too
        return ""
    t, b = wrong[0].tolist()
    return (
        f"{what} differs from {than} by up to {difference.max():.2g}, first at position {t} of "
        f"{len(found)} in stream {b}."
    )
