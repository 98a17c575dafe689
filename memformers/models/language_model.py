"""A whole language model around a memory transformer: tokens and memory in, logits and memory out."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

import torch
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple

from memformers.common.errors import UserError
from memformers.common.fields import check_arguments
from memformers.kernels import is_concrete_cpu
from memformers.models.adaptive_softmax import AdaptiveEmbedding, AdaptiveSoftmax, Clusters, adaptive_losses
from memformers.models.config import ModelConfig
from memformers.models.fast_linear import linear
from memformers.models.io import Pretrained
from memformers.models.losses import TokenLosses, token_losses
from memformers.models.memory import Memory, check_streams
from memformers.models.stack import build_transformer, initialise_weights

if TYPE_CHECKING:
    from memformers.common.types import typed_like


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
    """``[S, B, vocab_size]``, for each next token; an adaptive softmax's are log-probabilities."""
    memory: Memory
    """To pass in with the streams' next segment."""
    auxiliary_loss: Tensor
    """A scalar to add to the loss: it trains the compression functions. 0 if nothing was compressed."""


# So that torch.export.save can write a program that returns it.
_register_namedtuple(LMOutput, serialized_type_name="memformers.LMOutput")


class LMScores(NamedTuple):
    """What [`MemoryLM`][] returns for a segment with targets: [`LMOutput`][] with losses instead of
    logits."""

    scores: TokenLosses
    """The loss; in eval mode also the loss of each token."""
    memory: Memory
    auxiliary_loss: Tensor


class MemoryLM(Pretrained):
    """A language model: an embedding, a memory transformer and a head, built from ``config``. It is
    stateless: pass the memory in, get the new one back. The auxiliary loss trains only the compressions; the
    language model's loss trains everything else, and with ``bptt`` the compressions too. Raises ValueError
    for cutoffs of an adaptive embedding beyond the vocabulary.

    Examples:
        >>> import torch
        >>> from memformers import MemoryLM, ModelConfig
        >>> model = MemoryLM(ModelConfig(model="compressive", vocab_size=65))
        >>> memory = None
        >>> for segment in torch.randint(65, (256, 2)).split(64):  # [S, B] each
        ...     logits, memory, auxiliary_loss = model(segment, memory)
        >>> logits.shape, memory.mem_len, memory.n_slots
        (torch.Size([64, 2, 65]), 64, 48)
    """

    config: ModelConfig
    config_class = ModelConfig

    @check_arguments
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config if config.vocab_size else replace(config, vocab_size=config.n_tokens)
        self.vocab_size = config.n_tokens
        self.embed = build_embedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.transformer = build_transformer(config)
        self.head = build_head(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw fresh weights, those of f_c last: from one seed, models start alike in all that they share."""
        init_vocabulary(self.embed, self.head)
        initialise_weights(self.transformer)

    @overload
    def forward(
        self,
        tokens: Tensor,
        memory: Memory | None = None,
        targets: None = None,
        doc_starts: Tensor | None = None,
        *,
        through_memory: bool = False,
    ) -> LMOutput: ...
    @overload
    def forward(
        self,
        tokens: Tensor,
        memory: Memory | None,
        targets: Tensor,
        doc_starts: Tensor | None = None,
        *,
        through_memory: bool = False,
    ) -> LMScores: ...
    @overload
    def forward(
        self,
        tokens: Tensor,
        memory: Memory | None = None,
        *,
        targets: Tensor,
        doc_starts: Tensor | None = None,
        through_memory: bool = False,
    ) -> LMScores: ...
    def forward(
        self,
        tokens: Tensor,
        memory: Memory | None = None,
        targets: Tensor | None = None,
        doc_starts: Tensor | None = None,
        *,
        through_memory: bool = False,
    ) -> LMOutput | LMScores:
        """Read a segment: logits, or losses of ``targets``; the next memory; and the auxiliary loss.

        Args:
            tokens: Integers ``[S, B]``, S at least 1.
            memory: The memory that the last segment returned; None for an empty one.
            targets: ``[S, B]``, each token's next one, or −100 if there is none.
            doc_starts: Boolean ``[S, B]``, true where a stream's new document starts: its tokens see nothing
                of what came before, neither in the segment nor in memory.
            through_memory: Whether positions that this segment adds to the memory keep their gradient, so
                that a later segment's loss reaches it. Slots of built-in memories never do.
                [`Memory.detach`][] removes it.

        Raises:
            ValueError: For tokens, targets or starts of another shape, dtype or range, a memory of another
                model, batch, dtype or device, and a segment longer than learned positions.
        """
        self.check_tokens(tokens)
        self._check_targets(targets, tokens)

        # Embedding, layers with memory, final norm.
        x = self.dropout(self.embed(tokens))  # [S, B, D]
        hidden, memory, loss = self.transformer(
            x, memory, doc_starts=doc_starts, through_memory=through_memory
        )
        # Losses need no logits of all clusters of an adaptive softmax.
        if targets is None:
            return LMOutput(self.predict(hidden), memory, loss)
        return LMScores(self._score(hidden, targets), memory, loss)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def predict(self, hidden: Tensor) -> Tensor:
        """The transformer's output ``[·, D]`` to the logits ``[·, vocab_size]`` of the next token."""
        embed = cast(AdaptiveEmbedding, self.embed)  # if the head is adaptive; it may be wrapped
        if isinstance(self.head, AdaptiveSoftmax):
            return self.head(hidden, embed)
        return linear(self.head, hidden)

    def _score(self, hidden: Tensor, targets: Tensor) -> TokenLosses:
        """The losses of ``targets [S, B]``, predicted from the transformer's output ``[S, B, D]``."""
        head = self.head
        embed = self.embed
        by_token = not self.training
        # An adaptive softmax computes a rare cluster only for the targets in it. Their number depends on
        # values, which a compiled graph doesn't have.
        may_choose = not torch.compiler.is_compiling()
        if isinstance(head, AdaptiveSoftmax) and isinstance(embed, AdaptiveEmbedding) and may_choose:
            return adaptive_losses(head, embed, hidden, targets, by_token=by_token)
        return token_losses(self.predict(hidden), targets, by_token=by_token)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.transformer.weight.device

    def check_tokens(self, tokens: Tensor, batch: int | None = None) -> None:
        """Raise ValueError unless ``tokens`` are integers of this vocabulary, ``[S, B]``, S and B at least 1,
        of ``batch`` streams. On a GPU, the embedding checks the values."""
        if not isinstance(tokens, Tensor):
            raise UserError(f"expected tokens as a torch.Tensor, got {type(tokens).__name__}; convert them.")
        if tokens.dim() != 2 or 0 in tokens.shape or tokens.dtype not in (torch.int64, torch.int32):
            raise UserError(
                f"expected tokens as int64 or int32 integers [S, B], at least one, got {tokens.dtype} "
                f"{list(tokens.shape)}."
            )
        if batch is not None and tokens.shape[1] != batch:
            raise UserError(f"expected tokens of {batch} streams, got {list(tokens.shape)}.")
        if is_concrete_cpu(tokens):
            low, high = tokens.aminmax()
            if low < 0 or high >= self.vocab_size:
                raise UserError(
                    f"expected tokens below vocab_size={self.vocab_size}, got tokens from {low} to {high}."
                )
        if tokens.device != self.device:
            raise UserError(f"tokens are on {tokens.device}, but the model is on {self.device}; move them.")

    def _check_targets(self, targets: Tensor | None, tokens: Tensor) -> None:
        check_streams("targets, the next tokens,", targets, torch.int64, tokens.shape, tokens.device)
        if targets is not None and is_concrete_cpu(targets):
            low, high = targets.where(targets != -100, 0).aminmax()
            if low < 0 or high >= self.vocab_size:
                raise UserError(
                    f"expected targets below vocab_size={self.vocab_size}, or -100, got {low} to {high}."
                )


def build_embedding(config: ModelConfig) -> nn.Embedding | AdaptiveEmbedding:
    if config.embedding == "adaptive":
        return AdaptiveEmbedding(clusters_of(config), config.d_model)
    return nn.Embedding(config.n_tokens, config.d_model)


def build_head(config: ModelConfig) -> nn.Linear | AdaptiveSoftmax:
    if config.embedding == "adaptive":
        return AdaptiveSoftmax(
            clusters_of(config),
            config.d_model,
            tie_weights=config.adaptive.tie_weights,
            tie_projections=config.adaptive.tie_projections,
        )
    return nn.Linear(config.d_model, config.n_tokens)


def clusters_of(config: ModelConfig) -> Clusters:
    adaptive = config.adaptive
    return Clusters(config.n_tokens, adaptive.cutoffs, adaptive.div_val, config.d_embed)


def init_vocabulary(embed: nn.Module, head: nn.Module) -> None:
    """Draw fresh weights for embedding and head; the head starts with nearly equal probabilities."""
    for module, std in ((embed, 0.3), (head, 0.02)):
        if isinstance(module, AdaptiveEmbedding | AdaptiveSoftmax):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=std)
    if isinstance(head, nn.Linear):
        nn.init.zeros_(head.bias)
