"""Text to token numbers and back; a token is a character or a byte."""

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import check_arguments
from memformers.common.files import read_json, write_json
from memformers.data.texts import bytes_of, check_utf8

TokenizerName = Literal["character", "frequency", "byte"]


class CharacterTokenizer:
    """One token for each different character of ``vocabulary``, in its order."""

    name: TokenizerName = "character"

    def __init__(self, vocabulary: str):
        if not vocabulary or len(set(vocabulary)) != len(vocabulary):
            raise UserError(f"expected a vocabulary of some characters, each once, got {vocabulary!r}.")
        self.vocabulary = vocabulary
        self._number = {character: i for i, character in enumerate(vocabulary)}

    @property
    def vocab_size(self) -> int:
        """How many different tokens there are."""
        return len(self.vocabulary)

    def encode(self, text: str) -> Tensor:
        """The tokens of ``text``, int64 ``[characters]``; ValueError names the characters that the
        vocabulary doesn't have, and where they stand."""
        numbers = [self._number.get(character, -1) for character in text]
        if -1 in numbers:
            unknown = Counter(c for c in text if c not in self._number).most_common(5)
            named = ", ".join(f"{c!r} at {text.index(c)} ({n}x)" for c, n in unknown)
            raise UserError(
                f"characters outside the vocabulary of {self.vocab_size}: {named}; known are "
                f"{self.vocabulary!r}. Leave them out, or train with byte tokens."
            )
        return torch.tensor(numbers, dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens ``[n]``."""
        return "".join(self.vocabulary[i] for i in tokens.tolist())


class ByteTokenizer:
    """One token for each of the 256 bytes; it can encode every text."""

    name: TokenizerName = "byte"
    vocab_size = 256

    def encode(self, text: str) -> Tensor:
        """The tokens of ``text``, int64 ``[bytes]``."""
        return torch.tensor(list(bytes_of(text)), dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens ``[n]``; bytes that are not UTF-8 become the replacement character."""
        return bytes(tokens.tolist()).decode("utf-8", errors="replace")


Tokenizer = CharacterTokenizer | ByteTokenizer


@check_arguments
def build_tokenizer(name: TokenizerName, text: str) -> Tokenizer:
    """The tokenizer called ``name`` for ``text``: its own characters, sorted (``"character"``) or the most
    frequent first (``"frequency"``), or any bytes."""
    if name == "byte":
        return ByteTokenizer()
    check_utf8(text, "the text")
    vocabulary = sorted(set(text))
    if name == "frequency":
        counts = Counter(text)
        vocabulary.sort(key=lambda character: -counts[character])
    return CharacterTokenizer("".join(vocabulary))


def check_order(name: TokenizerName, cutoffs: tuple[int, ...]) -> None:
    """Raise UserError for cutoffs between tokens that aren't numbered by how often they occur."""
    if cutoffs and name != "frequency":
        raise UserError(
            f"cutoffs={cutoffs} need tokens that are numbered by frequency, but tokenizer={name!r} numbers "
            f"them otherwise; use tokenizer='frequency', or leave the cutoffs out."
        )


def line_break(tokenizer: Tokenizer) -> str:
    """The line break that ``tokenizer`` knows, or any other of its characters if it knows none."""
    if isinstance(tokenizer, ByteTokenizer) or "\n" in tokenizer.vocabulary:
        return "\n"
    return "\r" if "\r" in tokenizer.vocabulary else tokenizer.vocabulary[0]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json``, which [`load_tokenizer`][] reads."""
    data: dict[str, Any] = {"tokenizer": tokenizer.name}
    if isinstance(tokenizer, CharacterTokenizer):
        data["vocabulary"] = tokenizer.vocabulary
    write_json(folder / "tokenizer.json", data)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in ``folder/tokenizer.json``; ValueError where it is missing or broken."""
    path = folder / "tokenizer.json"
    data = read_json(path)
    if data == {"tokenizer": "byte"}:
        return ByteTokenizer()
    if data.get("tokenizer") == "character" and isinstance(data.get("vocabulary"), str):
        return CharacterTokenizer(data["vocabulary"])
    raise UserError(f"expected {path} to name the tokenizer 'byte' or 'character', got {data}.")
