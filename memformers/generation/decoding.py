"""Reading text and predicting its next token, whether the model has a memory or not."""

from torch import Tensor

from memformers.generation.incremental import Stepper
from memformers.models.documents import check_starts
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory


class Decoder:
    """A language model that reads B streams of text: it takes any number of tokens at a time, and returns
    logits. Keys and values are kept, as a [`Stepper`][memformers.generation.incremental.Stepper] keeps them;
    a model without memory reads its newest ``segment_len`` tokens again for each new one. The model must not
    be trained at the same time.

    Args:
        model: The model.
        batch: The number of streams, B.
        memory: Where to start from, as the forward pass returns it; None for an empty memory.

    Raises:
        ValueError: For a memory of another model or batch.

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
        self.model, self.batch, self.stepper = model, batch, Stepper(model, batch, memory)
        self.logits: Tensor | None = None
        """Of the next token, ``[B, vocab_size]``; None before the first was read."""

    def read(self, tokens: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """Read ``tokens [T, B]``, T ≥ 1, to the logits ``[B, vocab_size]`` of the token after the last.

        ``doc_starts``, boolean ``[T, B]``, is true where a stream's new document begins: its tokens see
        nothing of what came before. The segments end at the same places with and without starts. Raises
        ValueError for tokens of another shape, or outside the vocabulary, and for starts of another shape,
        dtype or device.
        """
        self.model.check_tokens(tokens, self.batch)
        check_starts(doc_starts, tokens)
        self.logits = self.stepper.read(tokens, doc_starts)[-1]
        return self.logits

    def memory(self) -> Memory:
        """The memory before the current segment, as the forward pass returns it."""
        return self.stepper.memory()
