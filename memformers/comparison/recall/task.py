"""The task of the recall experiment: the settings, the training and the measurement of one run."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from memformers.common.fields import Checked, Count, NonNegativeInt, Share
from memformers.common.files import read_json, write_json
from memformers.common.machine import peak_memory
from memformers.comparison.recall.measurement import (
    RecallByDistance,
    distance_edges,
    recall_by_distance,
)
from memformers.comparison.task import Task
from memformers.data.recall_stream import RecallStream, recall_segments
from memformers.data.streams import Segment
from memformers.evaluation.controls import controls_of
from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import CONFIG, FACTS, RESULT, UNTOUCHED, alone_in
from memformers.tracking.recorder import Tracking
from memformers.training.config import TrainConfig
from memformers.training.distributed import with_precision
from memformers.training.job import build_model, describe_model
from memformers.training.state import TrainingState
from memformers.training.trainer import Monitor, Trainer

MODEL = "model"
"""The folder of the trained model, in the folder of its run."""
CHOOSING_SEED = 2**62
CLAIMING_SEED = 2**61
"""Where the seeds of measured streams begin, for experiments that choose settings and for reports that claim
something. A training run adds its seed, so intervals over seeds are over measured streams too."""
GLIMPSE = 4
"""The number of its segments that are measured during a training run, after those that fill the memories."""
NO_LIMIT = 2**60
"""A distance that no question has."""


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
    """Whether settings are chosen by the result, or something is claimed by it; the streams are disjoint."""


@dataclass(frozen=True)
class RecallRun(TrainConfig):
    """One arm's training from one seed."""

    recall: RecallSettings = field(kw_only=True)
    """What is asked, and how it is measured."""

    def longest(self) -> Callable[[int], int] | None:
        """The longest distance of a question, by the position at which its segment begins; None for no
        limit."""
        shortest = self.model.segment_len
        farthest = 2 * self.recall.reach
        n_growing = self.recall.growing * self.max_tokens / self.batch_size  # positions
        if not n_growing:
            return None

        def limit(position: int) -> int:
            if position >= n_growing:
                return NO_LIMIT
            return round(shortest * (farthest / shortest) ** (position / n_growing))

        return limit


@dataclass(frozen=True)
class RecallTask(Task[RecallRun]):
    """Training runs on the recall stream, which measure the share of correct answers by distance."""

    name = "recall"
    config = RecallRun
    module = "memformers.comparison.recall"
    resumes = False

    def segments(self, run: RecallRun, seed: int, **longest: Any) -> Iterator[tuple[Segment, Tensor]]:
        """What is read in training, and with other seeds to measure, with the distance of each question."""
        return recall_segments(run.recall.stream, run.batch_size, run.model.segment_len, seed, **longest)

    def train(self, folder: Path) -> None:
        with alone_in(folder):
            train_recall(folder, self)


RECALL = RecallTask()


def train_recall(folder: Path, task: RecallTask = RECALL) -> None:
    """Train and measure the run that ``config.json`` in ``folder`` describes."""
    run = task.read_config(read_json(folder / CONFIG), str(folder / CONFIG))
    model = build_model(run)
    if run.recall.frozen:
        for compress in model.transformer.compressions:
            compress.requires_grad_(False)
    corpus = {"name": "recall stream", "source": "drawn while it is read"}
    facts = {"corpus": corpus, **describe_model(run, model), "sees_back": layer_reach(model.config)}
    write_json(folder / FACTS, facts)

    name = folder.resolve().name
    with Tracking(folder, name, {**asdict(run), **facts}) as tracking:
        # The training.
        questions = task.segments(run, run.seed, longest=run.longest())
        segments = (segment for segment, _ in questions)
        config = with_precision(run, model.device)
        state = Trainer(model, segments, config, RecallMonitor(name, model, run, task, tracking)).fit()
        peak = peak_memory(model.device)

        # The measurement of its result.
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
        n_positions = GLIMPSE * self.run.model.segment_len
        recall = measure(self.model, self.run, n_positions, task=self.task)[UNTOUCHED]
        metrics = {"loss.valid": recall.loss, "accuracy.valid": recall.correct() or 0.0}
        for edge, share in zip(recall.edges, recall.accuracy, strict=False):
            if share is not None:
                metrics[f"recall.from_{edge:05}"] = share
        self.record(state, metrics)
        print(
            f"{self.name}: {min(state.tokens / self.run.max_tokens, 1):.0%}, {state.seconds:.0f} s, "
            f"{recall.within_reach or 0.0:.1%} answered correctly within its reach",
            flush=True,
        )


def measure(
    model: MemoryLM, run: RecallRun, n_positions: int, *, controls: bool = False, task: RecallTask = RECALL
) -> dict[str, RecallByDistance]:
    """The recall of ``model`` over ``n_positions`` of each held-out stream, after the longest reach."""
    S = run.model.segment_len
    n_warm_up = -(-run.recall.reach // S)  # segments, the same number for all arms
    n_counted = -(-n_positions // S)
    first_seed = CHOOSING_SEED if run.recall.measured_for == "choosing" else CLAIMING_SEED
    segments = task.segments(run, first_seed + run.seed)
    return recall_by_distance(
        model,
        islice(segments, n_warm_up + n_counted),
        distance_edges(run.recall.reach),
        warm_up=n_warm_up * S,
        controls=controls_of(model.config.memory_sizes) if controls else {},
    )


def layer_reach(model: ModelConfig) -> int:
    """How many positions back a layer sees from the end of a segment."""
    return model.remembered_positions + model.segment_len
