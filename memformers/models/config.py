"""What a network with memory, and a language model around it, are built from: every setting, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count, Probability, Range, check_fields, check_value
from memformers.common.files import config_from_dict
from memformers.kernels.dispatch import KernelName
from memformers.models.memory_sizes import ByHead, ByLayer, Length, MemorySizes, Rate
from memformers.models.registry import NO_SETTINGS, NoSettings, lookup, name_of

ModelName = Literal["transformer", "transformer-xl", "compressive"]
Norm = Literal["pre", "pre-without-final", "post"]
GateName = Literal["residual", "gru"]
Positions = Literal["learned", "sinusoidal"]
CompressionName = Literal["conv", "dilated", "weighted", "mean", "max", "strided", "most-used"]
CompressionStart = Literal["random", "mean"]
CompressionLossName = Literal["attention", "auto-encoding", "none"]
WITHOUT_PARAMETERS: tuple[CompressionName, ...] = ("mean", "max", "strided", "most-used")
"""Compressions in which there is nothing to learn."""
OF_MODELS: dict[str, tuple[ModelName, ...]] = {
    **dict.fromkeys(("mem_len", "tbptt", "memory_warmup"), ("transformer-xl", "compressive")),
    **dict.fromkeys(("same_length", "divided_len"), ("transformer-xl",)),
    **dict.fromkeys(("c_mem_len", "compression_rate", "bptt"), ("compressive",)),
    **dict.fromkeys(("compression", "compression_start", "compression_loss"), ("compressive",)),
}
"""The settings that only these models use, and memories of your own that say so."""
BUILT_IN: dict[str, Any] = {
    "model": ModelName,
    "gate": GateName,
    "compression": CompressionName,
    "compression_loss": CompressionLossName,
}
"""What is built in, by the setting that may also name a class of your own."""
LENGTHS = ("mem_len", "c_mem_len", "compression_rate", "memory_warmup")
"""Those of them that a config may have without use, since the arms of an experiment share them."""


@dataclass(frozen=True)
class AdaptiveConfig(Checked):
    """Settings of an adaptive embedding and softmax.

    Examples:
        >>> from memformers import AdaptiveConfig, ModelConfig
        >>> adaptive = AdaptiveConfig(cutoffs=(20_000, 40_000, 200_000), div_val=4)
        >>> ModelConfig(vocab_size=267_735, embedding="adaptive", adaptive=adaptive).d_embed
        128
    """

    cutoffs: tuple[Count, ...] = ()
    """Token ids, ordered by frequency, at which a cluster of rarer tokens begins (adaptive)."""
    div_val: Count = 1
    """How many times narrower the vectors of each cluster are than those of the one before (adaptive)."""
    d_embed: Count | None = None
    """Width of the first cluster's vectors; d_model if not given (adaptive)."""
    tie_weights: bool = False
    """Whether the softmax takes its vectors from the embedding (adaptive)."""
    tie_projections: bool = False
    """Whether the softmax narrows to each cluster but the first by the embedding's own map (adaptive)."""


@dataclass(frozen=True)
class NetworkConfig:
    """What a network with memory is built from: all but what is read and predicted."""

    model: ModelName | str = "transformer-xl"
    """What it remembers between segments: nothing, its last inputs, or those and older ones compressed; or a
    memory of your own, such as my_memory.py:Averages. All else is the same network."""
    d_model: Count = 128
    """Width D: features per position."""
    heads: Count = 4
    """Attention heads H; must divide d_model."""
    n_layers: Annotated[int, Range(1, 10_000)] = 4
    """Depth, in layers."""
    d_ff: Count = 512
    """Width of the feed-forward network's hidden layer."""
    dropout: Probability = 0.0
    """Probability of dropping an activation while training."""
    norm: Norm = "pre"
    """Normalization before attention and feed-forward network and of the last output (pre), but for that, as
    the original Transformer-XL's pre_lnorm (pre-without-final), or after each sum, its usual form (post)."""
    gate: GateName | str = "residual"
    """What joins the outputs of attention and feed-forward network to their inputs: a sum (residual); after a
    ReLU, a gate as in a GRU, which first lets little through (gru); or your own, such as my.py:Gate."""
    positions: Positions = "sinusoidal"
    """The paper's fixed sinusoids (sinusoidal), or a learned vector for each distance (learned)."""
    kernel: KernelName = "auto"
    """What computes attention: naive (the definition), blocked (fast on CPU), fused (Triton, on a GPU), or
    what was measured to be fastest for the device and size (auto)."""
    position_features: Count | None = None
    """Numbers in a sinusoid, P (sinusoidal positions); d_model if not given."""
    clamp_len: Count | None = None
    """Distances beyond it look alike, for memories longer than in training; else all differ (sinusoidal)."""
    segment_len: Count = 64
    """Segment length S the model is trained with, in tokens; the longest with learned positions."""
    mem_len: ByLayer = 64
    """Memory length M, in positions; one for all layers, or one for each; in place of one, as 64,64,64,832,
    one for each head (transformer-xl, compressive)."""
    same_length: bool = False
    """Whether each query sees only the mem_len newest positions, its own among them (transformer-xl)."""
    divided_len: Length | tuple[Length, ...] = 0
    """How many positions before those of mem_len are remembered too, divided among the heads: each is read by
    one head, in turn. A multiple of heads, as segment_len must be for a fast generation; for all layers or by
    layer (transformer-xl)."""
    c_mem_len: ByLayer = 64
    """Compressed memory length C, in slots; likewise for all, by layer or by head (compressive)."""
    compression_rate: Rate | tuple[Rate, ...] = 4
    """Positions a compressed slot stands for, c; one for all layers, or one for each (compressive)."""
    compression: CompressionName | str = "conv"
    """What makes a slot: a learned convolution (conv), several that see later slots too (dilated), a mean
    with learned weights (weighted), the mean, each feature's maximum (max), one of its positions, the newest
    (strided) or the most attended (most-used), or your own, my.py:Gated (compressive)."""
    compression_start: CompressionStart = "random"
    """What f_c is before it learns: drawn (random), or the mean (compressive)."""
    compression_loss: CompressionLossName | str = "attention"
    """What convolutions learn from: how slots change attention (attention), how well a decoder restores what
    they stand for (auto-encoding), your own, my.py:Loss, or none, with bptt or the others (compressive)."""
    bptt: Length = 0
    """How many compressions back the language model's loss reaches the convolutions, beside their own loss;
    the memory then keeps the positions of those slots. 0: it never reaches them (compressive)."""
    own: Any = NO_SETTINGS
    """The settings of a memory of your own, an instance of its ``Config``; its defaults if not given."""
    _memory_sizes: ClassVar[tuple[MemorySizes, ...]]  # of this config

    def __post_init__(self) -> None:
        """Raise UserError, saying what doesn't fit."""
        for name, built_in in BUILT_IN.items():
            object.__setattr__(self, name, name_of(getattr(self, name), name))
            check_choice(name, getattr(self, name), built_in, getattr(NetworkConfig, name))
        check_fields(self)
        kind, own = lookup("model", self.model), self.own
        if isinstance(own, Mapping):
            own = config_from_dict(kind.Config, own, f"the settings of {self.model}")
        own = kind.Config() if isinstance(own, NoSettings) else own
        if not isinstance(own, kind.Config):
            raise UserError(f"expected own={own!r} to be {kind.Config.__qualname__} of model={self.model!r}.")
        check_fields(own)
        object.__setattr__(self, "own", own)
        check_heads(self.heads, self.d_model)
        check_positions(self.positions, self.position_features, self.clamp_len)
        for name in ("mem_len", "c_mem_len", "compression_rate", "divided_len"):
            self.of_layers(name)
        check_gate(self.gate, self.norm)
        check_used(self, self.model)
        self.check_compression()
        if self.same_length and not min(self.of_layers("mem_len")):
            raise UserError(f"same_length=True needs a memory, got mem_len={self.mem_len}; leave it out.")
        if self.same_length and any(isinstance(own, tuple) for own in self.by_layer("mem_len")):
            raise UserError("same_length=True gives all heads one window; use a length for all heads.")
        self.check_divided()
        sizes = kind.memory_sizes(self)
        fits = isinstance(sizes, list | tuple) and all(isinstance(each, MemorySizes) for each in sizes)
        if not fits or len(sizes) != self.n_layers:
            raise UserError(
                f"expected {kind.__qualname__}.memory_sizes to give {self.n_layers} MemorySizes, got {sizes}."
            )
        if own := next((own for own in sizes if own.divided and own.divided_by != self.heads), None):
            raise UserError(f"expected divided_by={own.divided_by} of {own} to be heads={self.heads}.")
        for name in ("mem_len", "c_mem_len") if ":" in self.model else ():
            for own, of_layer in zip(self.by_layer(name), sizes, strict=True):
                if isinstance(own, tuple) and len(set(own)) > 1 and not of_layer.heads:
                    raise UserError(f"{name}={own} is by head, which {self.model} doesn't know; give one.")
        object.__setattr__(self, "_memory_sizes", tuple(sizes))

    def check_divided(self) -> None:
        """Raise UserError where heads can't divide positions among them as ``divided_len`` says."""
        lengths, H = self.of_layers("divided_len"), self.heads
        if any(N % H for N in lengths):
            raise UserError(f"heads={H} can't divide divided_len={self.divided_len} equally; use a multiple.")
        by_head = any(isinstance(own, tuple) for own in self.by_layer("mem_len"))
        if any(lengths) and (by_head or self.same_length):
            raise UserError(
                "with divided_len, all heads read mem_len; leave out same_length and lengths by head."
            )

    def check_compression(self) -> None:
        """Raise UserError for a compression that can't start or learn as these settings say."""
        f_c, is_own = self.compression, ":" in self.compression
        learns = f_c not in WITHOUT_PARAMETERS
        why = "draws its own weights" if is_own else "has nothing to learn"
        for name, fits in (
            ("compression_start", (learns and not is_own) or self.compression_start == "random"),
            ("compression_loss", learns or self.compression_loss in ("attention", "none")),
            ("bptt", learns or not self.bptt),
        ):
            if not fits:
                raise UserError(
                    f"{name}={getattr(self, name)!r} is given, but compression={f_c!r} {why}; leave it out."
                )
        if learns and not is_own and self.compression_loss == "none" and not self.bptt:
            raise UserError(
                f"compression_loss='none' leaves compression={f_c!r} untrained; use another, or bptt=1."
            )
        # These slots may depend on those that follow, so the same ones must be computed together again.
        rates = self.of_layers("compression_rate") if f_c == "dilated" or is_own else ()
        if self.bptt and (rate := next((c for c in rates if self.segment_len % c), 0)):
            raise UserError(
                f"bptt={self.bptt} with compression={f_c!r} needs segments of whole slots, got segment_len="
                f"{self.segment_len} and compression_rate={rate}; use a multiple of {rate}, or 'conv'."
            )

    @property
    def memory_sizes(self) -> tuple[MemorySizes, ...]:
        """How much each layer remembers between segments."""
        return self._memory_sizes

    def of_layers(self, name: str) -> tuple[int, ...]:
        """The length called ``name`` of each layer. Raises ValueError for a tuple of another length."""
        return tuple(max(own) if isinstance(own, tuple) else own for own in self.by_layer(name))

    def by_layer(self, name: str) -> tuple[ByHead, ...]:
        """The length called ``name`` of each layer, or one for each of its heads. Raises ValueError for
        another number of either."""
        value, n = getattr(self, name), self.n_layers
        if not isinstance(value, tuple) or (len(value) == 1 and isinstance(value[0], tuple)):
            value = (value[0] if isinstance(value, tuple) else value,) * n
        if len(value) != n:
            raise UserError(f"{name}={value} is for {len(value)} layers, not n_layers={n}; give one or {n}.")
        for own in value:
            if isinstance(own, tuple) and len(own) != self.heads:
                said, n = ",".join(map(str, own)), len(own)
                raise UserError(f"{name}={said} is for {n} heads, not heads={self.heads}; give one or each.")
        return value

    def sizes_by_head(self, *, slots: bool) -> list[tuple[tuple[int, int], ...] | None]:
        """M and C of each head of each layer, C = 0 without ``slots``; None where they are alike. Raises
        ValueError for slots that don't follow the positions of their head."""
        each, c_mem_lens = [], self.by_layer("c_mem_len") if slots else (0,) * self.n_layers
        for mem, c_mem in zip(self.by_layer("mem_len"), c_mem_lens, strict=True):
            M, C = (own if isinstance(own, tuple) else (own,) * self.heads for own in (mem, c_mem))
            own = tuple(zip(M, C, strict=True))
            if any(c and m < max(M) for m, c in own):
                raise UserError(
                    f"a head with slots must read all positions before them, got mem_len={M} and "
                    f"c_mem_len={C} in one layer; give slots only to heads with mem_len={max(M)}."
                )
            each.append(own if len(set(own)) > 1 else None)
        return each

    @property
    def longest_attention(self) -> int:
        """The most keys K = C + M + S one query's segment can meet in any layer, in positions and slots."""
        each = (own.most_keys + own.longest_memory - own.mem_len for own in self.memory_sizes)
        longest = max(each) + self.segment_len
        return max([longest, *(K for _, K in lookup("model", self.model).attention_sizes(self))])

    @property
    def remembered_positions(self) -> int:
        """How many positions before the segment the layer that looks farthest can look at."""
        return max(self.positions_of_layers)

    @property
    def positions_of_layers(self) -> list[int]:
        """How many positions before the segment each layer can look at, compressed ones included."""
        # With same_length, a query's own position is within its window.
        return [own.positions - self.same_length for own in self.memory_sizes]


@dataclass(frozen=True)
class CoreConfig(NetworkConfig):
    """What a [`memformers.MemoryCore`][] is built from. Raises ValueError as [`ModelConfig`][] does.

    Examples:
        >>> from memformers import CoreConfig
        >>> CoreConfig(model="transformer-xl", d_input=3, d_model=32, mem_len=32).remembered_positions
        32
    """

    d_input: Count | None = None
    """Width F of the features that are read; d_model if not given, and then no map narrows or widens them."""


@dataclass(frozen=True)
class ModelConfig(NetworkConfig):
    """What a language model is built from. Raises ValueError for values out of range, or of no effect on it.

    Examples:
        >>> from memformers import ModelConfig
        >>> config = ModelConfig(model="compressive", mem_len=64, c_mem_len=64, compression_rate=4)
        >>> config.remembered_positions  # of one layer: 64 + 4 · 64
        320
    """

    vocab_size: Count | None = None
    """How many different tokens there are. If not given, a training takes the number from its text, and a
    model has 256, one for each byte."""
    embedding: Literal["plain", "adaptive"] = "plain"
    """A vector for each token and a linear head (plain), or adaptive embedding and softmax with vectors
    scaled by √D, as in the original Transformer-XL (adaptive)."""
    adaptive: AdaptiveConfig = AdaptiveConfig()
    """Clusters of an adaptive embedding, and what its softmax shares."""

    @property
    def n_tokens(self) -> int:
        """``vocab_size``, or 256 if it is not given."""
        return self.vocab_size or 256

    def __post_init__(self) -> None:
        """Raise UserError, saying what doesn't fit. Cutoffs meet the vocabulary when a model is built."""
        super().__post_init__()
        adaptive, cutoffs = self.adaptive, self.adaptive.cutoffs
        given = [f"{name}={x}" for name, x in vars(adaptive).items() if x != getattr(AdaptiveConfig, name)]
        if given and self.embedding != "adaptive":
            raise UserError(f"{given[0]} needs embedding='adaptive', got {self.embedding!r}; leave it out.")
        if any(low >= high for low, high in pairwise(cutoffs)):
            raise UserError(f"expected cutoffs in ascending order, each once, got cutoffs={cutoffs}.")
        if self.d_embed < (least := adaptive.div_val ** len(cutoffs)):
            raise UserError(
                f"div_val={adaptive.div_val} leaves the last cluster no width of d_embed={self.d_embed}; use "
                f"d_embed={least} or more, a smaller div_val, or fewer cutoffs."
            )

    @property
    def d_embed(self) -> int:
        """Width of an adaptive embedding's first vectors."""
        return self.d_model if self.adaptive.d_embed is None else self.adaptive.d_embed


def check_choice(setting: str, value: object, built_in: Any, default: object) -> None:
    """Raise UserError unless a setting's ``value`` is ``built_in``, or the name of a registered class."""
    if isinstance(value, str) and ":" in value:
        lookup(setting, value)
    else:
        check_value(setting, value, built_in, default)


def check_heads(heads: int, d_model: int) -> None:
    """Raise UserError, naming widths that fit, unless ``heads`` divides ``d_model``."""
    if d_model % heads:
        below = d_model // heads * heads
        such = f"such as {below} or {below + heads}" if below else f"such as {heads}"
        raise UserError(f"d_model={d_model} is not divisible by heads={heads}; use a multiple, {such}.")


def check_positions(positions: Positions, features: int | None, clamp_len: int | None) -> None:
    """Raise UserError for settings of sinusoids beside learned positions."""
    for name, value in (("position_features", features), ("clamp_len", clamp_len)):
        if positions == "learned" and value is not None:
            raise UserError(f"{name}={value} is for sinusoids; leave it out, or use positions='sinusoidal'.")


def check_gate(gate: GateName | str, norm: Norm) -> None:
    """Raise UserError for a ``gate`` that doesn't exist, or that needs another ``norm``."""
    check_choice("gate", gate, GateName, "residual")
    if gate != "residual" and norm == "post":
        raise UserError(f"gate={gate!r} needs norm='pre' or 'pre-without-final', got norm='post'.")


def is_used(name: str, model: str) -> bool:
    """Whether the setting called ``name`` has an effect on ``model``."""
    if name not in OF_MODELS or ":" not in model:
        return model in OF_MODELS.get(name, (model,))
    return name in lookup("model", model).uses


def check_used(config: Any, model: str, *, lengths: bool = False) -> None:
    """Raise UserError for a setting of the dataclass instance ``config`` that has no effect on ``model`` and
    is not its default; among the [`LENGTHS`][] only with ``lengths``."""
    for each in fields(config):
        name, value = each.name, getattr(config, each.name)
        if value != each.default and (lengths or name not in LENGTHS) and not is_used(name, model):
            models = " or ".join(map(repr, OF_MODELS[name]))
            raise UserError(f"{name}={value!r} is for model={models}, got model={model!r}; leave it out.")
