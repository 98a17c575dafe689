"""Generation: draw the next token of each stream, read it, and repeat.

Prompts of several lengths are read in one batch, each exactly as alone. So the padding on the left is a
multiple of the lengths at which segments begin and slots are cut, and prompts end less than one such multiple
apart: there, some streams generate while others still read.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Count, NonNegativeInt, check_arguments, check_value
from memformers.generation.incremental import Stepper
from memformers.generation.sampling import Sampling, seeded
from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM


class Prompts(NamedTuple):
    """B prompts as ``tokens [T, B]``, with zeros around each; where one begins after padding, as boolean
    ``doc_starts [T, B]``, None if none does; and how many tokens lie before the end of each."""

    tokens: Tensor
    doc_starts: Tensor | None
    ends: tuple[int, ...]


def side_by_side(prompts: Sequence[Tensor], config: ModelConfig) -> Prompts:
    """Prompts ``[P_i]``, int64 or int32 with P_i ≥ 1, for a model of this ``config``. Raises UserError for no
    prompts, and for one that is not such a tensor."""
    if not prompts:
        raise UserError("there are no prompts; give at least one, as a tensor of its tokens.")
    for i, prompt in enumerate(prompts):
        which = f"prompt {i} of {len(prompts)} (counted from 0)"
        is_row = isinstance(prompt, Tensor) and prompt.dim() == 1 and len(prompt) > 0
        if not is_row or prompt.dtype not in (torch.int64, torch.int32):
            kind = f"a {type(prompt).__name__}"
            came = f"{prompt.dtype} {list(prompt.shape)}" if isinstance(prompt, Tensor) else kind
            raise UserError(f"expected {which} as int64 or int32 [tokens ≥ 1], got {came}; convert it.")
    step = math.lcm(config.segment_len, *(own.compression_rate for own in config.memory_sizes))
    longest = max(map(len, prompts))
    begins = [(longest - len(prompt)) // step * step for prompt in prompts]
    ends = tuple(begin + len(prompt) for begin, prompt in zip(begins, prompts, strict=True))
    tokens = prompts[0].new_zeros(longest, len(prompts), dtype=torch.int64)
    doc_starts = tokens.bool()
    for stream, (prompt, begin, end) in enumerate(zip(prompts, begins, ends, strict=True)):
        tokens[begin:end, stream] = prompt
        doc_starts[begin, stream] = begin > 0
    return Prompts(tokens, doc_starts if any(begins) else None, ends)


@check_arguments
def generate(
    model: MemoryLM,
    prompt: Tensor | Sequence[Tensor],
    max_new_tokens: NonNegativeInt,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: int | None = None,
    batch: Count = 1,
) -> Iterator[Tensor]:
    """Continue a prompt token by token, with a [`Stepper`][memformers.generation.incremental.Stepper].

    Args:
        model: The model.
        prompt: ``[P, B]``; or prompts ``[P_i]`` of different lengths, each continued exactly as alone.
        max_new_tokens: The largest number of new tokens of each stream.
        temperature: As in [`Sampling`][memformers.generation.sampling.Sampling].
        top_k: Likewise.
        top_p: Likewise.
        seed: The same seed gives the same text; None for another each time.
        stop: The token at which a stream ends; it all ends when every stream has come to it.
        batch: How many times a single prompt is continued.

    Yields:
        int64 ``[B]``, the next token of each stream, as it comes.

    Raises:
        ValueError: For arguments out of their range, bad prompts, and a ``batch`` of several.

    Examples:
        >>> import torch
        >>> from memformers import MemoryLM, ModelConfig, generate
        >>> model, prompt = MemoryLM(ModelConfig(vocab_size=65)), torch.randint(65, (10, 2))  # [P, B]
        >>> torch.stack(list(generate(model, prompt, 5, top_k=3, seed=0))).shape
        torch.Size([5, 2])
    """
    sampling = Sampling(temperature, top_k, top_p)
    if isinstance(prompt, Tensor):
        model.check_tokens(prompt)
        prompt = prompt.unbind(1)
    if batch > 1 and len(prompt) > 1:
        raise UserError(f"batch={batch} repeats a single prompt, got {len(prompt)} prompts; leave batch out.")
    prompts = side_by_side(list(prompt) * batch, model.config)
    model.check_tokens(prompts.tokens)
    decoder, together, starts = Stepper(model, len(prompts.ends)), min(prompts.ends), prompts.doc_starts
    decoder.read(prompts.tokens[:together], None if starts is None else starts[:together])
    return write(decoder, max_new_tokens, sampling, seeded(seed, model.device), stop, prompts)


def write(
    decoder: Stepper,
    max_new_tokens: int,
    sampling: Sampling,
    generator: Generator,
    stop: int | None = None,
    prompts: Prompts | None = None,
) -> Iterator[Tensor]:
    """Draw, read and yield ``max_new_tokens`` tokens ``[B]``, or fewer once all streams came to ``stop``. Of
    ``prompts``, ``decoder`` has read what all streams read together; the rest is read here, and each text
    begins after its own prompt. ValueError if nothing was read, and for a negative ``max_new_tokens``."""
    if decoder.last is None:
        raise UserError("the prompt is empty; give the text to continue, at least one token.")
    check_value("max_new_tokens", max_new_tokens, NonNegativeInt)
    ends = torch.tensor(prompts.ends if prompts else [0] * len(decoder.last), device=decoder.last.device)
    together, longest = int(ends.min()), int(ends.max())
    stopped, newest = ends < 0, deque[Tensor](maxlen=longest - together + 1)  # none yet
    for i in range(together, longest + max_new_tokens):
        token, starts = sampling.draw(decoder.last.float(), generator), None
        if prompts and i < longest:
            token = torch.where(i < ends, prompts.tokens[i], token)
            starts = None if prompts.doc_starts is None else prompts.doc_starts[i]
        decoder.step(token, starts)
        newest.append(token)
        if i >= longest:
            text = torch.stack(tuple(newest)).gather(0, ends[None] - together)[0]
            yield text
            if stop is not None and (stopped := stopped | (text == stop)).all():
                return
