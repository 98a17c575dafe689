"""Generation: draw the next token of each stream, read it, and repeat."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.generation.decoding import Reader, reader
from memformers.generation.prompts import Prompts, side_by_side
from memformers.generation.sampling import Sampling, seeded
from memformers.models.language_model import MemoryLM


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
    if batch < 1 or (batch > 1 and width > 1):
        raise UserError(f"batch={batch} repeats a single prompt, but {width} prompts came; leave batch out.")
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
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens={max_new_tokens} is negative; use 0 or more.")

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
