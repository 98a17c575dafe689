"""Text that a trained model reads and continues, piece by piece."""

from collections.abc import Callable, Iterator

from torch import Generator

from memformers.data.tokenizer import Tokenizer
from memformers.generation.generate import write
from memformers.generation.incremental import Stepper
from memformers.generation.sampling import Sampling, seeded
from memformers.models.language_model import MemoryLM


class TextStream:
    """A model that reads a text and continues it; its memory keeps both."""

    def __init__(self, model: MemoryLM, tokenizer: Tokenizer):
        self.model, self.tokenizer, self.device = model, tokenizer, model.device
        self.reader = Stepper(model, batch=1)
        self.last: list[int] = []
        """The last token, on which depends how the next one is written: a word follows a space."""

    def read(self, text: str, progress: Callable[[int], object] = lambda tokens: None) -> None:
        """Read ``text``, and tell ``progress`` now and then how many more tokens were read. ValueError for
        characters outside the vocabulary, before anything is read."""
        tokens = self.tokenizer.encode(text).to(self.device)[:, None]  # [T, 1]
        if len(tokens):
            self.last = [int(tokens[-1])]
            for part in tokens.split(16 * self.model.config.segment_len):
                self.reader.read(part)
                progress(len(part))

    def write(
        self, max_new_tokens: int, sampling: Sampling, generator: Generator, stop: str = ""
    ) -> Iterator[str]:
        """Yield the text that follows by character, until ``max_new_tokens`` tokens are generated or it ends
        with ``stop``. Raises ValueError if nothing was read yet."""
        decode, written = self.tokenizer.decoder(), ""
        for last in self.last:
            decode(last)
        for token in write(self.reader, max_new_tokens, sampling, generator):
            self.last = [int(token)]
            for character in decode(*self.last):
                yield character
                if stop and (written := (written + character)[-len(stop) :]) == stop:
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
    return "".join(stream.write(max_new_tokens, sampling, seeded(seed, stream.device), stop))
