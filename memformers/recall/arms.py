"""The arms of the recall experiment: different memories of one network, with their lengths and settings."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from memformers.common.errors import UserError
from memformers.data.recall_stream import RecallStream
from memformers.models.compression import CompressionName, CompressionStart
from memformers.models.config import ModelConfig, ModelName
from memformers.training.config import TrainConfig

Reach = Literal["near", "far"]


@dataclass(frozen=True)
class Arm:
    """One memory. The setting has everything else about the network and its training."""

    name: str
    """The name on the command line and of folders."""
    label: str
    """The name in figures and tables, without its lengths."""
    model: ModelName
    mem_len: int = 0
    c_mem_len: int = 0
    compression_rate: int = 1
    compression: CompressionName = "conv"
    compression_start: CompressionStart = "random"
    frozen: bool = False
    """Whether f_c keeps its initial random weights."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Other settings of its network, such as the loss of f_c; they replace those above."""

    def network(self, shared: ModelConfig) -> ModelConfig:
        """The network ``shared`` with this memory."""
        memory = {
            "model": self.model,
            "mem_len": self.mem_len,
            "c_mem_len": self.c_mem_len,
            "compression_rate": self.compression_rate,
            "compression": self.compression,
            "compression_start": self.compression_start,
        }
        return replace(shared, **(memory | self.settings))

    @property
    def keys(self) -> int:
        """The keys of a layer that are not of its segment: M + C."""
        return self.mem_len + self.c_mem_len

    @property
    def title(self) -> str:
        """Its label, with its lengths."""
        lengths = {"M": self.mem_len, "C": self.c_mem_len, "c": self.c_mem_len and self.compression_rate}
        given = [f"{letter} = {length}" for letter, length in lengths.items() if length]
        return ", ".join([self.label, *given])


@dataclass(frozen=True)
class Setting:
    """What all arms of an experiment share: the stream, the network, the training and the measurement."""

    arms: tuple[Arm, ...]
    others: tuple[Arm, ...] = ()
    """Arms that are trained only if they are named."""
    stream: RecallStream = field(default_factory=RecallStream)
    train: TrainConfig = field(default_factory=TrainConfig)
    """The training of the first seed; its network has all settings except the memory."""
    growing: float = 0.5
    """The fraction of the training in which the longest distance of a question grows, exponentially, from a
    segment to twice the longest reach; after that there is no limit. 0: there is never a limit."""
    evaluated: int = 2048
    """Positions of each stream that are measured at the end, after those that fill the memories."""

    def __post_init__(self) -> None:
        """Raise UserError for settings that are out of range."""
        if not 0.0 <= self.growing <= 1.0:
            raise UserError(f"growing={self.growing} must be a fraction of the training, in [0, 1].")
        if self.evaluated < 1:
            raise UserError(f"evaluated={self.evaluated} positions are too few; use at least 1.")

    def arm(self, name: str) -> Arm:
        """The arm called ``name``; else ValueError."""
        for arm in self.all_arms:
            if arm.name == name:
                return arm
        known = ", ".join(arm.name for arm in self.all_arms)
        raise UserError(f"arm {name!r} is unknown; this reach has {known}.")

    @property
    def all_arms(self) -> tuple[Arm, ...]:
        """All arms that can be trained, in their order."""
        return self.arms + self.others

    def sees_back(self, arm: Arm) -> int:
        """The farthest position that one layer of ``arm`` can look at, from the end of its segment."""
        return arm.mem_len + arm.c_mem_len * arm.compression_rate + self.train.model.segment_len

    @property
    def reach(self) -> int:
        """The longest reach of the arms that are trained if none is named."""
        return max(map(self.sees_back, self.arms))


def compressive_arms(mem_len: int, c_mem_len: int, rate: int) -> tuple[Arm, ...]:
    """The Compressive Transformer with these lengths, and the controls that are trained."""
    lengths = (mem_len, c_mem_len, rate)
    return (
        Arm("compressive", "Compressive", "compressive", *lengths, compression_start="mean"),
        Arm("frozen", "Compressive, f_c as drawn", "compressive", *lengths, frozen=True),
        Arm("mean", "Compressive, mean pooling", "compressive", *lengths, compression="mean"),
    )


def other_compressions(mem_len: int, c_mem_len: int, rate: int) -> tuple[Arm, ...]:
    """The arms that the paper compares (Rae et al. 2020, section 3.2), with these lengths: other functions
    f_c, and other losses of the convolution. Another arm has slots only in the upper of two layers, half as
    many as all others (Rae and Razavi 2020, arXiv 2007.03356)."""

    def arm(name: str, label: str, **settings: Any) -> Arm:
        lengths = (mem_len, c_mem_len, rate)
        return Arm(name, f"Compressive, {label}", "compressive", *lengths, settings=settings)

    return (
        arm("bptt", "conv. by BPTT", compression_loss="none", bptt=1),
        arm("max", "max pooling", compression="max"),
        arm("auto-encoding", "conv. by auto-encoding", compression_loss="auto-encoding"),
        arm("most-used", "most-used", compression="most-used"),
        arm("dilated", "dilated conv.", compression="dilated"),
        arm("conv", "conv. from random weights"),
        arm("upper-half", "conv., slots in the upper layer", c_mem_len=(0, c_mem_len)),
    )


NETWORK = ModelConfig(d_model=64, heads=4, n_layers=2, d_ff=256, segment_len=64, positions="sinusoidal")
TRAINING = TrainConfig(
    model=NETWORK,
    tokens=3_000_000,
    batch_size=32,
    chunk_len=0,
    optimizer="muon",
    learning_rate=3e-3,
    muon_learning_rate=0.02,
    memory_warmup=0.0,  # the distances grow instead
    evaluations=8,
    log_every=20,
    precision="float32",  # in a network of this size, casts take as much time as faster products save
)
NO_MEMORY = Arm("no-memory", "No memory", "transformer")
SETTINGS: dict[Reach, Setting] = {
    "near": Setting(
        arms=(
            NO_MEMORY,
            Arm("transformer-xl", "Transformer-XL", "transformer-xl", mem_len=128),
            *compressive_arms(64, 64, 4),
            Arm("ceiling", "Transformer-XL, ceiling", "transformer-xl", mem_len=320),
        ),
        others=other_compressions(64, 64, 4),
        train=TRAINING,
    ),
    "far": Setting(
        arms=(
            NO_MEMORY,
            Arm("transformer-xl", "Transformer-XL", "transformer-xl", mem_len=256),
            *compressive_arms(32, 224, 9),
        ),
        others=other_compressions(32, 224, 9),
        stream=RecallStream(set_probability=16 / 600),
        train=TRAINING,
        growing=0.75,  # there are more octaves of distances
        evaluated=4096,
    ),
}
"""The settings by how far the memories reach: 384 positions, or more than 2,048."""
