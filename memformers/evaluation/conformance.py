"""What every memory must satisfy, checked with a small network in double precision: ``memformers check``, and
[`assert_conforms`][] in a test."""

import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.generation.stepper import Stepper
from memformers.models.config import ModelConfig
from memformers.models.language_model import LMOutput, MemoryLM
from memformers.models.memory import Memory
from memformers.models.registry import lookup
from memformers.models.rules.base import MemoryRule

SMALL: dict[str, Any] = {
    "vocab_size": 11, "d_model": 12, "n_heads": 3, "n_layers": 2, "d_ff": 16, "segment_len": 6, "mem_len": 8,
    "c_mem_len": 4, "compression_rate": 2,
}  # fmt: skip
TOLERANCE = 1e-9
"""The largest difference between what must be equal."""
CHECKS = ("segments", "documents", "streams", "causality", "stepping", "saving")


def conformance(model: str | type[MemoryRule], **settings: Any) -> Iterator[tuple[str, str, str]]:
    """For each check its name, what it requires, and one sentence about what is wrong, or what the memory's
    code raised; an empty one if nothing is. ``model`` and ``settings`` are those of a
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
            if not parameter.any():  # a parameter that starts at zero would hide what it does
                torch.nn.init.normal_(parameter, std=0.5)
        for name in CHECKS:
            check = getattr(checks, name)
            try:
                problem = check()
            except Exception as error:  # of the code that is checked
                problem = f"{'' if isinstance(error, UserError) else f'{type(error).__name__}: '}{error}"
            yield name, " ".join(check.__doc__.split()), problem


def assert_conforms(model: str | type[MemoryRule], **settings: Any) -> None:
    """Raise AssertionError unless a memory satisfies what ``memformers check`` checks, with a line for each
    check that failed.

    Args:
        model: The memory, as ``model`` of a [`memformers.ModelConfig`][].
        settings: Other settings of this config; by default, a small network.

    Raises:
        AssertionError: For a memory that fails a check.
        ValueError: For settings with which no network can be built.

    Examples:
        >>> from memformers import assert_conforms
        >>> assert_conforms("selective", mem_len=4)
    """
    failed = [f"{name}: {problem}" for name, _, problem in conformance(model, **settings) if problem]
    if failed:
        raise AssertionError("\n".join(failed))


class Checks:
    """The checks of a small network, each of which returns a sentence where something is wrong."""

    def __init__(self, config: ModelConfig):
        self.lm = MemoryLM(config).double().eval()
        self.config = config
        self.sizes = config.memory_sizes
        self.S = config.segment_len
        self.filling = (config.remembered_positions // self.S + 3) * self.S
        """A number of tokens in whole segments after which every memory is full."""

    @cached_property
    def memory(self) -> Memory:
        """A full memory of two streams."""
        return self.read(self.tokens(self.filling)).memory

    def tokens(self, length: int, streams: int = 2) -> Tensor:
        return torch.randint(self.config.n_tokens, (length, streams))

    def read(
        self, text: Tensor, memory: Memory | None = None, starts: Tensor | None = None, first: int = 0
    ) -> LMOutput:
        """``text [T, B]`` in whole segments after one of ``first`` tokens; losses are summed."""
        lengths = [self.S] * ((len(text) - first) // self.S)
        if first:
            lengths.insert(0, first)
        starts_of_parts = [None] * len(lengths) if starts is None else starts.split(lengths)
        logits = []
        losses = torch.zeros((), dtype=torch.float64)
        for part, doc_starts in zip(text.split(lengths), starts_of_parts, strict=True):
            output = self.lm(part, memory, doc_starts=doc_starts)
            memory = output.memory
            losses = losses + output.auxiliary_loss
            logits.append(output.logits)
        assert memory is not None
        return LMOutput(torch.cat(logits), memory, losses)

    def segments(self) -> str:
        """Reading in segments equals reading in one pass, as long as the memory keeps every position."""
        M = min(size.mem_len for size in self.sizes)
        if not M:
            return ""  # nothing is kept exactly
        text = self.tokens(M + self.S)
        in_segments = self.read(text, first=M % self.S).logits
        in_one_pass = self.lm(text).logits
        return difference(in_segments, in_one_pass, "a text read in segments", "the same text in one pass")

    def documents(self) -> str:
        """A stream that was reset equals a fresh one, and changes no other."""
        S = self.S
        M = max(size.mem_len for size in self.sizes)
        rate = math.lcm(*(size.compression_rate for size in self.sizes))

        # One stream starts a document at the edge of a slot, when its memory is full.
        begin = rate * ((M + S) // rate + 1)
        text = self.tokens(S * (begin // S + 4))
        starts = torch.zeros_like(text, dtype=torch.bool)
        starts[begin, 0] = True
        fresh = self.read(text[begin:, :1], first=S - begin % S)
        cases = [("doc_starts", self.read(text, starts=starts), fresh, self.read(text))]

        # Its full memory is reset between two segments, when no group of positions is incomplete.
        n_complete = math.lcm(S, rate)
        memory = self.read(self.tokens(n_complete * (M // n_complete + 2))).memory
        text = self.tokens(3 * S)
        reset = memory.reset(torch.tensor([True, False]))
        cases += [("Memory.reset", self.read(text, reset), self.read(text[:, :1]), self.read(text, memory))]
        for start, (logits, *_), (fresh_logits, *_), (undisturbed, *_) in cases:
            since_start = logits[-len(fresh_logits) :, :1]
            neighbour = f"a stream beside one with {start}"
            problem = difference(since_start, fresh_logits, f"a stream after {start}", "a fresh stream")
            problem = problem or difference(
                logits[:, 1:], undisturbed[:, 1:], neighbour, "the same without it"
            )
            if problem:
                return problem
        return ""

    def streams(self) -> str:
        """The streams of a batch don't change each other."""
        text = self.tokens(self.filling, 3)
        alone = torch.cat([self.read(stream).logits for stream in text.split(1, dim=1)], dim=1)
        return difference(self.read(text).logits, alone, "a stream in a batch", "the stream alone")

    def causality(self) -> str:
        """No output depends on a later token, nor has a gradient from it."""
        # A changed token changes no earlier output.
        text = self.tokens(self.S)
        logits = self.lm(text, self.memory).logits
        for t in range(1, len(text)):
            changed = text.clone()
            changed[t] = (changed[t] + 1) % self.config.n_tokens
            changed_logits = self.lm(changed, self.memory).logits
            if not is_close(changed_logits[:t], logits[:t]):
                return f"the output before token {t} of a segment changes when token {t} changes."

        # An output has no gradient from later inputs.
        embedded: list[Tensor] = []

        def keep(module: Any, arguments: Any, output: Tensor) -> Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[0]

        with self.lm.embed.register_forward_hook(keep):
            logits = self.lm(text, self.memory).logits
        for t, score in enumerate((logits * torch.rand_like(logits)).sum((1, 2))):
            (grad,) = torch.autograd.grad(score, embedded, retain_graph=True)
            later = grad.abs().flatten(1).amax(1)[t + 1 :]  # [S]
            wrong = (~(later <= TOLERANCE)).nonzero()  # NaN too
            if len(wrong):
                last = int(wrong[-1])
                return (
                    f"the output at position {t} of a segment has a gradient from the input at position "
                    f"{t + 1 + last}, up to {later[last]:.2g}."
                )
        return ""

    def stepping(self) -> str:
        """Reading token by token, as generation does, equals reading in segments."""
        if self.config.model == "transformer":
            return ""  # which is read with a sliding window
        text = self.tokens(self.filling)
        decoder = Stepper(self.lm, 2)
        steps = torch.stack([decoder.read(token)[-1] for token in text.split(1)])
        segments = self.read(text).logits
        return difference(steps, segments, "a text read token by token", "the same text in segments")

    def saving(self) -> str:
        """A model and a memory that were saved and loaded compute the same."""
        text = self.tokens(self.S)
        with TemporaryDirectory() as folder:
            self.lm.save_pretrained(Path(folder) / "model")
            loaded = MemoryLM.from_pretrained(Path(folder) / "model", model=lookup(self.config.model))
        memory = Memory.from_tensors(self.memory.tensors())
        logits = loaded(text, memory).logits
        saved_logits = self.lm(text, self.memory).logits
        return difference(logits, saved_logits, "a model that was loaded", "the saved one")


def is_close(x: Tensor, y: Tensor) -> bool:
    return bool(((x - y).abs() <= TOLERANCE).all())  # not of NaN


def difference(x: Tensor, y: Tensor, name_of_x: str, name_of_y: str) -> str:
    """A sentence if ``x [T, B, ·]`` is not ``y``, of the same shape."""
    if is_close(x, y):
        return ""
    distance = (x - y).abs().amax(-1)
    t, b = (~(distance <= TOLERANCE)).nonzero()[0].tolist()
    return (
        f"{name_of_x} differs from {name_of_y} by up to {distance.max():.2g}, first at position {t} of "
        f"{len(x)} in stream {b}."
    )
