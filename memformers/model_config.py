"""What a language model is built from, checked."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from memformers.adaptive import Clusters, check_clusters
from memformers.attention_checks import Positions, check_clamp, check_dropout, check_features, check_heads
from memformers.kernels.dispatch import KernelName, check_kernel
from memformers.layers import Norm, check_norm

ModelName = Literal["transformer", "transformer-xl", "compressive"]
EmbeddingName = Literal["plain", "adaptive"]
ADAPTIVE = ("cutoffs", "div_val", "d_embed", "tie_weights", "tie_projections")
"""Settings of an adaptive embedding alone."""


@dataclass(frozen=True)
class ModelConfig:
    """What a language model is built from."""

    model: ModelName = "transformer-xl"
    """What it remembers between segments: nothing, its last inputs, or those and older ones
    compressed. Width, depth and everything else are the same network."""
    vocab_size: int = 256
    """How many different tokens there are; a training takes the number from its text."""
    d_model: int = 128
    """Width D: features a token."""
    heads: int = 4
    """Attention heads H; must divide d_model."""
    n_layers: int = 4
    """Depth, in layers."""
    d_ff: int = 512
    """Width of the feed-forward network's hidden layer."""
    dropout: float = 0.0
    """Probability of dropping an activation while training."""
    norm: Norm = "pre"
    """Normalization before attention and feed-forward network (pre), or after each of their sums (post), as
    in the original Transformer-XL."""
    positions: Positions = "sinusoidal"
    """The paper's fixed sinusoids (sinusoidal), or a learned vector for each distance (learned)."""
    kernel: KernelName = "auto"
    """What computes attention: naive (the definition), blocked (fast on CPU), fused (Triton, on a GPU),
    augmented (PyTorch's own, for sinusoidal positions), or what was measured to be fastest for the device
    and size (auto)."""
    position_features: int | None = None
    """Numbers in a sinusoid, P (sinusoidal positions); d_model if not given, fewer for augmented."""
    clamp_len: int | None = None
    """Distances beyond this look alike, for memories longer than in training (sinusoidal positions); all
    are told apart if not given."""
    segment_len: int = 64
    """Segment length S the model is trained with, in tokens; the longest with learned positions."""
    mem_len: int = 64
    """Memory length M, in positions (transformer-xl, compressive)."""
    equal_spans: bool = False
    """Whether each query sees just the mem_len newest positions, its own among them, and so all equally
    many, rather than the whole memory (transformer-xl, by the naive kernel); the original's same_length."""
    c_mem_len: int = 64
    """Compressed memory length C, in slots (compressive)."""
    compression_rate: int = 4
    """Positions a compressed slot stands for, c (compressive)."""

    embedding: EmbeddingName = "plain"
    """A vector for each token and a linear head (plain), or adaptive embedding and softmax, with vectors
    scaled by √D, as in the original Transformer-XL (adaptive). The five settings below are the latter's."""
    cutoffs: tuple[int, ...] = ()
    """Token ids, ordered by frequency, at which a cluster of rarer tokens begins (adaptive)."""
    div_val: int = 1
    """How many times narrower the vectors of each cluster are than those of the one before (adaptive)."""
    d_embed: int | None = None
    """Width of the first cluster's vectors; d_model if not given (adaptive)."""
    tie_weights: bool = False
    """Whether the softmax takes its vectors from the embedding (adaptive)."""
    tie_projections: bool = False
    """Whether the softmax narrows to each cluster but the first by the embedding's own map (adaptive)."""

    def __post_init__(self) -> None:
        """Raise ValueError, saying what doesn't fit."""
        if self.model not in get_args(ModelName):
            names = ", ".join(get_args(ModelName))
            raise ValueError(f"model={self.model!r} is unknown; use one of {names}.")
        check_heads(self.heads, self.d_model)
        check_dropout(self.dropout)
        check_norm(self.norm)
        check_kernel(self.kernel)
        if self.position_features is not None:
            check_features(self.position_features, self.positions, self.kernel)
        check_clamp(self.clamp_len, self.positions, self.kernel)
        self.check_embedding()
        for name in ("vocab_size", "n_layers", "d_ff", "segment_len", "compression_rate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is too small; use at least 1.")
        for name in ("mem_len", "c_mem_len"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative; use 0 for none.")
        self.check_equal_spans()

    def check_equal_spans(self) -> None:
        """Raise ValueError where queries can't be made to see equally many positions."""
        if self.equal_spans and (self.model != "transformer-xl" or self.mem_len < 1):
            raise ValueError(
                f"equal_spans=True is for model='transformer-xl' with a memory; model={self.model!r} and "
                f"mem_len={self.mem_len} came."
            )
        if self.equal_spans and self.kernel not in ("auto", "naive"):
            raise ValueError(f"equal_spans=True takes kernel='auto' or 'naive'; kernel={self.kernel!r} came.")

    def check_embedding(self) -> None:
        """Raise ValueError for an embedding that can't be. Cutoffs meet the vocabulary when a model is
        built: a training takes that from its text."""
        if self.embedding not in get_args(EmbeddingName):
            raise ValueError(f"embedding={self.embedding!r} is unknown; use 'plain' or 'adaptive'.")
        if self.embedding == "adaptive":
            check_clusters(self.cutoffs, self.div_val, self.d_model if self.d_embed is None else self.d_embed)
            return
        for field in fields(self):
            if field.name in ADAPTIVE and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{field.name}={getattr(self, field.name)} is for an adaptive embedding; use "
                    f"embedding='adaptive' with it, or leave it out."
                )

    @property
    def clusters(self) -> Clusters:
        """Of an adaptive embedding. Raises ValueError for cutoffs beyond the vocabulary."""
        d_embed = self.d_model if self.d_embed is None else self.d_embed
        return Clusters(self.vocab_size, self.cutoffs, self.div_val, d_embed)

    @property
    def longest_attention(self) -> int:
        """The most keys K = C + M + S one query's segment can meet, in positions and slots."""
        if self.model == "transformer":
            return self.segment_len
        if self.model == "transformer-xl":
            return self.mem_len + self.segment_len
        # A memory shorter than one slot's worth waits until it fills one.
        return self.c_mem_len + max(self.mem_len, self.compression_rate - 1) + self.segment_len

    @property
    def remembered_positions(self) -> int:
        """How many positions before the segment one layer can look at, compressed ones included."""
        if self.model == "transformer":
            return 0
        if self.model == "transformer-xl":
            return self.mem_len - 1 if self.equal_spans else self.mem_len
        return self.mem_len + self.c_mem_len * self.compression_rate
