"""Generation: draw the next token of each stream, read it, and repeat.

Prompts of several lengths are read in one batch, each exactly as alone. So the padding on the left is a
multiple of the lengths at which segments start and slots are cut, and prompts end less than one such multiple
apart: there, some streams generate while others still read.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Generator, Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count, NonNegativeInt, Range, check_arguments, check_value
from memformers.data.tokenizer import Tokenizer
from memformers.generation.stepper import Stepper
from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM


@dataclass(frozen=True)
class Sampling(Checked):
    """How to draw a token; ValueError for values that can't be used."""

    temperature: Annotated[float, Range(0, below=math.inf)] = 1.0
    """Divides the logits: likely tokens come more often below 1, less often above; 0 takes the likeliest."""
    top_k: Count | None = None
    """Draw only from the k most likely tokens."""
    top_p: Annotated[float, Range(above=0, most=1)] | None = None
    """Draw only from the likeliest that together reach this probability (nucleus, arXiv 1904.09751)."""

    def draw(self, logits: Tensor, generator: Generator | None = None) -> Tensor:
        """One token for each row of ``logits [B, vocab]``: int64 ``[B]``."""
        highest = logits.amax(-1, keepdim=True)
        if not highest.isfinite().all():
            kind = "NaN" if highest.isnan().any() else "infinite"
            raise UserError(f"the model's logits are {kind}; check that its weights are finite.")
        if self.temperature == 0.0:
            return logits.argmax(-1)

        # Shifted to at most 0, so that a small temperature gives -inf and never inf − inf.
        limits = torch.finfo(logits.dtype)  # beyond them, a temperature would be 0 or infinite
        temperature = min(max(self.temperature, limits.tiny), limits.max)
        logits = (logits - highest) / temperature

        # The k likeliest; scatter keeps exactly k where several are equal.
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            likeliest = logits.topk(self.top_k)
            logits = torch.full_like(logits, -math.inf).scatter(-1, likeliest.indices, likeliest.values)

        # The nucleus: the smallest set of the likeliest that together reach top_p.
        if self.top_p is not None:
            descending, order = logits.sort(stable=True, dim=-1, descending=True)
            probs = descending.softmax(-1)
            is_outside = probs.cumsum(-1) - probs >= self.top_p  # more likely tokens reach top_p already
            is_outside[..., 0] = False  # also where top_p is too small for the dtype, and so 0
            logits = logits.masked_fill(is_outside.scatter(-1, order, is_outside), -math.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


@check_arguments
def make_generator(
    seed: Annotated[int, Range(-(2**63), below=2**64)] | None, device: torch.device
) -> Generator:
    """A generator of random numbers from ``seed``; without a seed, different numbers in each call. Raises
    UserError for a seed of more than 64 bits."""
    generator = Generator(device)
    return generator.manual_seed(generator.seed() if seed is None else seed)


class Prompts(NamedTuple):
    """B prompts as ``tokens [T, B]``, with zeros around each; where one starts after padding, as boolean
    ``doc_starts [T, B]``, None if none does; and the index at which each ends."""

    tokens: Tensor
    doc_starts: Tensor | None
    ends: tuple[int, ...]


def batch_prompts(prompts: Sequence[Tensor], config: ModelConfig) -> Prompts:
    """Prompts ``[P_i]``, int64 or int32 with P_i ≥ 1, for a model of this ``config``. Raises UserError for no
    prompts, and for one that is not such a tensor."""
    if not prompts:
        raise UserError("there are no prompts; give at least one, as a tensor of its tokens.")
    for i, prompt in enumerate(prompts):
        label = f"prompt {i} of {len(prompts)} (counted from 0)"
        is_row = isinstance(prompt, Tensor) and prompt.dim() == 1 and len(prompt) > 0
        if not is_row or prompt.dtype not in (torch.int64, torch.int32):
            kind = f"a {type(prompt).__name__}"
            got = f"{prompt.dtype} {list(prompt.shape)}" if isinstance(prompt, Tensor) else kind
            raise UserError(f"expected {label} as int64 or int32 [tokens ≥ 1], got {got}; convert it.")

    # Padding on the left in multiples of the lengths at which segments start and slots are cut.
    step = math.lcm(config.segment_len, *(size.group for size in config.memory_sizes))
    longest = max(map(len, prompts))
    begins = [(longest - len(prompt)) // step * step for prompt in prompts]
    ends = []
    tokens = prompts[0].new_zeros(longest, len(prompts), dtype=torch.int64)  # [T, B]
    doc_starts = tokens.bool()
    for stream, (prompt, begin) in enumerate(zip(prompts, begins, strict=True)):
        end = begin + len(prompt)
        tokens[begin:end, stream] = prompt
        doc_starts[begin, stream] = begin > 0
        ends.append(end)
    return Prompts(tokens, doc_starts if any(begins) else None, tuple(ends))


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
    """Continue a prompt token by token, with a [`Stepper`][memformers.generation.stepper.Stepper].

    Args:
        model: The model.
        prompt: ``[P, B]``; or prompts ``[P_i]`` of different lengths, each continued exactly as alone.
        max_new_tokens: The largest number of new tokens of each stream.
        temperature: As in [`Sampling`][memformers.generation.generate.Sampling].
        top_k: Likewise.
        top_p: Likewise.
        seed: The same seed gives the same text; None for a different text each time.
        stop: The token at which a stream ends; generation ends when all have reached it.
        batch: How many times a single prompt is continued.

    Yields:
        int64 ``[B]``, the next token of each stream, as it comes.

    Raises:
        ValueError: For arguments out of their range, bad prompts, and ``batch`` with more than one prompt.

    Examples:
        >>> import torch
        >>> from memformers import MemoryLM, ModelConfig, generate
        >>> model = MemoryLM(ModelConfig(vocab_size=65))
        >>> prompt = torch.randint(65, (10, 2))  # [P, B]
        >>> torch.stack(list(generate(model, prompt, 5, top_k=3, seed=0))).shape
        torch.Size([5, 2])
    """
    sampling = Sampling(temperature, top_k, top_p)
    if isinstance(prompt, Tensor):
        model.check_tokens(prompt)
        prompt = prompt.unbind(1)
    if batch > 1 and len(prompt) > 1:
        raise UserError(f"batch={batch} repeats a single prompt, got {len(prompt)} prompts; leave batch out.")
    prompts = batch_prompts(list(prompt) * batch, model.config)
    model.check_tokens(prompts.tokens)

    # As far as the shortest prompt, all streams are read together.
    decoder = Stepper(model, len(prompts.ends))
    starts = prompts.doc_starts
    together = min(prompts.ends)
    decoder.read(prompts.tokens[:together], None if starts is None else starts[:together])
    return sample(decoder, max_new_tokens, sampling, make_generator(seed, model.device), stop, prompts)


def sample(
    decoder: Stepper,
    max_new_tokens: int,
    sampling: Sampling,
    generator: Generator,
    stop: int | None = None,
    prompts: Prompts | None = None,
) -> Iterator[Tensor]:
    """Draw, read and yield ``max_new_tokens`` tokens ``[B]``, or fewer once all streams have drawn ``stop``.
    Of ``prompts``, ``decoder`` has read what all streams read together; the rest is read here, and each text
    starts after its own prompt. ValueError if nothing was read, and for a negative ``max_new_tokens``."""
    if decoder.last is None:
        raise UserError("the prompt is empty; give the text to continue, at least one token.")
    check_value("max_new_tokens", max_new_tokens, NonNegativeInt)
    ends = torch.tensor(prompts.ends if prompts else [0] * len(decoder.last), device=decoder.last.device)
    together = int(ends.min())
    longest = int(ends.max())
    has_stopped = torch.zeros_like(ends, dtype=torch.bool)  # [B]
    # A stream with a shorter prompt is ahead; its tokens wait until the longest prompt is read.
    newest = deque[Tensor](maxlen=longest - together + 1)
    for position in range(together, longest + max_new_tokens):
        # Where a prompt goes on, its own token replaces the drawn one.
        token = sampling.draw(decoder.last.float(), generator)  # [B]
        starts = None
        if prompts and position < longest:
            token = torch.where(position < ends, prompts.tokens[position], token)
            starts = None if prompts.doc_starts is None else prompts.doc_starts[position]
        decoder.step(token, starts)
        newest.append(token)

        # After the longest prompt, all streams have a next token.
        if position >= longest:
            next_token = torch.stack(tuple(newest)).gather(0, ends[None] - together)[0]  # [B]
            yield next_token
            if stop is not None:
                has_stopped = has_stopped | (next_token == stop)
                if has_stopped.all():
                    return


class TextStream:
    """A model that reads a text and continues it; its memory keeps both."""

    def __init__(self, model: MemoryLM, tokenizer: Tokenizer):
        self.model = model
        self.tokenizer = tokenizer
        self.device = model.device
        self.reader = Stepper(model, batch=1)
        self.last: list[int] = []
        """The last token. The text of the next one depends on it: a word follows a space."""

    def read(self, text: str, progress: Callable[[int], object] = lambda tokens: None) -> None:
        """Read ``text``, and tell ``progress`` now and then how many more tokens were read. ValueError for
        characters outside the vocabulary, before anything is read."""
        tokens = self.tokenizer.encode(text).to(self.device)[:, None]  # [T, 1]
        if len(tokens):
            self.last = [int(tokens[-1])]
            # Parts are long enough for speed, and short enough for a bar that moves.
            for part in tokens.split(16 * self.model.config.segment_len):
                self.reader.read(part)
                progress(len(part))

    def write(
        self, max_new_tokens: int, sampling: Sampling, generator: Generator, stop: str = ""
    ) -> Iterator[str]:
        """Yield the text that follows by character, until ``max_new_tokens`` tokens are generated or it ends
        with ``stop``. Raises ValueError if nothing was read yet."""
        decode = self.tokenizer.decoder()
        for last in self.last:
            decode(last)
        written = ""  # the newest characters, at most len(stop)
        for token in sample(self.reader, max_new_tokens, sampling, generator):
            self.last = [int(token)]
            for character in decode(*self.last):
                yield character
                if stop:
                    written = (written + character)[-len(stop) :]
                    if written == stop:
                        return


def continue_text(
    model: MemoryLM,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    seed: int | None = None,
    stop: str = "",
) -> str:
    """The ``max_new_tokens`` tokens that the model generates after ``prompt``, or fewer if it generates
    ``stop``. Raises ValueError for an empty prompt and for characters outside the vocabulary."""
    stream = TextStream(model, tokenizer)
    stream.read(prompt)
    return "".join(stream.write(max_new_tokens, sampling, make_generator(seed, stream.device), stop))
