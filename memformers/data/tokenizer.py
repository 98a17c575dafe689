"""What every tokenizer does."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from memformers.data.texts import bytes_of

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

    def numbers_of(self, texts: "Sequence[str]") -> list[Numbers]:
        """The tokens of each of ``texts``, ``[n]``; UserError as in [`numbers`][]."""
        return list(map(self.numbers, texts))

    @abstractmethod
    def decode(self, tokens: "Tensor") -> str:
        """The text of tokens ``[n]``."""

    @abstractmethod
    def decoder(self) -> Callable[[int], str]:
        """A function from each next token to the text that it completes; in a character of several tokens,
        only the last one gives text."""

    @abstractmethod
    def saved(self) -> Any:
        """What ``tokenizer.json`` holds."""

    def encode(self, text: str) -> "Tensor":
        """The tokens of ``text``, int64 ``[n]``; UserError as in [`numbers`][]."""
        import torch

        return torch.from_numpy(self.numbers(text).astype(np.int64))

    def encode_all(self, texts: "Sequence[str]") -> "tuple[Tensor, tuple[int, ...]]":
        """The tokens of whole ``texts`` behind each other, int64 ``[n]``, and how many each of them has;
        UserError as in [`numbers`][]."""
        import torch

        parts = [self.encode(self.ended(text)) for text in texts]
        return torch.cat(parts), tuple(map(len, parts))

    def bytes_of(self, tokens: "Tensor") -> bytes:
        """The bytes that tokens ``[n]`` stand for."""
        return bytes_of(self.decode(tokens))

    def ended(self, text: str) -> str:
        """The end of a text as this tokenizer needs it."""
        return text

    @property
    def line_break(self) -> str:
        """The line break that the vocabulary has, or any other of its characters if it has none."""
        return "\n"
