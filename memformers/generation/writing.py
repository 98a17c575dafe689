"""Generation: draw the next token of each stream, read it, and repeat.

Prompts of several lengths are read in one batch, in which each stream is read exactly as it would be alone.
What a position sees depends on where its segment begins, and with compression also on where slots are cut. So
the padding on the left is a multiple of both lengths: each prompt begins at the start of a segment and at the
edge of a slot, as it would alone. The prompts then end at most one such multiple apart. In this last part,
the streams whose prompts have ended already generate, while the others still read.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Count, NonNegativeInt, check_value
from memformers.generation.decoding import Reader, reader
from memformers.generation.sampling import Sampling, seeded
from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM


@dataclass(frozen=True)
class Prompts:
    """The prompts of B streams in one text of T tokens."""

    tokens: Tensor
    """``[T, B]``, with zeros before a prompt and after it."""
    doc_starts: Tensor | None
    """Boolean ``[T, B]``, true where a prompt begins after padding; None where none does."""
    ends: tuple[int, ...]
    """The end of each prompt: the number of tokens before it, including its padding."""

    @property
    def together(self) -> int:
        """How many tokens all streams read before the first of them generates."""
        return min(self.ends)


def side_by_side(prompts: Sequence[Tensor], config: ModelConfig) -> Prompts:
    """Prompts ``[P_i]``, int64 or int32 with P_i ≥ 1, for a model of this ``config``. Raises UserError for an
    empty sequence, and for a prompt that is not such a tensor or has no tokens."""
    check_prompts(prompts)
    step = math.lcm(config.segment_len, *(own.compression_rate for own in config.layer_lengths))
    longest = max(map(len, prompts))
    begins = [(longest - len(prompt)) // step * step for prompt in prompts]
    ends = tuple(begin + len(prompt) for begin, prompt in zip(begins, prompts, strict=True))
    tokens = prompts[0].new_zeros(max(ends), len(prompts), dtype=torch.int64)
    doc_starts = torch.zeros_like(tokens, dtype=torch.bool)
    for stream, (prompt, begin, end) in enumerate(zip(prompts, begins, ends, strict=True)):
        tokens[begin:end, stream] = prompt
        doc_starts[begin, stream] = begin > 0
    return Prompts(tokens, doc_starts if any(begins) else None, ends)


def check_prompts(prompts: Sequence[Tensor]) -> None:
    """Raise UserError, which names the prompt, for one that is not a tensor of integers ``[P]`` with P ≥
    1."""
    if not prompts:
        raise UserError("there are no prompts; give at least one, as a tensor of its tokens.")
    for i, prompt in enumerate(prompts):
        which = f"prompt {i} of {len(prompts)} (counted from 0)"
        if not isinstance(prompt, Tensor):
            raise UserError(f"{which} is a {type(prompt).__name__}; give a tensor of its tokens.")
        if prompt.shape == (0,):
            raise UserError(f"{which} has no tokens; give it at least one, such as a line break.")
        if prompt.dim() != 1 or prompt.dtype not in (torch.int64, torch.int32):
            raise UserError(
                f"expected {which} as int64 or int32 integers [tokens], got {prompt.dtype} "
                f"{list(prompt.shape)}; give one dimension, or all prompts as one tensor."
            )


def generate(
    model: MemoryLM,
    prompt: Tensor | Sequence[Tensor],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    seed: int | None = None,
    stop: int | None = None,
    batch: int = 1,
) -> Iterator[Tensor]:
    """[`MemoryLM.generate`][]: from ``prompt [P, B]``, or prompts ``[P_i]`` of B streams, to tokens int64
    ``[B]``."""
    if isinstance(prompt, Tensor):
        model.check_tokens(prompt)
        prompts = Prompts(prompt, None, (len(prompt),) * prompt.shape[1])
    else:
        prompts = side_by_side(prompt, model.config)
        model.check_tokens(prompts.tokens)
    width, together = len(prompts.ends), prompts.together
    check_value("batch", batch, Count)
    if batch > 1 and width > 1:
        raise UserError(f"batch={batch} repeats a single prompt, got {width} prompts; leave batch out.")
    streams = reader(model, batch if batch > 1 else width)
    doc_starts = None if prompts.doc_starts is None else prompts.doc_starts[:together]
    streams.read(prompts.tokens[:together].expand(-1, streams.batch), doc_starts)
    generator = seeded(seed, prompts.tokens.device)
    rest = prompts if together < max(prompts.ends) else None
    return write(streams, max_new_tokens, sampling, generator, stop, rest)


def write(
    reader: Reader,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    stop: int | None = None,
    prompts: Prompts | None = None,
) -> Iterator[Tensor]:
    """Continue what ``reader`` has read: draw the next token ``[B]``, read it and yield it, until
    ``max_new_tokens`` tokens are generated or every stream has generated ``stop``. ``reader`` has read the
    part of ``prompts`` that all streams read together; the rest is read here. ``prompts`` is None if nothing
    is left to read.

    Raises ValueError, when called, if nothing was read yet, and for a negative ``max_new_tokens``.
    """
    if reader.logits is None:
        raise UserError("the prompt is empty; give the text to continue, at least one token.")
    check_value("max_new_tokens", max_new_tokens, NonNegativeInt)

    def tokens() -> Iterator[Tensor]:
        stopped = torch.zeros(reader.batch, dtype=torch.bool)
        drawn = following(reader, sampling, generator)
        if prompts is not None:
            drawn = following_prompts(reader, sampling, generator, prompts)
        for token in islice(drawn, max_new_tokens):
            yield token
            if stop is not None:
                stopped |= token.cpu() == stop
                if stopped.all():
                    return

    return tokens()


def following(reader: Reader, sampling: Sampling, generator: torch.Generator) -> Iterator[Tensor]:
    """An endless sequence of the tokens int64 ``[B]`` that follow what ``reader`` has read; each is read
    before it is yielded."""
    while True:
        token = next_token(reader, sampling, generator)
        reader.read(token[None])
        yield token


def following_prompts(
    reader: Reader, sampling: Sampling, generator: torch.Generator, prompts: Prompts
) -> Iterator[Tensor]:
    """The tokens of [`following`][], int64 ``[B]``, for each stream from the end of its own prompt on;
    ``reader`` has read the part that all streams read together."""
    begin, ends = prompts.together, torch.tensor(prompts.ends, device=prompts.tokens.device)  # [B]
    newest: deque[Tensor] = deque(maxlen=len(prompts.tokens) - begin + 1)
    for i in range(begin, len(prompts.tokens)):
        token = torch.where(i < ends, prompts.tokens[i], next_token(reader, sampling, generator))
        reader.read(token[None], None if prompts.doc_starts is None else prompts.doc_starts[i : i + 1])
        newest.append(token)
    for token in following(reader, sampling, generator):
        newest.append(token)
        yield torch.stack(tuple(newest)).gather(0, (ends - begin)[None])[0]


def next_token(reader: Reader, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Each stream's next token, int64 ``[B]``; it is drawn but not yet read."""
    assert reader.logits is not None
    return sampling.draw(reader.logits.float(), generator)
