"""Reading text and predicting its next token, whether the model has a memory or not."""

import torch
from torch import Tensor

from memformers.common.fields import Count, check_value
from memformers.generation.incremental import Stepper, joined_starts
from memformers.models.boundaries import check_starts
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.stack import eval_mode


class SlidingWindow:
    """A model without memory that reads B streams: for each token it reads the newest S tokens again, since
    each of them would otherwise see farther back than in training."""

    def __init__(self, model: MemoryLM, batch: int):
        self.model, self.doc_starts = model, None
        self.running = torch.empty(0, batch, dtype=torch.int64, device=model.device)

    @torch.no_grad()
    def read(self, tokens: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """Tokens ``[T, B]`` with ``doc_starts [T, B]`` to the logits ``[1, B, vocab_size]`` after the last."""
        newest = slice(-self.model.config.segment_len, None)
        begun = joined_starts(self.doc_starts, self.running, doc_starts, tokens)
        self.doc_starts: Tensor | None = None if begun is None else begun[newest]
        self.running = torch.cat((self.running, tokens))[newest]
        with eval_mode(self.model):
            logits: Tensor = self.model(self.running, doc_starts=self.doc_starts).logits[-1:]
        return logits

    def memory(self) -> Memory:
        """An empty one."""
        return Memory(())


class Decoder:
    """A language model that reads B streams of text: it takes any number of tokens at a time, and returns
    logits. Keys and values are kept, as a [`Stepper`][memformers.generation.incremental.Stepper] keeps them;
    a model without memory reads its newest ``segment_len`` tokens again for each new one.

    The model must not be trained at the same time.

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
        check_value("batch", batch, Count)
        model.check_memory(memory or Memory(()), batch)
        self.model, self.batch = model, batch
        slides = model.config.model == "transformer"
        self.stepper = SlidingWindow(model, batch) if slides else Stepper(model, batch, memory)
        self.logits: Tensor | None = None
        """Of the next token, ``[B, vocab_size]``; None before the first was read."""

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
        self.logits = self.stepper.read(tokens, doc_starts)[-1]
        return self.logits

    def memory(self) -> Memory:
        """The memory before the current segment, as the forward pass returns it."""
        return self.stepper.memory()
