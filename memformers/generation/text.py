"""Text that a trained model reads and continues, piece by piece."""

import codecs
from collections.abc import Callable, Iterator

import torch

from memformers.data.tokenizers import ByteTokenizer, Tokenizer
from memformers.generation.decoding import Reader, reader
from memformers.generation.sampling import Sampling, seeded
from memformers.generation.writing import write
from memformers.models.language_model import MemoryLM


class TextStream:
    """A model that reads a text and continues it.

    What it has read and generated stays in the model's memory, as far as the memory reaches.
    """

    def __init__(self, model: MemoryLM, tokenizer: Tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self.device = model.device
        self.reader: Reader = reader(model, batch=1)

    def read(self, text: str, progress: Callable[[int], object] = lambda tokens: None) -> None:
        """Read ``text``; ``progress`` is called from time to time with the number of further tokens that were
        read. Raises ValueError for characters outside the vocabulary, before anything is read."""
        tokens = self.tokenizer.encode(text).to(self.device)[:, None]  # [T, 1]
        if not len(tokens):
            return
        for part in tokens.split(16 * self.model.config.segment_len):
            self.reader.read(part)
            progress(len(part))

    def write(
        self, max_new_tokens: int, sampling: Sampling, generator: torch.Generator, stop: str = ""
    ) -> Iterator[str]:
        """Yield the text that follows, character by character, until ``max_new_tokens`` tokens are generated
        or the text ends with ``stop``. Raises ValueError if nothing was read yet."""
        decode, written = incremental_decoder(self.tokenizer), ""
        for token in write(self.reader, max_new_tokens, sampling, generator):
            piece = decode(int(token))
            yield piece
            written = (written + piece)[-len(stop) :] if stop else ""
            if stop and written == stop:
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
    """The text that the model generates after ``prompt``: ``max_new_tokens`` tokens, or fewer if it generates
    ``stop``.

    Raises ValueError for an empty prompt and for characters outside the vocabulary.
    """
    stream = TextStream(model, tokenizer)
    stream.read(prompt)
    return "".join(stream.write(max_new_tokens, sampling, seeded(seed, stream.device), stop))


def incremental_decoder(tokenizer: Tokenizer) -> Callable[[int], str]:
    """A function from each next token to the text that it completes; in a character of several bytes, only
    the last one gives text."""
    if not isinstance(tokenizer, ByteTokenizer):
        return lambda token: tokenizer.decode(torch.tensor([token]))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return lambda token: decoder.decode(bytes([token]))
