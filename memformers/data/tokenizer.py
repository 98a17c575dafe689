"""What every tokenizer does."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from memformers.common.errors import UserError

if TYPE_CHECKING:  # processes that only tokenize do without PyTorch
    from torch import Tensor

Numbers = npt.NDArray[Any]
"""Tokens ``[n]``, of an integer type."""


class Tokenizer(ABC):
    """Text to token numbers and back."""

    name: str
    vocab_size: int

    @abstractmethod
    def numbers(self, text: str) -> Numbers:
        """The tokens of ``text``, ``[n]``; UserError where it has what the vocabulary doesn't have."""

    @abstractmethod
    def bytes_of(self, tokens: "Tensor") -> bytes:
        """The bytes that tokens ``[n]`` stand for."""

    @abstractmethod
    def saved(self) -> Any:
        """What ``tokenizer.json`` holds."""

    def numbers_of(self, texts: Sequence[str]) -> list[Numbers]:
        """The tokens of each of ``texts``, ``[n]``; UserError as in [`numbers`][]."""
        return list(map(self.numbers, texts))

    def encode(self, text: str) -> "Tensor":
        """The tokens of ``text``, int64 ``[n]``; UserError as in [`numbers`][]."""
        import torch

        return torch.from_numpy(self.numbers(text).astype(np.int64))

    def decode(self, tokens: "Tensor") -> str:
        """The text of tokens ``[n]``; bytes that are not UTF-8 become the replacement character."""
        return self.bytes_of(tokens).decode("utf-8", errors="replace")

    def decoder(self) -> Callable[[int], str]:
        """A function from each next token to the text that it completes; in a character of several tokens,
        only the last one gives text."""
        import torch

        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token: decoder.decode(self.bytes_of(torch.tensor([token])))

    def ended(self, text: str) -> str:
        """The end of a text as this tokenizer needs it."""
        return text

    @property
    def line_break(self) -> str:
        """The line break that the vocabulary has, or something else of it if it has none."""
        import torch

        for text in ("\n", "\r", " "):
            try:
                if len(self.numbers(text)):
                    return text
            except UserError:
                continue
        return self.decode(torch.tensor([0]))
