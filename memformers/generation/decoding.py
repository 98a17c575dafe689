"""Reading text and predicting its next token, whether the model has a memory or not."""

from torch import Tensor

from memformers.generation.incremental import Stepper
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory


class Decoder:
    """A [`Stepper`][memformers.generation.incremental.Stepper], with its ``model``, ``batch``, ``memory`` and
    errors, that remembers the logits of the next token. Without memory, it reads the newest ``segment_len``
    tokens for each again.

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
        """Read ``tokens [T, B]``, T ≥ 1, with ``doc_starts [T, B]``, as the Stepper does, to the logits ``[B,
        vocab_size]`` of the token after the last."""
        self.logits = self.stepper.read(tokens, doc_starts)[-1]
        return self.logits

    def memory(self) -> Memory:
        """The memory before the current segment, as the forward pass returns it."""
        return self.stepper.memory()
