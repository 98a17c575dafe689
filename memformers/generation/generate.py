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

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Count, NonNegativeInt, check_value
from memformers.generation.decoding import Decoder
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


def side_by_side(prompts: Sequence[Tensor], config: ModelConfig) -> Prompts:
    """Prompts ``[P_i]``, int64 or int32 with P_i ≥ 1, for a model of this ``config``. Raises UserError for an
    empty sequence, and for a prompt that is not such a tensor, with its number."""
    if not prompts:
        raise UserError("there are no prompts; give at least one, as a tensor of its tokens.")
    for i, prompt in enumerate(prompts):
        which, kind = f"prompt {i} of {len(prompts)} (counted from 0)", type(prompt).__name__
        if not isinstance(prompt, Tensor):
            raise UserError(f"{which} is a {kind}; give a tensor of its tokens.")
        if prompt.shape == (0,):
            raise UserError(f"{which} has no tokens; give it at least one, such as a line break.")
        if prompt.dim() != 1 or prompt.dtype not in (torch.int64, torch.int32):
            raise UserError(
                f"expected {which} as int64 or int32 integers [tokens], got {prompt.dtype} "
                f"{list(prompt.shape)}; give one dimension, or all prompts as one tensor."
            )
    step = math.lcm(config.segment_len, *(own.compression_rate for own in config.memory_sizes))
    longest = max(map(len, prompts))
    begins = [(longest - len(prompt)) // step * step for prompt in prompts]
    ends = tuple(begin + len(prompt) for begin, prompt in zip(begins, prompts, strict=True))
    tokens = prompts[0].new_zeros(max(ends), len(prompts), dtype=torch.int64)
    doc_starts = torch.zeros_like(tokens, dtype=torch.bool)
    for stream, (prompt, begin, end) in enumerate(zip(prompts, begins, ends, strict=True)):
        tokens[begin:end, stream] = prompt
        doc_starts[begin, stream] = begin > 0
    return Prompts(tokens, doc_starts if any(begins) else None, ends)


def generate(
    model: MemoryLM,
    prompt: Tensor | Sequence[Tensor],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: int | None = None,
    batch: int = 1,
) -> Iterator[Tensor]:
    """Continue a prompt, token by token.

    The prompt is read as in training, by segments, each remembered when it is full, with keys and values kept
    ([`memformers.generation.decoding.Decoder`][]). A model without memory reads the newest ``segment_len``
    tokens again for each new one.

    Args:
        model: The model.
        prompt: ``[P, B]``; or prompts of different lengths, a sequence of tensors ``[P_i]``, each of which is
            read and continued exactly as it would be alone.
        max_new_tokens: The largest number of new tokens of each stream.
        temperature: What logits are divided by; 0 is greedy.
        top_k: Only this number of the most likely tokens can be drawn; None for all.
        top_p: Only the most likely tokens with this probability together can be drawn; None for all.
        seed: The same seed gives the same text; None for another each time.
        stop: The token at which a stream ends; it all ends when every stream has come to it.
        batch: How many times a single prompt ``[P, 1]`` is continued.

    Yields:
        int64 ``[B]``, the next token of each stream, as it comes.

    Raises:
        ValueError: As [`memformers.generation.sampling.Sampling`][] does, for a prompt without tokens, a
            negative ``max_new_tokens``, and a ``batch`` of several prompts.
    """
    sampling = Sampling(temperature, top_k, top_p)
    if isinstance(prompt, Tensor):
        model.check_tokens(prompt)
        prompts = Prompts(prompt, None, (len(prompt),) * prompt.shape[1])
    else:
        prompts = side_by_side(prompt, model.config)
        model.check_tokens(prompts.tokens)
    width, together = len(prompts.ends), min(prompts.ends)
    check_value("batch", batch, Count)
    if batch > 1 and width > 1:
        raise UserError(f"batch={batch} repeats a single prompt, got {width} prompts; leave batch out.")
    decoder = Decoder(model, max(batch, width))
    tokens, doc_starts = prompts.tokens.expand(-1, decoder.batch), prompts.doc_starts
    decoder.read(tokens[:together], None if doc_starts is None else doc_starts[:together])
    return write(decoder, max_new_tokens, sampling, seeded(seed, tokens.device), stop, prompts)


def write(
    decoder: Decoder,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    stop: int | None = None,
    prompts: Prompts | None = None,
) -> Iterator[Tensor]:
    """Continue what ``decoder`` has read: draw the next token ``[B]``, read it and yield it, until
    ``max_new_tokens`` tokens are generated or every stream has generated ``stop``. Of ``prompts``, it has
    read what all streams read together; the rest is read here, and each text begins after its own prompt.

    Raises ValueError, when called, if nothing was read yet, and for a negative ``max_new_tokens``.
    """
    if decoder.logits is None:
        raise UserError("the prompt is empty; give the text to continue, at least one token.")
    check_value("max_new_tokens", max_new_tokens, NonNegativeInt)
    together = 0 if prompts is None else min(prompts.ends)
    more = 0 if prompts is None else len(prompts.tokens) - together

    def tokens() -> Iterator[Tensor]:
        stopped = torch.zeros(decoder.batch, dtype=torch.bool)
        newest: deque[Tensor] = deque(maxlen=more + 1)
        for i in range(more + max_new_tokens):
            assert decoder.logits is not None
            token, starts = sampling.draw(decoder.logits.float(), generator), None
            if prompts is not None and more:
                ends = torch.tensor(prompts.ends, device=token.device) - together  # [B]
                if i < more:
                    token = torch.where(i < ends, prompts.tokens[together + i], token)
                    starts = None if prompts.doc_starts is None else prompts.doc_starts[together + i, None]
            decoder.read(token[None], starts)
            newest.append(token)
            if i < more:
                continue
            text = token if not more else torch.stack(tuple(newest)).gather(0, ends[None])[0]
            yield text
            if stop is not None:
                stopped |= text.cpu() == stop
                if stopped.all():
                    return

    return tokens()
