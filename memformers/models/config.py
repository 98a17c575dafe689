"""Every setting of a network with memory and of a language model around it, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count, Positive, Probability, Range, check_fields
from memformers.common.files import config_from_dict
from memformers.kernels import KernelName
from memformers.models.registry import NO_SETTINGS, NoSettings, lookup, register_model
from memformers.models.sizes import Length, MemorySizes, Rate

ModelName = Literal["transformer", "transformer-xl", "compressive", "selective"]
Norm = Literal["pre", "pre-without-final", "post"]
GateName = Literal["residual", "gru"]
Positions = Literal["learned", "sinusoidal"]
CompressionName = Literal["conv", "dilated", "mean", "max"]
CompressionStart = Literal["random", "mean"]
CompressionLossName = Literal["attention", "none"]
WITHOUT_PARAMETERS: tuple[CompressionName, ...] = ("mean", "max")
"""Compressions that have nothing to learn."""
SETTING_MODELS: dict[str, tuple[ModelName, ...]] = {
    **dict.fromkeys(("mem_len", "memory_warmup"), ("transformer-xl", "compressive", "selective")),
    "same_length": ("transformer-xl",),
    **dict.fromkeys(("c_mem_len", "compression_rate"), ("compressive", "selective")),
    **dict.fromkeys(("compression", "compression_start", "compression_loss", "bptt"), ("compressive",)),
}
"""The built-in models that use a setting, for each setting that some of them ignore."""
LENGTHS = ("mem_len", "c_mem_len", "compression_rate")
"""The settings of a memory's sizes, which a user's memory may use, too."""
SHARED_SETTINGS = (*LENGTHS, "memory_warmup")
"""Settings that may be set even if the model ignores them, so that all arms can share one config."""
Lengths = Length | tuple[Length, ...]
"""One length for all layers, or one for each. A few long memories in late layers may suffice (arXiv
2007.03356)."""


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
    """Token ids, ordered by frequency, at which clusters of rarer tokens start (adaptive)."""
    div_val: Count = 1
    """The factor by which each cluster's vectors are narrower than those of the previous one (adaptive)."""
    d_embed: Count | None = None
    """Width of the first cluster's vectors; d_model if not given (adaptive)."""
    tie_weights: bool = False
    """Whether the softmax shares the vectors of the embedding (adaptive)."""
    tie_projections: bool = False
    """Whether the softmax shares the embedding's projection of each cluster but the first (adaptive)."""


@dataclass(frozen=True)
class NetworkConfig:
    """The settings of a network with memory, without its input and output layers: what [`ModelConfig`][] and
    [`CoreConfig`][] have in common, and what a memory is built from.

    Examples:
        >>> from memformers import NetworkConfig
        >>> NetworkConfig(n_layers=3, mem_len=(16, 16, 64)).per_layer("mem_len")
        (16, 16, 64)
    """

    model: ModelName | str = "transformer-xl"
    """The memory: transformer (none), transformer-xl, compressive, selective or your own. transformer-xl
    remembers each layer's latest inputs; compressive and selective also older ones, compressed or selected;
    your own is a class in a file, such as my_memory.py:Averages."""
    d_model: Count = 128
    """Width D: features per position."""
    n_heads: Count = 4
    """Attention heads H; must divide d_model."""
    n_layers: Annotated[int, Range(1, 10_000)] = 4
    """Depth, in layers."""
    d_ff: Count = 512
    """Width of the feed-forward network's hidden layer."""
    dropout: Probability = 0.0
    """Probability of dropping an activation while training."""
    norm: Norm = "pre"
    """Where to normalize: before attention and feed-forward network, and the last output (pre); the same
    without the last output, as the original Transformer-XL's pre_lnorm (pre-without-final); or after each
    residual sum, the original's default (post)."""
    gate: GateName = "residual"
    """How the outputs of attention and feed-forward network join their inputs: a sum (residual), or a ReLU
    and a GRU-style gate, which starts almost closed (gru)."""
    token_shift: bool = False
    """Whether keys and values also see the previous token: they are computed from x_j + w · x_{j−1}, with the
    layer's inputs x and a learned w, initially from −1 to 1."""
    positions: Positions = "sinusoidal"
    """The paper's fixed sinusoids (sinusoidal), or a learned vector for each distance (learned)."""
    kernel: KernelName = "auto"
    """The attention kernel: naive (the reference), blocked (fast on a CPU), sdpa (PyTorch's attention with a
    bias), flash (without one, for sinusoidal positions), or the fastest for the device and size (auto)."""
    position_features: Count | None = None
    """Numbers in a sinusoid, P (sinusoidal positions); d_model if not given."""
    position_base: Positive = 10_000.0
    """The longest wavelength of the sinusoids over 2π (sinusoidal positions)."""
    clamp_len: Count | None = None
    """Longer distances share the sinusoid of this one, for memories longer than in training (sinusoidal)."""
    segment_len: Count = 64
    """Segment length S the model is trained with, in tokens; the longest with learned positions."""
    mem_len: Lengths = 64
    """Memory length M, in positions; one for all layers, or one for each, such as 64 64 64 832
    (transformer-xl, compressive, selective)."""
    same_length: bool = False
    """Whether each query sees only the newest mem_len positions, including its own (transformer-xl)."""
    c_mem_len: Lengths = 64
    """C: the number of slots (compressive) or of kept older positions (selective); one for all layers, or one
    for each."""
    compression_rate: Rate | tuple[Rate, ...] = 4
    """c: how many positions a slot summarizes (compressive), or how many leave the newest for each kept one
    that expires (selective); one for all layers, or one for each."""
    compression: CompressionName = "conv"
    """How slots are made: a learned convolution (conv), after dilated ones that also see later positions
    (dilated), the mean, or each feature's maximum (max) (compressive)."""
    compression_start: CompressionStart = "random"
    """The initial f_c: random weights (random), or the mean (compressive)."""
    compression_loss: CompressionLossName = "attention"
    """What trains the compression: attention reconstruction (attention), or nothing (none), for use with bptt
    or a compression without parameters (compressive)."""
    bptt: Length = 0
    """How many of the latest compressions the language model's loss also trains, through their slots; the
    memory then also keeps the positions of those slots. 0 for none (compressive)."""
    memory_config: Any = NO_SETTINGS
    """The settings of your memory, an instance of its ``Config``; its defaults if not given."""
    _memory_sizes: ClassVar[tuple[MemorySizes, ...]]  # of this config

    def __post_init__(self) -> None:
        # A class becomes its name, and each field has a value of its type.
        object.__setattr__(self, "model", register_model(self.model))
        check_fields(self)

        # The settings of the memory itself: from a file, given, or its defaults.
        kind = lookup(self.model)
        memory_config = self.memory_config
        if isinstance(memory_config, Mapping):
            memory_config = config_from_dict(kind.Config, memory_config, f"the settings of {self.model}")
        memory_config = kind.Config() if isinstance(memory_config, NoSettings) else memory_config
        if not isinstance(memory_config, kind.Config):
            raise UserError(
                f"expected memory_config of model={self.model!r} to be a {kind.Config.__qualname__}, got "
                f"{memory_config!r}."
            )
        check_fields(memory_config)
        object.__setattr__(self, "memory_config", memory_config)

        # Check combinations of settings.
        check_heads(self.n_heads, self.d_model)
        check_positions(self.positions, self.position_features, self.clamp_len)
        for name in LENGTHS:
            self.per_layer(name)
        check_gate(self.gate, self.norm)
        reject_unused(self, self.model)
        self._check_compression()
        if self.same_length and not min(self.per_layer("mem_len")):
            raise UserError(f"same_length=True needs a memory, got mem_len={self.mem_len}; use mem_len ≥ 1.")
        if self.token_shift and not kind.may_shift():
            raise UserError(f"{kind.__qualname__} reads or attends in its own way; use token_shift=False.")

        # How much each layer remembers follows from the settings, so it is decided here.
        sizes = kind.sizes(self)
        is_list = isinstance(sizes, list | tuple) and all(isinstance(size, MemorySizes) for size in sizes)
        if not is_list or len(sizes) != self.n_layers:
            raise UserError(
                f"expected {kind.__qualname__}.sizes to return {self.n_layers} MemorySizes, got {sizes}."
            )
        if self.token_shift and kind.remembers:
            sizes = [replace(size, has_shift_state=True) for size in sizes]
        object.__setattr__(self, "_memory_sizes", tuple(sizes))

    def _check_compression(self) -> None:
        # A compression learns from its own loss or from the language model's, if it has anything to learn.
        f_c = self.compression
        if f_c in WITHOUT_PARAMETERS:
            if self.compression_start != "random" or self.bptt:
                name = "bptt" if self.bptt else "compression_start"
                value = getattr(self, name)
                raise UserError(f"compression={f_c!r} has no parameters, so {name}={value!r} can't be set.")
        elif self.compression_loss == "none" and not self.bptt:
            raise UserError(
                f"compression_loss='none' leaves compression={f_c!r} untrained; use 'attention', or bptt=1."
            )
        # A dilated slot depends on later positions, so the same slots must be computed together again.
        if not self.bptt or f_c != "dilated":
            return
        for rate in self.per_layer("compression_rate"):
            if self.segment_len % rate:
                raise UserError(
                    f"bptt={self.bptt} with compression='dilated' needs segments of whole slots, got "
                    f"segment_len={self.segment_len} and compression_rate={rate}; use a multiple of {rate}, "
                    f"or 'conv'."
                )

    @property
    def memory_sizes(self) -> tuple[MemorySizes, ...]:
        """How much each layer remembers between segments."""
        return self._memory_sizes

    def per_layer(self, name: str) -> tuple[int, ...]:
        """The setting called ``name`` of each layer. Raises ValueError for a tuple of another length."""
        value: int | tuple[int, ...] = getattr(self, name)
        n = self.n_layers
        if not isinstance(value, tuple):
            return (value,) * n
        if len(value) != n:
            raise UserError(f"{name}={value} has {len(value)} lengths, not n_layers={n}; use one or {n}.")
        return value

    @property
    def longest_attention(self) -> int:
        """The most keys K = C + M + S that a query can see in any layer."""
        return max(size.most_keys for size in self.memory_sizes) + self.segment_len

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How many of the newest keys a query of each layer sees, its own included; None for all."""
        return self.per_layer("mem_len") if self.same_length else (None,) * self.n_layers

    @property
    def remembered_positions(self) -> int:
        """How many positions before the segment the layer with the longest memory can see."""
        return max(self.positions_of_layers)

    @property
    def positions_of_layers(self) -> list[int]:
        """How many positions before the segment each layer can see, compressed ones included."""
        # With same_length, a query's own position is within its window.
        return [size.positions - self.same_length for size in self.memory_sizes]


@dataclass(frozen=True)
class CoreConfig(NetworkConfig):
    """The settings of a [`memformers.MemoryCore`][]. Raises ValueError as [`ModelConfig`][] does.

    Examples:
        >>> from memformers import CoreConfig
        >>> CoreConfig(model="transformer-xl", d_input=3, d_model=32, mem_len=32).remembered_positions
        32
    """

    d_input: Count | None = None
    """Width F of the input features; d_model if not given. A linear layer maps F to d_model if they
    differ."""


@dataclass(frozen=True)
class ModelConfig(NetworkConfig):
    """The settings of a language model. Raises ValueError for values out of range, and for settings that the
    model ignores.

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
        super().__post_init__()
        # Settings of an adaptive embedding have no effect on a plain one.
        adaptive = self.adaptive
        cutoffs = adaptive.cutoffs
        changed = [f"{name}={x}" for name, x in vars(adaptive).items() if x != getattr(AdaptiveConfig, name)]
        if changed and self.embedding != "adaptive":
            raise UserError(f"{changed[0]} needs embedding='adaptive', got {self.embedding!r}.")
        # Clusters are ranges of ids, each with vectors of at least one feature.
        if any(low >= high for low, high in pairwise(cutoffs)):
            raise UserError(f"expected cutoffs in ascending order, each once, got cutoffs={cutoffs}.")
        least = adaptive.div_val ** len(cutoffs)
        if self.d_embed < least:
            raise UserError(
                f"div_val={adaptive.div_val} leaves the last cluster less than one feature of "
                f"d_embed={self.d_embed}; use d_embed={least} or more, a smaller div_val, or fewer cutoffs."
            )

    @property
    def d_embed(self) -> int:
        """Width of an adaptive embedding's first vectors."""
        return self.d_model if self.adaptive.d_embed is None else self.adaptive.d_embed


def check_heads(n_heads: int, d_model: int) -> None:
    if d_model % n_heads:
        smaller = d_model // n_heads * n_heads
        examples = f"{smaller} or {smaller + n_heads}" if smaller else f"{n_heads}"
        raise UserError(
            f"d_model={d_model} is not divisible by n_heads={n_heads}; use a multiple, such as {examples}."
        )


def check_positions(positions: Positions, features: int | None, clamp_len: int | None) -> None:
    for name, value in (("position_features", features), ("clamp_len", clamp_len)):
        if positions == "learned" and value is not None:
            raise UserError(f"{name}={value} needs positions='sinusoidal', got positions='learned'.")


def has_rotations(positions: Positions, features: int, clamp_len: int | None) -> bool:
    """Whether a distance's features are those of two indices, rotated: sines and cosines, in pairs."""
    return positions == "sinusoidal" and clamp_len is None and features % 2 == 0


def check_rotations(positions: Positions, features: int, clamp_len: int | None) -> None:
    if not has_rotations(positions, features, clamp_len):
        raise UserError(
            f"kernel='flash' needs positions='sinusoidal' with an even number of position_features and no "
            f"clamp_len, got positions={positions!r}, {features} features, clamp_len={clamp_len}; use "
            f"kernel='auto'."
        )


def check_gate(gate: GateName, norm: Norm) -> None:
    if gate != "residual" and norm == "post":
        raise UserError(f"gate={gate!r} needs norm='pre' or 'pre-without-final', got norm='post'.")


def applies_to(name: str, model: str) -> bool:
    """Whether the memory called ``model`` uses the setting called ``name``."""
    if name not in SETTING_MODELS or ":" not in model:
        return model in SETTING_MODELS.get(name, (model,))
    return name in LENGTHS and changes_sizes(name, lookup(model))


@cache
def changes_sizes(name: str, rule: Any) -> bool:
    """Whether the sizes of the memory ``rule`` depend on the setting called ``name``."""
    # Try another value, since a memory doesn't declare the settings that it uses. An error shows that it
    # reads this one.
    try:
        config = NetworkConfig(model=rule)
        changed = replace(config, **{name: getattr(config, name) + 1})
    except UserError:
        return True
    return changed.memory_sizes != config.memory_sizes


def reject_unused(config: Any, model: str, *, lengths: bool = False) -> None:
    """Raise UserError for a setting of the dataclass instance ``config`` that ``model`` ignores and that is
    not its default; among the [`SHARED_SETTINGS`][] only with ``lengths``."""
    for field in fields(config):
        name = field.name
        value = getattr(config, name)
        # Lengths that all arms of a comparison share may be set for a model without memory too.
        may_differ = name in SHARED_SETTINGS and not lengths
        if value != field.default and not may_differ and not applies_to(name, model):
            models = " or ".join(map(repr, SETTING_MODELS[name]))
            raise UserError(f"{name}={value!r} needs model={models}, got model={model!r}.")
