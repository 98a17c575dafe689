"""Text to token numbers and back: a token is a character, a byte, a word, or a subword
([`memformers.data.subwords`][])."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_value
from memformers.common.files import read_json, write_json
from memformers.data.subwords import SubwordTokenizer, learn_bpe
from memformers.data.tokenizer import Numbers, Tokenizer
from memformers.data.utf8 import bytes_of, check_utf8

if TYPE_CHECKING:  # processes that only tokenize do without PyTorch
    from torch import Tensor

OWN = ("character", "frequency", "byte", "word", "bpe")
"""The tokenizers that are made for a text."""
TOKENIZER = "tokenizer.json"
EOS, UNKNOWN = "<eos>", "<unk>"
COUNTED = 1 << 20
"""Different words that are counted at once, beside those of the vocabulary."""


class CharacterTokenizer(Tokenizer):
    """One token for each different character of ``vocabulary``, in its order."""

    name = "character"

    def __init__(self, vocabulary: str):
        if not vocabulary or len(set(vocabulary)) != len(vocabulary):
            raise UserError(f"expected a vocabulary of some characters, each once, got {vocabulary!r}.")
        self.vocabulary, self.vocab_size = vocabulary, len(vocabulary)
        codes = code_points(vocabulary)
        self._number = np.full(codes.max() + 2, -1)
        """By code point; the last one is of all that are higher."""
        self._number[codes] = np.arange(self.vocab_size)

    def numbers(self, text: str) -> Numbers:
        """The tokens of ``text``, int64 ``[characters]``; UserError names the characters that the vocabulary
        doesn't have, and where they stand."""
        numbers: Numbers = self._number[np.minimum(code_points(text), len(self._number) - 1)]
        if (numbers < 0).any():
            unknown = Counter(c for c in text if c not in self.vocabulary).most_common(5)
            named = ", ".join(f"{c!r} at {text.index(c)} ({n}x)" for c, n in unknown)
            raise UserError(
                f"characters outside the vocabulary of {self.vocab_size}: {named}; known are "
                f"{self.vocabulary!r}. Leave them out, or train with byte tokens."
            )
        return numbers

    def bytes_of(self, tokens: "Tensor") -> bytes:
        """The characters that tokens ``[n]`` are, in UTF-8."""
        return "".join(self.vocabulary[i] for i in tokens.tolist()).encode()

    def saved(self) -> Any:
        """The vocabulary."""
        return {"tokenizer": "character", "vocabulary": self.vocabulary}


class ByteTokenizer(Tokenizer):
    """One token for each of the 256 bytes; it can encode every text."""

    name, vocab_size = "byte", 256

    def numbers(self, text: str) -> Numbers:
        """The tokens of ``text``, uint8 ``[bytes]``."""
        return np.frombuffer(bytes_of(text), dtype=np.uint8)

    def bytes_of(self, tokens: "Tensor") -> bytes:
        """The bytes that tokens ``[n]`` are."""
        return bytes(tokens.tolist())

    def saved(self) -> Any:
        """The name."""
        return {"tokenizer": "byte"}


class IdTokenizer(Tokenizer):
    """Token ids below ``vocab_size`` that are no text; in a prompt they are numbers between white space."""

    name = "ids"

    def __init__(self, vocab_size: int):
        check_value("vocab_size", vocab_size, Count)
        self.vocab_size = vocab_size

    def numbers(self, text: str) -> Numbers:
        """The ids that ``text`` names, int64 ``[n]``; UserError for anything else."""
        for word in text.split():
            if not (word.isdecimal() and int(word) < self.vocab_size):
                raise UserError(f"expected token ids from 0 to {self.vocab_size - 1}, got {word[:40]!r}.")
        return np.array([int(word) for word in text.split()], dtype=np.int64)

    def bytes_of(self, tokens: "Tensor") -> bytes:
        """The ids ``[n]`` as numbers, each after a space."""
        return "".join(f" {token}" for token in tokens.tolist()).encode()

    def saved(self) -> Any:
        """How many ids there are."""
        return {"tokenizer": "ids", "vocab_size": self.vocab_size}


class WordTokenizer(Tokenizer):
    """One token for each word of ``vocabulary``, in its order; words are separated by white space. Each line
    ends with ``<eos>``, and any other word is ``<unk>``. These are the numbers of the original Transformer-XL
    (``utils/vocabulary.py``, as it reads WikiText-103)."""

    name = "word"

    def __init__(self, vocabulary: Sequence[str]):
        self.vocabulary, self.vocab_size = list(vocabulary), len(vocabulary)
        self._number = {word: i for i, word in enumerate(vocabulary)}
        if len(self._number) != self.vocab_size or not {EOS, UNKNOWN} <= self._number.keys():
            raise UserError(f"expected a vocabulary of words, each once, with {EOS} and {UNKNOWN}.")

    def numbers(self, text: str) -> Numbers:
        """The tokens of ``text``, int64 ``[words and ends of lines]``."""
        words = words_and_ends(text)
        numbers = map(self._number.get, words, repeat(self._number[UNKNOWN]))
        return np.fromiter(numbers, dtype=np.int64, count=len(words))

    def bytes_of(self, tokens: "Tensor") -> bytes:
        """The words of tokens ``[n]``, with a space between those of a line."""
        return "".join(map(self.decoder(), tokens.tolist())).encode()

    def decoder(self) -> Callable[[int], str]:
        """As in [`Tokenizer`][]; a word follows a space, except at the beginning of a line."""
        space = ""

        def piece(token: int) -> str:
            nonlocal space
            word, before = self.vocabulary[token], space
            space = "" if word == EOS else " "
            return "\n" if word == EOS else before + word

        return piece

    def saved(self) -> Any:
        """The vocabulary."""
        return {"tokenizer": "word", "vocabulary": self.vocabulary}

    def ended(self, text: str) -> str:
        """The end of a text, whose last line ends too."""
        return text if not text or text.endswith(("\n", "\r")) else text + "\n"


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """The number of each character in Unicode, ``[characters]``."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")


def words_and_ends(text: str) -> list[str]:
    """The words of ``text`` and, in place of the end of each line, ``<eos>``."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.replace("\n", f" {EOS} ").split()


def learn(name: str, vocab_size: int | None, pieces: Iterable[str]) -> Tokenizer:
    """The tokenizer called ``name`` (one of [`OWN`][]) for a text in ``pieces``, which are cut before white
    space: its own characters, sorted (``"character"``) or the most frequent first (``"frequency"``); any
    bytes; its words (``"word"``) or subwords (``"bpe"``), at most ``vocab_size``."""
    if name == "bpe":
        return learn_bpe(pieces, vocab_size)
    if name == "word":
        return learn_words(pieces, vocab_size)
    if name == "byte":
        return ByteTokenizer()
    counts = np.zeros(0x110000, dtype=np.int64)
    for piece in pieces:
        check_utf8(piece, "the text")
        counts += np.bincount(code_points(piece), minlength=len(counts))
    found = counts.nonzero()[0]
    if name == "frequency":
        found = found[np.argsort(-counts[found], kind="stable")]
    return CharacterTokenizer("".join(map(chr, found)))


def learn_words(pieces: Iterable[str], vocab_size: int | None) -> WordTokenizer:
    """The most frequent words of a text in ``pieces``, those as frequent in the order in which they first
    occurred; ``vocab_size`` tokens in all, or all words.

    Where more than [`COUNTED`][] are different, the rarest are forgotten, and counted anew where they occur
    again, so that memory is bounded. Raises UserError for as many where all words are asked for."""
    most = COUNTED + (vocab_size or 0)
    counts: Counter[str] = Counter()
    for piece in pieces:
        counts.update(words_and_ends(piece))
        if len(counts) > most:
            if vocab_size is None:
                raise UserError(
                    f"the training text has more than {most:,} different words; give vocab_size (all others "
                    f"become {UNKNOWN}), or use tokenizer='bpe'."
                )
            counts = Counter(dict(counts.most_common(most - COUNTED // 2)))
    words = [word for word, _ in counts.most_common() if word != EOS]
    if UNKNOWN not in (words := words[: None if vocab_size is None else max(vocab_size - 1, 1)]):
        words = [*words[: None if vocab_size is None else max(vocab_size - 2, 0)], UNKNOWN]
    return WordTokenizer([EOS, *words])


def build_tokenizer(name: str, text: str, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer called ``name`` for ``text``, as by [`learn`][], or the one in the file with this
    name."""
    check_name(name)
    return learn(name, vocab_size, [text]) if name in OWN else load_tokenizer(Path(name))


def check_name(name: str) -> None:
    """Raise UserError unless ``name`` is that of a tokenizer or of a ``.json`` file."""
    if name not in OWN and not name.endswith(".json"):
        raise UserError(
            f"expected tokenizer to be one of {', '.join(map(repr, OWN))}, or the path of a {TOKENIZER}, got "
            f"{name!r}."
        )


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json``, which [`load_tokenizer`][] reads."""
    write_json(folder / TOKENIZER, tokenizer.saved())


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file, or in the ``tokenizer.json`` of a folder; UserError where it is missing or
    broken."""
    path = path / TOKENIZER if path.is_dir() or path.suffix != ".json" else path
    data = read_json(path)
    name, vocabulary = data.get("tokenizer"), data.get("vocabulary")
    if "model" in data:
        return SubwordTokenizer(path.read_text(encoding="utf-8"), str(path))
    if name == "word" and isinstance(vocabulary, list) and all(isinstance(word, str) for word in vocabulary):
        return WordTokenizer(vocabulary)
    if name == "character" and isinstance(vocabulary, str):
        return CharacterTokenizer(vocabulary)
    if name == "ids" and "vocab_size" in data:
        return IdTokenizer(data["vocab_size"])
    if name == "byte":
        return ByteTokenizer()
    raise UserError(
        f"expected {path} to be a tokenizer of Hugging Face's, or to name the tokenizer 'byte', 'character' "
        f"or 'word', got {str(data)[:200]}."
    )
