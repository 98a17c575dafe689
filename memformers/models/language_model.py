"""A whole language model around a memory transformer: tokens and memory in, logits and memory out."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple

from memformers.common.errors import UserError
from memformers.kernels.operators import is_transformed
from memformers.models.boundaries import check_streams
from memformers.models.building import (
    build_embedding,
    build_head,
    build_transformer,
    initialise_vocabulary,
    initialise_weights,
)
from memformers.models.config import ModelConfig
from memformers.models.core import read_features
from memformers.models.kinds import named
from memformers.models.linear import linear
from memformers.models.memory import Memory, check_lengths, check_memory
from memformers.models.stack import MemoryStack
from memformers.models.vocabulary import (
    AdaptiveEmbedding,
    AdaptiveSoftmax,
    TokenLosses,
    adaptive_losses,
    token_losses,
)


class LMOutput(NamedTuple):
    """What [`MemoryLM`][] returns for a segment.

    Examples:
        >>> import torch
        >>> from memformers import MemoryLM, ModelConfig
        >>> output = MemoryLM(ModelConfig(vocab_size=65))(torch.randint(65, (64, 2)))  # tokens [S, B]
        >>> output.logits.shape, output.memory.mem_len, output.auxiliary_loss.item()
        (torch.Size([64, 2, 65]), 64, 0.0)
    """

    logits: Tensor
    """``[S, B, vocab_size]``, for each next token; with an adaptive softmax they are log-probabilities, which
    are logits as well."""
    memory: Memory
    """To pass in with the streams' next segment."""
    auxiliary_loss: Tensor
    """What the compression functions learn from, a scalar to add to the loss; exactly 0 if nothing was
    compressed in this segment."""


# So that torch.export.save can write a program that returns it.
_register_namedtuple(LMOutput, serialized_type_name="memformers.LMOutput")


class LMScores(NamedTuple):
    """What [`MemoryLM`][] returns for a segment whose next tokens are given."""

    scores: TokenLosses
    """Loss, and each token's."""
    memory: Memory
    """As in [`LMOutput`][]."""
    auxiliary_loss: Tensor
    """As in [`LMOutput`][]."""


class MemoryLM(nn.Module):
    """Embedding, a memory transformer, and a head: tokens and memory in, logits and memory out.

    The language-model loss trains everything but the compression functions, and with ``bptt`` those too; the
    auxiliary loss trains those alone. Memory is a value: the module stores nothing of the text.

    Args:
        config: What the model is built from.

    Raises:
        ValueError: For cutoffs of an adaptive embedding beyond the vocabulary.

    Examples:
        >>> import torch
        >>> from memformers import MemoryLM, ModelConfig
        >>> model, memory = MemoryLM(ModelConfig(model="compressive", vocab_size=65)), None
        >>> for segment in torch.randint(65, (256, 2)).split(64):  # [S, B] each
        ...     logits, memory, auxiliary_loss = model(segment, memory)
        >>> logits.shape, memory.mem_len, memory.c_mem_len
        (torch.Size([64, 2, 65]), 64, 48)
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = build_embedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.transformer = build_transformer(config)
        self.head = build_head(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw fresh weights, with a head that first gives nearly equal probabilities.

        The compression functions draw last: from the same seed, all three models start with the
        same weights in everything they share.
        """
        initialise_vocabulary(self.embed, self.head)
        initialise_weights(self.transformer)

    def forward(
        self,
        tokens: Tensor,
        memory: Memory | None = None,
        targets: Tensor | None = None,
        doc_starts: Tensor | None = None,
        *,
        through_memory: bool = False,
    ) -> LMOutput | LMScores:
        """Read a segment.

        Args:
            tokens: Integers ``[S, B]``, S at least 1.
            memory: What the last segment returned; None for nothing.
            targets: ``[S, B]``, each token's next one, or −100 if there is none. With them, losses are
                returned in place of logits; an adaptive softmax then computes only what the targets need.
            doc_starts: Boolean ``[S, B]``, true where a stream's new document begins: its tokens see nothing
                of what came before, neither in the segment nor in memory.
            through_memory: Whether the positions that this segment adds to the memory keep their gradient, so
                that a later segment's loss reaches this segment, and earlier ones if ``memory`` carries a
                gradient. Compressed slots never carry one. [`Memory.detach`][] removes it.

        Returns:
            Logits, the next memory and the auxiliary loss; with ``targets``, scores in place of logits.

        Raises:
            ValueError: For tokens that aren't integers ``[S, B]``, for a memory of another model, batch,
                dtype or device, for a segment longer than learned positions, and for targets or starts of
                another shape or dtype.
        """
        self.check_tokens(tokens)
        said = "targets, the next token of each,"
        check_streams(said, targets, torch.int64, tokens.shape, tokens.device)
        if memory is not None and not isinstance(memory, Memory):
            raise UserError(f"expected memory to be a Memory or None, got a {type(memory).__name__}.")
        memory = memory or Memory(())
        hidden, inputs = self.transform(tokens, memory, doc_starts, through_memory)
        memory, auxiliary_loss = self.transformer.after_segment(
            memory, inputs, self.config, hidden, doc_starts, through_memory
        )
        if targets is not None:
            return LMScores(self.score(hidden, targets), memory, auxiliary_loss)
        return LMOutput(self.predict(hidden), memory, auxiliary_loss)

    def transform(
        self, tokens: Tensor, memory: Memory, doc_starts: Tensor | None = None, through_memory: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """``tokens [S, B]``, with ``doc_starts [S, B]``, to the transformer's output ``[S, B, D]`` and each
        layer's input ``[S, B, D]``, which is detached without ``through_memory``. Raises ValueError for a
        ``memory`` that doesn't fit."""
        x = self.dropout(self.embed(tokens))  # [S, B, D]
        return read_features(self.transformer, self.config, x, memory, doc_starts, through_memory)

    def predict(self, hidden: Tensor) -> Tensor:
        """The transformer's output ``[·, D]`` to the logits ``[·, vocab_size]`` of the next token."""
        if isinstance(self.head, AdaptiveSoftmax):
            return self.head(hidden, self.embed)
        return linear(self.head, hidden)

    def score(self, hidden: Tensor, targets: Tensor) -> TokenLosses:
        """How well the transformer's output ``[S, B, D]`` predicts ``targets [S, B]``."""
        # The number of targets in a cluster depends on values, which graphs and transformations don't have.
        has_values = not torch.compiler.is_compiling() and not is_transformed(hidden, targets)
        if isinstance(self.head, AdaptiveSoftmax) and has_values:
            assert isinstance(self.embed, AdaptiveEmbedding)
            return adaptive_losses(self.head, self.embed, hidden, targets)
        return token_losses(self.predict(hidden), targets)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.transformer.memory_layers[0].norm_ff.weight.device

    def check_tokens(self, tokens: Tensor, batch: int | None = None) -> None:
        """Raise ValueError unless ``tokens`` is text of this vocabulary, ``[S, B]``, of ``batch`` streams."""
        check_tokens(tokens, self.config.vocab_size)
        if tokens.device != self.device:
            raise UserError(f"tokens are on {tokens.device}, but the model is on {self.device}; move them.")
        if batch is not None and tokens.shape[1] != batch:
            raise UserError(f"expected tokens of {batch} streams, got {list(tokens.shape)}.")

    def check_memory(self, memory: Memory, batch: int) -> None:
        """Raise ValueError unless ``memory`` is one that this model can have made of ``batch`` streams."""
        one = self.transformer.memory_layers[0].norm_ff.weight.expand(1, batch, -1)
        check_memory(memory, one, self.config.n_layers)
        check_lengths(memory, self.config, complete=True)

    # The rooms above build on this one, so the methods below import them when they are called.

    def generate(
        self,
        prompt: Tensor | Sequence[Tensor],
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: int | None = None,
        batch: int = 1,
    ) -> Iterator[Tensor]:
        """Continue a prompt, token by token.

        The prompt is read as in training, by segments, each remembered when it is full, with keys and values
        kept ([`memformers.generation.decoding.Decoder`][]). A model without memory reads the newest
        ``segment_len`` tokens again for each new one.

        Args:
            prompt: ``[P, B]``; or prompts of different lengths, a sequence of tensors ``[P_i]``, each of
                which is read and continued exactly as it would be alone
                ([`memformers.generation.generate`][]).
            max_new_tokens: The largest number of new tokens of each stream.
            temperature: What logits are divided by; 0 is greedy.
            top_k: Only this number of the most likely tokens can be drawn; None for all.
            top_p: Only the most likely tokens with this probability together can be drawn; None for all.
            seed: The same seed gives the same text; None for another each time.
            stop: The token at which a stream ends; it all ends when every stream has come to it.
            batch: How many times a single prompt ``[P, 1]`` is continued.

        Yields:
            int64 ``[B]``, the next token of each stream, as it comes.

        Raises:
            ValueError: As [`memformers.generation.sampling.Sampling`][] does, for a prompt without tokens, a
                negative ``max_new_tokens``, and a ``batch`` of several prompts.
        """
        from memformers.generation.generate import generate

        drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        return generate(self, prompt, max_new_tokens, **drawing, stop=stop, batch=batch)  # type: ignore

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, each atomically. Raises ValueError for the
        current folder, and for one where these files are of something else: a run, a training's checkpoint,
        another library's model."""
        from memformers.pretrained.own import save_model

        save_model(self, Path(folder))

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        device: str | torch.device = "cpu",
        *,
        model: str | type[MemoryStack] = "",
        gate: str | type[nn.Module] = "",
        compression: str | type[nn.Module] = "",
        compression_loss: str | type[nn.Module] = "",
    ) -> "MemoryLM":
        """Load a model, in eval mode. Nothing is unpickled.

        Args:
            folder: What [`save_pretrained`][] wrote, or the checkpoint of a run. Where there is no such
                folder, the name of a model that comes with the package: ``"compressive-shakespeare"`` or
                ``"transformer-xl-shakespeare"``, which are in float32.
            device: Where the model is to be.
            model: The memory of your own that the model has, as its class or as ``"my_memory.py:Averages"``:
                a saved model names its file, and never runs it by itself.
            gate: Its gate of your own, likewise.
            compression: Its compression of your own.
            compression_loss: Its compression loss of your own.

        Returns:
            The model.

        Raises:
            ValueError: For a missing, broken or mismatched file, and for one of a training's checkpoint that
                has changed since.
        """
        from memformers.pretrained.own import load_folder_or_name

        own = {"gate": gate, "compression": compression, "compression_loss": compression_loss}
        for setting, name in {"model": model, **own}.items():
            named(name, setting)
        return load_folder_or_name(Path(folder), device)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless ``tokens`` is a segment: integers ``[S, B]``, S and B at least 1, each
    below ``vocab_size`` (on a GPU that is left to the embedding, so as not to wait for the values)."""
    if tokens.dim() != 2 or 0 in tokens.shape or tokens.dtype not in (torch.int64, torch.int32):
        raise UserError(
            f"expected tokens as int64 or int32 integers [segment, batch], at least one of each, got "
            f"{tokens.dtype} {list(tokens.shape)}."
        )
    has_values = tokens.device.type == "cpu" and not torch.compiler.is_compiling()
    if has_values and not is_transformed(tokens):
        low, high = tokens.aminmax()
        if low < 0 or high >= vocab_size:
            raise UserError(
                f"expected tokens from 0 to {vocab_size - 1}, of vocab_size={vocab_size}, got tokens from "
                f"{low} to {high}."
            )
