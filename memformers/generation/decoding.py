"""Reading text and predicting its next token: with the memory of a model, or, for one that has none, within a
window."""

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_value
from memformers.generation.stepping import followed_by_starts, stepper_of
from memformers.models.boundaries import check_starts
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.stack import eval_mode


class Decoder:
    """A language model that reads B streams of text: it takes any number of tokens at a time, and returns
    logits. Keys and values are kept, as a [`Stepper`][memformers.generation.stepping.Stepper] keeps them.

    The model must not be trained at the same time.

    Args:
        model: The model.
        batch: The number of streams, B.
        memory: Where to start from, as the forward pass returns it; None for an empty memory.

    Raises:
        ValueError: For a model without memory ([`SlidingWindowDecoder`][] is for that), and for a memory of
            another model or batch.

    Examples:
        >>> import torch
        >>> from memformers import Decoder, MemoryLM, ModelConfig
        >>> decoder = Decoder(MemoryLM(ModelConfig(vocab_size=65)).eval(), batch=1)
        >>> decoder.read(torch.randint(65, (100, 1))).shape  # tokens [T, B] to logits [B, vocab_size]
        torch.Size([1, 65])
        >>> decoder.memory().mem_len
        64
    """

    def __init__(self, model: MemoryLM, batch: int, memory: Memory | None = None):
        if model.config.model == "transformer":
            raise UserError("model='transformer' keeps no memory; read with a SlidingWindowDecoder.")
        check_value("batch", batch, Count)
        self.model, self.batch = model, batch
        nothing = torch.empty(0, batch, dtype=torch.long, device=model.device)
        how = {"encode": model.embed, "decode": lambda output: model.predict(output[-1:])}
        self.stepper = stepper_of(model.transformer, model.config, nothing, memory, **how)

    @torch.no_grad()
    def read(self, tokens: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """Read tokens.

        Args:
            tokens: ``[T, B]``, T at least 1.
            doc_starts: Boolean ``[T, B]``, true where a stream's new document begins: its tokens see nothing
                of what came before. The segments end at the same places with and without starts.

        Returns:
            The logits ``[B, vocab_size]`` of the token after the last.

        Raises:
            ValueError: For tokens of another shape, or outside the vocabulary, and for starts of another
                shape, dtype or device.
        """
        self.model.check_tokens(tokens, self.batch)
        check_starts(doc_starts, tokens)
        with eval_mode(self.model):
            for result in self.stepper.portions(tokens, doc_starts):
                logits = result[0]
        return logits

    @property
    def logits(self) -> Tensor | None:
        """Of the next token, ``[B, vocab_size]``; None before the first was read."""
        return None if self.stepper.result is None else self.stepper.result[0]

    def memory(self) -> Memory:
        """The memory before the current segment, as the forward pass returns it."""
        return self.stepper.memory()


class SlidingWindowDecoder:
    """A model without memory that reads B streams: for each token it reads the newest S tokens again, since
    each of them would otherwise see farther back than in training."""

    def __init__(self, model: MemoryLM, batch: int):
        check_value("batch", batch, Count)
        self.model, self.batch = model, batch
        self.text = torch.empty(0, batch, dtype=torch.long, device=model.device)
        self.doc_starts: Tensor | None = None
        self.logits: Tensor | None = None
        """Of the next token, ``[B, vocab_size]``; None before the first was read."""

    @torch.no_grad()
    def read(self, tokens: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """What [`Decoder.read`][] does, ``tokens [T, B]`` with ``doc_starts [T, B]`` to the logits
        ``[B, vocab_size]`` of the token after the last; with the same errors."""
        self.model.check_tokens(tokens, self.batch)
        check_starts(doc_starts, tokens)
        newest = slice(-self.model.config.segment_len, None)
        begun = followed_by_starts(self.doc_starts, self.text, doc_starts, tokens)
        self.doc_starts = None if begun is None else begun[newest]
        self.text = torch.cat((self.text, tokens))[newest]
        with eval_mode(self.model):
            self.logits = self.model(self.text, doc_starts=self.doc_starts).logits[-1]
        return self.logits


Reader = Decoder | SlidingWindowDecoder


def reader(model: MemoryLM, batch: int, memory: Memory | None = None) -> Reader:
    """A reader of ``batch`` streams, from ``memory`` or with an empty memory."""
    check_value("batch", batch, Count)
    if model.config.model == "transformer":
        model.check_memory(memory or Memory(()), batch)
        return SlidingWindowDecoder(model, batch)
    return Decoder(model, batch, memory)
