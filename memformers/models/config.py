"""What a language model is built from, checked."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from memformers.common.errors import UserError
from memformers.kernels.dispatch import KernelName
from memformers.models.adaptive import Clusters, check_clusters
from memformers.models.checks import (
    MOST_LAYERS,
    Positions,
    check_by_layer,
    check_clamp,
    check_dropout,
    check_features,
    check_heads,
    check_kernel,
    check_whole_numbers,
)
from memformers.models.compression import (
    WITHOUT_PARAMETERS,
    CompressionLossName,
    CompressionName,
    CompressionStart,
)
from memformers.models.layers import Norm, check_norm
from memformers.models.lengths import ByLayer, LayerLengths, MemoryLengths, by_layer

ModelName = Literal["transformer", "transformer-xl", "compressive"]
EmbeddingName = Literal["plain", "adaptive"]


@dataclass(frozen=True)
class AdaptiveConfig:
    """Settings of an adaptive embedding and softmax."""

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


WHOLE = (
    "vocab_size", "d_model", "heads", "n_layers", "d_ff", "position_features", "clamp_len", "segment_len",
    "bptt",
)  # fmt: skip
"""Settings that are whole numbers, some of them only where they are given."""


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
    """Normalization before attention and feed-forward network, and of the last layer's output (pre), the same
    but for the output, as the original Transformer-XL has it with pre_lnorm (pre-without-final), or after
    each of their sums (post), the original's usual form."""
    positions: Positions = "sinusoidal"
    """The paper's fixed sinusoids (sinusoidal), or a learned vector for each distance (learned)."""
    kernel: KernelName = "auto"
    """What computes attention: naive (the definition), blocked (fast on CPU), fused (Triton, on a GPU),
    or what was measured to be fastest for the device and size (auto)."""
    position_features: int | None = None
    """Numbers in a sinusoid, P (sinusoidal positions); d_model if not given."""
    clamp_len: int | None = None
    """Distances beyond this look alike, for memories longer than in training (sinusoidal positions); all
    are told apart if not given."""
    segment_len: int = 64
    """Segment length S the model is trained with, in tokens; the longest with learned positions."""
    mem_len: ByLayer = 64
    """Memory length M, in positions; one number for all layers, or one for each (transformer-xl,
    compressive)."""
    same_length: bool = False
    """Whether each query sees just the mem_len newest positions, its own among them, and so all equally
    many, rather than the whole memory (transformer-xl)."""
    c_mem_len: ByLayer = 64
    """Compressed memory length C, in slots; one number for all layers, or one for each (compressive)."""
    compression_rate: ByLayer = 4
    """Positions a compressed slot stands for, c; one number for all layers, or one for each (compressive)."""
    compression: CompressionName = "conv"
    """What makes a slot of them: a convolution that learns (conv), several, which look at the slots that
    follow as well (dilated), their mean, each feature's largest value (max), or the one of them that received
    the most attention (most-used) (compressive)."""
    compression_start: CompressionStart = "random"
    """What the convolutions are before they have learned anything: drawn (random), or the mean
    (compressive)."""
    compression_loss: CompressionLossName = "attention"
    """What the convolutions learn from: how much attention changes when memories give way to their slots
    (attention), or how well a decoder makes the memories of the slots again (auto-encoding); or from neither
    (none), with the mean, max or most-used, or with bptt (compressive)."""
    bptt: int = 0
    """How many compressions back the language model's loss reaches the convolutions, beside the compression
    loss; the memory then keeps the positions from which the slots of these compressions were made. 0: it
    never reaches them (compressive)."""

    embedding: EmbeddingName = "plain"
    """A vector for each token and a linear head (plain), or adaptive embedding and softmax, with vectors
    scaled by √D, as in the original Transformer-XL (adaptive)."""
    adaptive: AdaptiveConfig = AdaptiveConfig()
    """Clusters of an adaptive embedding, and what its softmax shares."""

    def __post_init__(self) -> None:
        """Raise UserError, saying what doesn't fit."""
        check_whole_numbers(self, WHOLE)
        if self.model not in get_args(ModelName):
            names = ", ".join(get_args(ModelName))
            raise UserError(f"model={self.model!r} is unknown; use one of {names}.")
        check_heads(self.heads, self.d_model)
        check_dropout(self.dropout)
        check_norm(self.norm)
        check_kernel(self.kernel)
        check_features(self.position_features, self.positions)
        check_clamp(self.clamp_len, self.positions)
        self.check_embedding()
        for name in ("vocab_size", "n_layers", "d_ff", "segment_len"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} is too small; use at least 1.")
        if self.n_layers > MOST_LAYERS:
            raise UserError(f"n_layers={self.n_layers} is too large; use at most {MOST_LAYERS:,}.")
        if self.bptt < 0:
            raise UserError(f"bptt={self.bptt} is negative; use 0 for none.")
        check_by_layer(self, ("compression_rate",), self.n_layers, smallest=1)
        check_by_layer(self, ("mem_len", "c_mem_len"), self.n_layers, smallest=0)
        self.check_compression()
        self.check_same_length()

    def check_compression(self) -> None:
        """Raise ValueError for a compression that isn't known, or can't start or learn like that."""
        choices = {
            "compression": CompressionName,
            "compression_start": CompressionStart,
            "compression_loss": CompressionLossName,
        }
        for name, names in choices.items():
            if getattr(self, name) not in get_args(names):
                known = ", ".join(get_args(names))
                raise UserError(f"{name}={getattr(self, name)!r} is unknown; use one of {known}.")
        learns = self.compression not in WITHOUT_PARAMETERS
        if not learns and self.compression_start == "mean":
            raise UserError(
                f"compression_start='mean' is for compression='conv' or 'dilated'; compression="
                f"{self.compression!r} has nothing that starts, so leave it out."
            )
        if not learns and self.compression_loss == "auto-encoding":
            raise UserError(
                f"compression_loss='auto-encoding' is for compression='conv' or 'dilated'; compression="
                f"{self.compression!r} has nothing to learn; use 'attention', which then only measures, or "
                f"'none'."
            )
        if not learns and self.bptt:
            raise UserError(
                f"bptt={self.bptt} is for compression='conv' or 'dilated'; compression={self.compression!r} "
                f"has nothing to learn, so leave it out."
            )
        if learns and self.compression_loss == "none" and not self.bptt:
            raise UserError(
                f"compression_loss='none' would leave compression={self.compression!r} untrained; use "
                f"'attention' or 'auto-encoding', or bptt=1 or more, or compression='mean', 'max' or "
                f"'most-used'."
            )

    def check_same_length(self) -> None:
        """Raise ValueError where queries can't be made to see equally many positions."""
        shortest = min(by_layer(self.mem_len, self.n_layers, "mem_len"))
        if self.same_length and (self.model != "transformer-xl" or shortest < 1):
            raise UserError(
                f"same_length=True is for model='transformer-xl' with a memory; model={self.model!r} and "
                f"mem_len={self.mem_len} came."
            )

    def check_embedding(self) -> None:
        """Raise ValueError for an embedding that can't be. Cutoffs meet the vocabulary when a model is
        built: a training takes that from its text."""
        if self.embedding not in get_args(EmbeddingName):
            raise UserError(f"embedding={self.embedding!r} is unknown; use 'plain' or 'adaptive'.")
        adaptive, default = self.adaptive, AdaptiveConfig()
        if self.embedding == "adaptive":
            check_clusters(adaptive.cutoffs, adaptive.div_val, self.d_embed)
            return
        for name in (field.name for field in fields(adaptive)):
            if getattr(adaptive, name) != getattr(default, name):
                raise UserError(
                    f"{name}={getattr(adaptive, name)} is for an adaptive embedding; use "
                    f"embedding='adaptive' with it, or leave it out."
                )

    @property
    def clusters(self) -> Clusters:
        """Of an adaptive embedding. Raises ValueError for cutoffs beyond the vocabulary."""
        adaptive = self.adaptive
        return Clusters(self.vocab_size, adaptive.cutoffs, adaptive.div_val, self.d_embed)

    @property
    def d_embed(self) -> int:
        """Width of an adaptive embedding's first vectors."""
        return self.d_model if self.adaptive.d_embed is None else self.adaptive.d_embed

    @property
    def lengths(self) -> MemoryLengths:
        """How much it remembers between segments."""
        if self.model == "transformer":
            return MemoryLengths(0)
        if self.model == "transformer-xl":
            return MemoryLengths(self.mem_len)
        own = self.mem_len, self.c_mem_len, self.compression_rate
        return MemoryLengths(*own, self.bptt, self.segment_len)

    @property
    def layer_lengths(self) -> list[LayerLengths]:
        """How much each layer remembers between segments."""
        return self.lengths.of_layers(self.n_layers)

    @property
    def window(self) -> ByLayer | None:
        """How many of the newest positions a query sees, its own among them; None for all."""
        return self.mem_len if self.same_length else None

    @property
    def longest_attention(self) -> int:
        """The most keys K = C + M + S one query's segment can meet in any layer, in positions and slots."""
        return max(own.c_mem_len + own.longest_memory for own in self.layer_lengths) + self.segment_len

    @property
    def remembered_positions(self) -> int:
        """How many positions before the segment one layer can look at, compressed ones included; where layers
        differ, the one that looks farthest."""
        return max(self.positions_of_layers)

    @property
    def positions_of_layers(self) -> list[int]:
        """How many positions before the segment each layer can look at, compressed ones included."""
        not_its_own = 1 if self.same_length else 0  # a query's own position is within its span
        return [own.positions - not_its_own for own in self.layer_lengths]


def upgraded(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved [`ModelConfig`][] of any version, as a dict of this one: older ones had the settings of an
    adaptive embedding among all others, called ``same_length`` ``equal_spans``, and had one compression and
    one loss of it."""
    names = {field.name for field in fields(AdaptiveConfig)}
    now: dict[str, Any] = {
        "compression": "conv",
        "compression_start": "random",
        "compression_loss": "attention",
    }
    now |= {name: value for name, value in saved.items() if name not in names | {"equal_spans"}}
    if "equal_spans" in saved:
        now["same_length"] = saved["equal_spans"]
    if adaptive := {name: saved[name] for name in names if name in saved}:
        now["adaptive"] = adaptive
    return now


def written_before(config: ModelConfig) -> dict[str, Any]:
    """The config as version 0.1 wrote it, which saved memories are known by."""
    flat = asdict(config)
    if not flat["bptt"]:  # nor was there this one
        flat.pop("bptt")
    for name in ("compression_start", "compression_loss"):
        flat.pop(name)  # tells nothing about the weights that have been learned since
    if flat["compression"] == "conv":  # there was no other
        flat.pop("compression")
    return {**flat.pop("adaptive"), "equal_spans": flat.pop("same_length"), **flat}
