"""The recall experiment: memories with equal numbers of keys in one network, on a stream that sets values and
asks for them; and the training and measurement of each run."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count, NonNegativeInt, Share, check_fields, replace_nested
from memformers.common.files import config_from_dict, read_json, write_json
from memformers.common.machine import peak_memory
from memformers.comparison.arms import keys_of_layers, read_arms, settings_of
from memformers.comparison.experiment import Experiment, Settings, Task, train_alone
from memformers.data.recall_stream import RecallStream, recall_segments
from memformers.data.streams import Segment
from memformers.evaluation.memory_ablation import (
    RecallByDistance,
    controls_of,
    distance_edges,
    recall_by_distance,
)
from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import CONFIG, FACTS, RESULT, UNTOUCHED, Arm, alone_in
from memformers.tracking.recorder import Tracking
from memformers.training.config import EvaluationConfig, OptimConfig, StepConfig, TrainConfig
from memformers.training.distributed import with_precision
from memformers.training.job import build_model, describe_model
from memformers.training.state import TrainingState
from memformers.training.trainer import Monitor, Trainer

QUICK_TOKENS, QUICK_EVALUATED = 65_536, 256
USUAL_JOBS: int = min(os.cpu_count() or 1, 2)
Reach = Literal["near", "far"]
MODEL = "model"
"""The folder of the trained model, in the folder of its run."""
CHOOSING_SEED, CLAIMING_SEED = 2**62, 2**61
"""Where the seeds of measured streams begin, for experiments that choose settings and for reports that claim
something. A training run adds its own seed, so intervals over seeds are over measured streams too."""
GLIMPSE = 4
"""The number of its segments that are measured during a training run, after those that fill the memories."""


@dataclass(frozen=True)
class RecallSettings(Checked):
    """The settings of a run that are not in its TrainConfig."""

    stream: RecallStream = field(default_factory=RecallStream)
    growing: Share = 0.5
    """The fraction of the training in which the longest distance of a question grows, exponentially, from a
    segment to twice the longest reach; after that there is no limit. 0: there is never a limit."""
    evaluated: Count = 2048
    """Positions of each stream that are measured at the end, after those that fill the memories."""
    reach: NonNegativeInt = 0
    """The longest reach of all arms, in positions; it determines the distance bins."""
    frozen: bool = False
    """Whether f_c keeps its initial random weights."""
    measured_for: Literal["choosing", "claiming"] = "claiming"
    """Whether settings are chosen by the result, or something is claimed by it; the streams are others."""


@dataclass(frozen=True)
class RecallRun:
    """One arm's training from one seed."""

    train: TrainConfig
    recall: RecallSettings

    def longest(self) -> Callable[[int], int] | None:
        """The longest distance of a question, by the position at which its segment begins."""
        S, top = self.train.model.segment_len, 2 * self.recall.reach
        grown = self.recall.growing * self.train.max_tokens / self.train.batch_size
        if not grown:
            return None
        return lambda start: round(S * (top / S) ** (start / grown)) if start < grown else 2**60


@dataclass(frozen=True)
class RecallTask(Task):
    """Training runs on the recall stream, which measure the share of correct answers by distance."""

    name = "recall"
    module = "memformers.comparison.recall"
    resumes = False

    def parse(self, settings: Mapping[str, Any], source: str) -> RecallRun:
        train = dict(settings)
        if not isinstance(recall := train.pop("recall", None), Mapping):
            raise UserError(f"{source}: expected the settings of a recall run, which have 'recall'.")
        of_task = config_from_dict(RecallSettings, recall, source)
        return RecallRun(config_from_dict(TrainConfig, train, source), of_task)

    def segments(self, run: RecallRun, seed: int, **longest: Any) -> Iterator[tuple[Segment, Tensor]]:
        """What is read in training, and with other seeds to measure, with the distance of each question."""
        S = run.train.model.segment_len
        return recall_segments(run.recall.stream, run.train.batch_size, S, seed, **longest)

    def train(self, folder: Path) -> None:
        with alone_in(folder):
            train_recall(folder, self)


RECALL = RecallTask()


def train_recall(folder: Path, task: RecallTask = RECALL) -> None:
    settings = read_json(folder / CONFIG)
    run = task.parse(settings, str(folder / CONFIG))
    model = build_model(run.train)
    train = with_precision(run.train, model.device)
    if run.recall.frozen:
        for compress in model.transformer.compressions:
            compress.requires_grad_(False)
    corpus = {"name": "recall stream", "source": "drawn while it is read"}
    facts = {"corpus": corpus, **describe_model(run.train, model), "sees_back": layer_reach(model.config)}
    write_json(folder / FACTS, facts)
    name = folder.resolve().name
    with Tracking(folder, name, {**settings, **facts}) as tracking:
        questions = task.segments(run, run.train.seed, longest=run.longest())
        segments = (segment for segment, _ in questions)
        state = Trainer(model, segments, train, RecallMonitor(name, model, run, task, tracking)).fit()
        peak = peak_memory(model.device)
        began = time.perf_counter()
        recalls = measure(model, run, run.recall.evaluated, controls=True, task=task)
        state.evaluation_seconds += time.perf_counter() - began
    recall = recalls.pop(UNTOUCHED)
    result = {**state.progress, "peak_memory_bytes": peak, "recall": recall}
    model.save_pretrained(folder / MODEL)
    write_json(folder / RESULT, {**result, "within_reach": recall.within_reach, "controls": recalls})


@dataclass(frozen=True)
class RecallMonitor(Monitor):
    """Records a recall training, and measures a little of what its model recalls at each evaluation."""

    name: str
    model: MemoryLM
    run: RecallRun
    task: RecallTask
    tracking: Tracking

    def record(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        times = {"seconds": state.seconds, "evaluation_seconds": state.evaluation_seconds}
        self.tracking.record({"tokens": state.tokens, **times, **metrics})

    def evaluate(self, state: TrainingState) -> None:
        positions = GLIMPSE * self.run.train.model.segment_len
        recall = measure(self.model, self.run, positions, task=self.task)[UNTOUCHED]
        metrics = {"loss.valid": recall.loss, "accuracy.valid": recall.correct() or 0.0}
        for edge, share in zip(recall.edges, recall.accuracy, strict=False):
            if share is not None:
                metrics[f"recall.from_{edge:05}"] = share
        self.record(state, metrics)
        print(
            f"{self.name}: {min(state.tokens / self.run.train.max_tokens, 1):.0%}, {state.seconds:.0f} s, "
            f"{recall.within_reach or 0.0:.1%} answered correctly within its reach",
            flush=True,
        )


def measure(
    model: MemoryLM, run: RecallRun, positions: int, *, controls: bool = False, task: RecallTask = RECALL
) -> dict[str, RecallByDistance]:
    """The recall of ``model`` over ``positions`` of each held-out stream, after the longest reach."""
    S, edges = run.train.model.segment_len, distance_edges(run.recall.reach)  # the same for all arms
    before, counted = (-(-length // S) for length in (run.recall.reach, positions))
    first = CHOOSING_SEED if run.recall.measured_for == "choosing" else CLAIMING_SEED
    segments = task.segments(run, first + run.train.seed)
    changes = controls_of(model.config.memory_sizes) if controls else {}
    read = islice(segments, before + counted)
    return recall_by_distance(model, read, edges, warm_up=before * S, controls=changes)


def layer_reach(model: ModelConfig) -> int:
    return model.remembered_positions + model.segment_len


def paper_ablation(model: ModelConfig) -> list[Arm]:
    """The arms that the paper compares (Rae et al. 2020, section 3.2); f_c that learns from both losses; and
    slots only in the upper half of the layers (Rae and Razavi 2020, arXiv 2007.03356)."""
    lower, slots = model.n_layers // 2, list(model.per_layer("c_mem_len"))
    different: dict[str, tuple[str, Settings]] = {
        "bptt": ("conv. by BPTT", {"compression_loss": "none", "bptt": 1}),
        "max": ("max pooling", {"compression": "max"}),
        "both-losses": ("f_c learns from both losses", {"compression_start": "mean", "bptt": 1}),
        "dilated": ("dilated conv.", {"compression": "dilated"}),
        "conv": ("conv. from random weights", {}),
        "upper-half": ("conv., slots in the upper layers", {"c_mem_len": [0] * lower + slots[lower:]}),
    }
    return [compressive(name, model, label, **settings) for name, (label, settings) in different.items()]


def compressive(name: str, model: ModelConfig, label: str = "", **settings: Any) -> Arm:
    lengths = f"M = {model.mem_len}, C = {model.c_mem_len}, c = {model.compression_rate}"
    label = ", ".join(filter(None, ("Compressive", label, lengths)))
    dotted = {f"model.{setting}": value for setting, value in settings.items()}
    return Arm(name, {"model.model": "compressive", **dotted}, label)


def transformer_xl(name: str, mem_len: Any, label: str = "") -> Arm:
    label = ", ".join(filter(None, ("Transformer-XL", label, f"M = {mem_len}")))
    return Arm(name, {"model.model": "transformer-xl", "model.mem_len": mem_len}, label)


@dataclass(frozen=True)
class RecallSetup:
    """What all arms of an experiment share; the network has the lengths of the memories."""

    train: TrainConfig
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
        reach = layer_reach(self.train.model)
        return {RECALL.name: asdict(replace(self.recall, reach=reach))}

    def arm(self, name: str) -> Arm:
        known = {arm.name: arm for arm in (*self.arms, *paper_ablation(self.train.model))}
        if name not in known:
            raise UserError(f"arm {name!r} is unknown; this reach has {', '.join(known)}.")
        return known[name]

    def run(self, name: str, seed: int = 0) -> RecallRun:
        shared = {**asdict(self.train), **self.more, "seed": seed}
        return RECALL.parse(settings_of(self.arm(name), shared), name)


def network(mem_len: int, c_mem_len: int, compression_rate: int) -> ModelConfig:
    """The network of all arms, with the lengths of the Compressive Transformer's memories."""
    return ModelConfig(
        model="compressive", vocab_size=RecallStream().vocab_size, d_model=64, n_heads=4, n_layers=2,
        d_ff=256,
        segment_len=64, positions="sinusoidal", mem_len=mem_len, c_mem_len=c_mem_len,
        compression_rate=compression_rate,
    )  # fmt: skip


TRAINING = TrainConfig(
    max_tokens=3_000_000,
    batch_size=32,
    chunk_len=0,
    memory_warmup=0.0,  # the distances grow instead
    optim=OptimConfig(learning_rate=3e-3, muon_learning_rate=0.02),
    evaluation=EvaluationConfig(evaluations=8, log_every=20),
    step=StepConfig(precision="float32"),  # casts would take as much time as faster products save
)
SETTINGS: dict[Reach, RecallSetup] = {
    "near": RecallSetup(replace(TRAINING, model=network(64, 64, 4)), ceiling=True),
    "far": RecallSetup(
        replace(TRAINING, model=network(32, 224, 9)),
        RecallSettings(
            stream=RecallStream(set_probability=16 / 600),
            growing=0.75,  # there are more octaves of distances
            evaluated=4096,
        ),
    ),
}
"""The settings by how far slots reach: 320 or 2,048 tokens before the segment."""


@dataclass(frozen=True)
class RecallConfig:
    """A recall experiment."""

    reach: Reach = "near"
    """How many tokens before the segment the slots reach: 320 (near) or 2,048 (far)."""
    seeds: Count = 3
    """How many times each arm is trained, each time with different initial weights and another stream. Claims
    need at least 3."""
    quick: bool = False
    """Whether to only check in a minute or two that everything works, with one seed and few tokens."""
    tokens: Count | None = None
    """The number of tokens of each training run, instead of the default of --reach."""
    arms: tuple[str, ...] = ()
    """Which arms to train; if none is named, no-memory, transformer-xl, compressive, frozen, mean, and near
    the ceiling. Others are bptt, max, both-losses, dilated, conv and upper-half, or a name and settings, such
    as "c2: compression_rate=2"."""
    jobs: Count = USUAL_JOBS
    """The number of training runs at a time, each with --threads threads."""
    threads: Count = 1
    """The number of threads of each training run. Models of this size are hardly faster with two."""
    device: str = "auto"
    """Where to train, such as cpu or cuda:1; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.experiment

    @property
    def setting(self) -> RecallSetup:
        base = SETTINGS[self.reach]
        tokens = self.tokens or (QUICK_TOKENS if self.quick else base.train.max_tokens)
        train, recall = replace_nested(base.train, max_tokens=tokens, device=self.device), base.recall
        if self.quick:
            train = replace_nested(train, evaluations=1, log_every=5)
            recall = replace(recall, evaluated=QUICK_EVALUATED)
        return replace(base, train=train, recall=recall)

    @property
    def experiment(self) -> Experiment:
        setting, described = self.setting, [text for text in self.arms if ":" in text or Path(text).is_file()]
        arms = [setting.arm(name) for name in self.arms if name not in described]
        arms += read_arms(described, {**asdict(setting.train), **setting.more})
        chosen, seeds = tuple(arms if self.arms else setting.arms), 1 if self.quick else self.seeds
        scale = setting.train.max_tokens / SETTINGS[self.reach].train.max_tokens
        return Experiment(RECALL, setting.train, setting.more, chosen, seeds, self.jobs, self.threads, scale)


if __name__ == "__main__":
    train_alone(RECALL)
