"""The recall experiment: memories with equal numbers of keys in one network, on a stream that sets values and
asks for them."""

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from memformers.common.errors import UserError
from memformers.common.fields import Count, changed, check_fields
from memformers.comparison.arms import keys_of_layers, read_arms, settings_of
from memformers.comparison.experiment import Experiment, Settings
from memformers.comparison.recall_training import RECALL, RecallRun, RecallSettings
from memformers.data.recall_stream import RecallStream, ValueTokens
from memformers.models.config import ModelConfig
from memformers.runs.folder import Arm
from memformers.training.config import EvaluationConfig, OptimConfig, StepConfig, TrainConfig

QUICK_TOKENS, QUICK_EVALUATED = 65_536, 256
USUAL_JOBS: int = min(os.cpu_count() or 1, 2)
Reach = Literal["near", "far"]


def sees_back(model: ModelConfig) -> int:
    """The farthest position that one layer can look at, from the end of its segment."""
    return model.remembered_positions + model.segment_len


def paper_ablation(model: ModelConfig) -> list[Arm]:
    """The arms that the paper compares (Rae et al. 2020, section 3.2), with the lengths of ``model``: other
    functions f_c, and other losses of the convolution. Two arms are not the paper's: in one, f_c learns from
    attention reconstruction and from the language model's loss; one has slots only in the upper half of the
    layers, half as many as all others (Rae and Razavi 2020, arXiv 2007.03356)."""
    lower, slots = model.n_layers // 2, model.per_layer("c_mem_len")
    different: dict[str, tuple[str, Settings]] = {
        "bptt": ("conv. by BPTT", {"compression_loss": "none", "bptt": 1}),
        "max": ("max pooling", {"compression": "max"}),
        "auto-encoding": ("conv. by auto-encoding", {"compression_loss": "auto-encoding"}),
        "both-losses": ("f_c learns from both losses", {"compression_start": "mean", "bptt": 1}),
        "most-used": ("most-used", {"compression": "most-used"}),
        "dilated": ("dilated conv.", {"compression": "dilated"}),
        "conv": ("conv. from random weights", {}),
        "upper-half": ("conv., slots in the upper layers", {"c_mem_len": [0] * lower + list(slots[lower:])}),
    }
    return [compressive(name, model, label, **settings) for name, (label, settings) in different.items()]


def compressive(name: str, model: ModelConfig, label: str = "", **settings: Any) -> Arm:
    """An arm of the Compressive Transformer with the lengths of ``model`` and these ``settings``."""
    lengths = f"M = {model.mem_len}, C = {model.c_mem_len}, c = {model.compression_rate}"
    label = ", ".join(filter(None, ("Compressive", label, lengths)))
    dotted = {f"model.{setting}": value for setting, value in settings.items()}
    return Arm(name, {"model.model": "compressive", **dotted}, label)


def transformer_xl(name: str, mem_len: Any, label: str = "") -> Arm:
    """An arm of Transformer-XL that remembers ``mem_len`` positions."""
    label = ", ".join(filter(None, ("Transformer-XL", label, f"M = {mem_len}")))
    return Arm(name, {"model.model": "transformer-xl", "model.mem_len": mem_len}, label)


@dataclass(frozen=True)
class Setting:
    """What all arms of an experiment share: the network with the lengths of its memories, its training, the
    stream and the measurement."""

    train: TrainConfig
    """The training of the first seed."""
    recall: RecallSettings = field(default_factory=RecallSettings)
    ceiling: bool = False
    """Whether there is a Transformer-XL that sees as far back as the slots."""

    @property
    def arms(self) -> list[Arm]:
        """The arms that are trained if none is named: memories with equal keys, and controls."""
        model = self.train.model
        frozen = compressive("frozen", model, "f_c as drawn")
        reach = model.remembered_positions
        return [
            Arm("no-memory", {"model.model": "transformer"}, "No memory"),
            transformer_xl("transformer-xl", keys_of_layers(model)),
            compressive("compressive", model, compression_start="mean"),
            replace(frozen, settings=frozen.settings | {"recall.frozen": True}),
            compressive("mean", model, "mean pooling", compression="mean"),
            *([transformer_xl("ceiling", reach, "ceiling")] if self.ceiling else []),
        ]

    @property
    def more(self) -> Settings:
        """The settings of the task, which include the longest reach of the arms."""
        reach = sees_back(self.train.model)
        return {RECALL.name: asdict(replace(self.recall, reach=reach))}

    def arm(self, name: str) -> Arm:
        """The arm called ``name``; else UserError."""
        known = {arm.name: arm for arm in (*self.arms, *paper_ablation(self.train.model))}
        if name not in known:
            raise UserError(f"arm {name!r} is unknown; this reach has {', '.join(known)}.")
        return known[name]

    def run(self, name: str, seed: int = 0) -> RecallRun:
        """The training of the arm called ``name`` from ``seed``."""
        shared = {**asdict(self.train), **self.more, "seed": seed}
        return RECALL.parse(settings_of(self.arm(name), shared), name)


def network(mem_len: int, c_mem_len: int, compression_rate: int) -> ModelConfig:
    """The network of all arms, with the lengths of the Compressive Transformer's memories."""
    return ModelConfig(
        model="compressive", vocab_size=RecallStream().vocab_size, d_model=64, heads=4, n_layers=2, d_ff=256,
        segment_len=64, positions="sinusoidal", mem_len=mem_len, c_mem_len=c_mem_len,
        compression_rate=compression_rate,
    )  # fmt: skip


TRAINING = TrainConfig(
    tokens=3_000_000,
    batch_size=32,
    chunk_len=0,
    memory_warmup=0.0,  # the distances grow instead
    optim=OptimConfig(learning_rate=3e-3, muon_learning_rate=0.02),
    evaluation=EvaluationConfig(evaluations=8, log_every=20),
    step=StepConfig(precision="float32"),  # casts would take as much time as faster products save
)
SETTINGS: dict[Reach, Setting] = {
    "near": Setting(replace(TRAINING, model=network(64, 64, 4)), ceiling=True),
    "far": Setting(
        replace(TRAINING, model=network(32, 224, 9)),
        RecallSettings(
            stream=RecallStream(set_probability=16 / 600),
            growing=0.75,  # there are more octaves of distances
            evaluated=4096,
        ),
    ),
}
"""The settings by how far the memories reach: 384 positions, or more than 2,048."""


@dataclass(frozen=True)
class RecallConfig:
    """A recall experiment."""

    reach: Reach = "near"
    """How far back the memories reach: 384 positions (near) or more than 2,048 (far)."""
    seeds: Count = 2
    """How many times each arm is trained, each time from other weights and on another stream."""
    quick: bool = False
    """Whether to only check in a minute or two that everything works, with one seed and few tokens."""
    tokens: Count | None = None
    """The number of tokens of each training run, in place of the default of --reach."""
    arms: tuple[str, ...] = ()
    """Which arms to train; if none is named, no-memory, transformer-xl, compressive, frozen, mean, and near
    the ceiling. Others are bptt, max, auto-encoding, both-losses, most-used, dilated, conv and upper-half,
    and arms of your own, such as "c2: compression_rate=2"."""
    jobs: Count = USUAL_JOBS
    """The number of training runs at a time, each with --threads threads."""
    threads: Count = 1
    """The number of threads of each training run. Models of this size are hardly faster with two."""
    device: str = "auto"
    """Where to train, such as cpu or cuda:1; auto takes a GPU if there is one."""
    value_tokens: ValueTokens = None
    """How many tokens a value has, after the token of its key, as in multi-query associative recall; by
    default, one token says both the key and its value."""

    def __post_init__(self) -> None:
        """Raise UserError for settings that are out of range."""
        check_fields(self)
        _ = self.experiment

    @property
    def setting(self) -> Setting:
        """The setting that all arms share."""
        base = SETTINGS[self.reach]
        tokens = self.tokens or (QUICK_TOKENS if self.quick else base.train.tokens)
        stream = replace(base.recall.stream, value_tokens=self.value_tokens)
        recall, vocab_size = replace(base.recall, stream=stream), stream.vocab_size
        train = changed(base.train, tokens=tokens, device=self.device, vocab_size=vocab_size)
        if self.quick:
            train = changed(train, evaluations=1, log_every=5)
            recall = replace(recall, evaluated=QUICK_EVALUATED)
        return replace(base, train=train, recall=recall)

    @property
    def experiment(self) -> Experiment:
        """The experiment."""
        setting, described = self.setting, [text for text in self.arms if ":" in text or Path(text).is_file()]
        arms = [setting.arm(name) for name in self.arms if name not in described]
        arms += read_arms(described, {**asdict(setting.train), **setting.more})
        chosen, seeds = tuple(arms if self.arms else setting.arms), 1 if self.quick else self.seeds
        return Experiment(RECALL, setting.train, setting.more, chosen, seeds, self.jobs, self.threads)
