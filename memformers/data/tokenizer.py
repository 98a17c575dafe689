"""Text to token ids and back. Subwords are in [`memformers.data.tokenizers`][].

Characters, bytes and words are encoded here, not by Hugging Face's library, which has equal tokenizers
([`memformers.integrations.huggingface_tokenizer`][]): to prepare a text, those take 17, 8 and 3 times the CPU
time, and they read nothing that isn't UTF-8.
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_value
from memformers.data.files import Ids, bytes_of

if TYPE_CHECKING:  # processes that only tokenize do without PyTorch
    from torch import Tensor

# As in the original Transformer-XL.
EOS = "<eos>"
UNKNOWN = "<unk>"
FIRST_WORD = re.compile(r"[^\S\r\n]*(?:\r\n|\r|\n|\S+)")
# Different words that are counted at once, beside those of the vocabulary.
COUNTED = 1 << 20


class Tokenizer(ABC):
    name: str
    vocab_size: int
    vocabulary: str | list[str]
    is_lossless: bool = False
    """Whether every text comes back from its tokens, byte for byte; otherwise, some may."""

    @abstractmethod
    def ids(self, text: str) -> Ids:
        """The tokens of ``text``, ``[n]``; UserError where it has what the vocabulary doesn't have."""

    @abstractmethod
    def bytes_of(self, tokens: "Tensor | Ids") -> bytes:
        """The bytes of the text of ``tokens [n]``."""

    def first_text(self, text: str) -> str:
        """The start of ``text`` that its first token stands for."""
        return self.bytes_of(self.ids(text)[:1]).decode("utf-8", errors="replace")

    def to_json(self) -> Any:
        """What is saved as ``tokenizer.json``."""
        return {"tokenizer": self.name, "vocabulary": self.vocabulary}

    def ids_within(self, parts: Sequence[tuple[str, str, str]]) -> list[Ids]:
        """The tokens of the second of each three parts of a text, which follow each other."""
        return [self.ids(text) for _, text, _ in parts]

    def is_cut(self, left: str, right: str) -> bool:
        """Whether tokens beside the cut between two parts of a text don't depend on what is farther away."""
        return True

    def encode(self, text: str) -> "Tensor":
        """The tokens of ``text`` for a model, int64 ``[n]``; UserError as for ``ids``."""
        import torch

        return torch.from_numpy(self.ids(text).astype(np.int64))

    def decode(self, tokens: "Tensor | Ids") -> str:
        """The text of ``tokens [n]``."""
        return self.bytes_of(tokens).decode("utf-8", errors="replace")

    def decoder(self) -> Callable[[int], str]:
        """A function from each next token to the text that it completes."""
        import torch

        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token: decoder.decode(self.bytes_of(torch.tensor([token])))

    def terminate(self, text: str) -> str:
        """``text`` with the terminator that this tokenizer expects."""
        return text

    @property
    def line_break(self) -> str:
        """A line break, or something else of the vocabulary if it has none."""
        import torch

        for text in ("\n", "\r", " "):
            try:
                if len(self.ids(text)):
                    return text
            except UserError:
                continue
        return self.decode(torch.tensor([0]))


class CharacterTokenizer(Tokenizer):
    """One token for each different character of ``vocabulary``, in its order."""

    name = "character"
    is_lossless = True

    def __init__(self, vocabulary: str):
        if not vocabulary or len(set(vocabulary)) != len(vocabulary):
            raise UserError(f"expected a vocabulary of some characters, each once, got {vocabulary!r}.")
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary)
        codes = code_points(vocabulary)
        # By code point; the last one is of all that are higher.
        self._number = np.full(codes.max() + 2, -1)
        self._number[codes] = np.arange(self.vocab_size)

    def ids(self, text: str) -> Ids:
        numbers: Ids = self._number[np.minimum(code_points(text), len(self._number) - 1)]
        if (numbers < 0).any():
            unknown = Counter(c for c in text if c not in self.vocabulary).most_common(5)
            names = ", ".join(f"{c!r} at {text.index(c)} ({n}x)" for c, n in unknown)
            what_to_do = f"known are {self.vocabulary!r}. Leave them out, or train with byte tokens"
            raise UserError(f"characters outside the vocabulary of {self.vocab_size}: {names}; {what_to_do}.")
        return numbers

    def bytes_of(self, tokens: "Tensor | Ids") -> bytes:
        return "".join(self.vocabulary[i] for i in tokens.tolist()).encode()


class ByteTokenizer(Tokenizer):
    """One token for each of the 256 bytes of UTF-8.

    Examples:
        >>> from memformers import ByteTokenizer
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("naïve")
        tensor([110,  97, 195, 175, 118, 101])
        >>> tokenizer.decode(tokenizer.encode("naïve"))
        'naïve'
    """

    name = "byte"
    vocab_size = 256
    is_lossless = True

    def ids(self, text: str) -> Ids:
        return np.frombuffer(bytes_of(text), dtype=np.uint8)

    def bytes_of(self, tokens: "Tensor | Ids") -> bytes:
        return bytes(tokens.tolist())

    def to_json(self) -> Any:
        return {"tokenizer": "byte"}


class IdTokenizer(Tokenizer):
    """Token ids below ``vocab_size`` that are no text; in a prompt they are numbers between white space."""

    name = "ids"
    is_lossless = True

    def __init__(self, vocab_size: int):
        check_value("vocab_size", vocab_size, Count)
        self.vocab_size = vocab_size

    def ids(self, text: str) -> Ids:
        for word in text.split():
            if not (word.isdecimal() and int(word) < self.vocab_size):
                raise UserError(f"expected token ids from 0 to {self.vocab_size - 1}, got {word[:40]!r}.")
        return np.array([int(word) for word in text.split()], dtype=np.int64)

    def bytes_of(self, tokens: "Tensor | Ids") -> bytes:
        return "".join(f" {token}" for token in tokens.tolist()).encode()

    def to_json(self) -> Any:
        return {"tokenizer": "ids", "vocab_size": self.vocab_size}


class WordTokenizer(Tokenizer):
    """One token for each word of ``vocabulary``, between white space. Each line ends with ``<eos>``, and any
    other word is ``<unk>``, as in the original Transformer-XL (``utils/vocabulary.py``, for WikiText-103)."""

    name = "word"

    def __init__(self, vocabulary: Sequence[str]):
        self.vocabulary = list(vocabulary)
        self.vocab_size = len(vocabulary)
        self._number = {word: i for i, word in enumerate(vocabulary)}
        if len(self._number) != self.vocab_size or not {EOS, UNKNOWN} <= self._number.keys():
            raise UserError(f"expected a vocabulary of words, each once, with {EOS} and {UNKNOWN}.")

    def ids(self, text: str) -> Ids:
        words = words_and_ends(text)
        numbers = map(self._number.get, words, repeat(self._number[UNKNOWN]))
        return np.fromiter(numbers, dtype=np.int64, count=len(words))

    def bytes_of(self, tokens: "Tensor | Ids") -> bytes:
        return "".join(map(self.decoder(), tokens.tolist())).encode()

    def first_text(self, text: str) -> str:
        """The first word, with what is before it, or the first line break."""
        first = FIRST_WORD.match(text)
        return first[0] if first else text

    def decoder(self) -> Callable[[int], str]:
        """A word follows a space, except at the start of a line."""
        space = ""

        def piece(token: int) -> str:
            nonlocal space
            word = self.vocabulary[token]
            if word == EOS:
                space = ""
                return "\n"
            spaced = space + word
            space = " "
            return spaced

        return piece

    def terminate(self, text: str) -> str:
        return text if not text or text.endswith(("\n", "\r")) else text + "\n"


def code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")


def words_and_ends(text: str) -> list[str]:
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.replace("\n", f" {EOS} ").split()


def learn_words(pieces: Iterable[str], vocab_size: int | None) -> WordTokenizer:
    """The most frequent words of a text in ``pieces``, or all. Where more than ``COUNTED`` are different, the
    rarest are forgotten, and counted anew where they occur again."""
    max_counted = COUNTED + (vocab_size or 0)
    counts: Counter[str] = Counter()
    for piece in pieces:
        counts.update(words_and_ends(piece))
        if len(counts) > max_counted:
            if vocab_size is None:
                what_to_do = f"give vocab_size (all others become {UNKNOWN}), or use tokenizer='bpe'"
                problem = f"the training text has more than {max_counted:,} different words"
                raise UserError(f"{problem}; {what_to_do}.")
            counts = Counter(dict(counts.most_common(max_counted - COUNTED // 2)))
    words = [word for word, _ in counts.most_common() if word != EOS]
    if vocab_size is None:
        words += [] if UNKNOWN in words else [UNKNOWN]
        return WordTokenizer([EOS, *words])
    # The end of a line is one of them, and so is the unknown word, unless the text has it.
    words = words[: max(vocab_size - 1, 1)]
    if UNKNOWN not in words:
        words = [*words[: max(vocab_size - 2, 0)], UNKNOWN]
    return WordTokenizer([EOS, *words])
