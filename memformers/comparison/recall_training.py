"""The training and measurement of one arm of a recall experiment from one seed."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count, NonNegativeInt, Share
from memformers.common.files import config_from_dict, read_json, write_json
from memformers.common.machine import describe_environment, git_commit, peak_memory
from memformers.comparison.experiment import Task
from memformers.data.recall_stream import RecallStream, recall_segments
from memformers.evaluation.evaluate import BASELINE
from memformers.evaluation.memory_ablation import controls_of
from memformers.evaluation.recall_by_distance import RecallByDistance, distance_edges, recall_by_distance
from memformers.models.base import memory_facts
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import CONFIG, FACTS, RESULT, alone_in
from memformers.tracking.recorder import Tracking
from memformers.training.config import TrainConfig, train_config_from, unused_settings
from memformers.training.loop import TrainingState, train_steps
from memformers.training.run import build_model

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
        """The longest distance of a question in a segment, as a function of the position where the segment
        begins in its stream; None if there is no limit."""
        S, top = self.train.model.segment_len, 2 * self.recall.reach
        grown = self.recall.growing * self.train.tokens / self.train.batch_size
        if not grown:
            return None
        return lambda start: round(S * (top / S) ** (start / grown)) if start < grown else 2**60


@dataclass(frozen=True)
class RecallTask(Task):
    """Training runs on the recall stream, which measure the share of correct answers by distance."""

    name = "recall"
    resumes = False

    def parse(self, settings: Mapping[str, Any], source: str) -> RecallRun:
        """The run's TrainConfig, and what belongs to the task."""
        train = dict(settings)
        if not isinstance(recall := train.pop("recall", None), Mapping):
            raise UserError(f"{source}: expected the settings of a recall run, which have 'recall'.")
        return RecallRun(train_config_from(train, source), config_from_dict(RecallSettings, recall, source))

    def train(self, folder: Path) -> None:
        """Train from the beginning, and measure."""
        with alone_in(folder):
            train_recall(folder)


RECALL = RecallTask()


def train_recall(folder: Path) -> None:
    """Train the run that ``config.json`` in ``folder`` describes; save the model, measure it, and write
    ``result.json``.

    Raises UserError for another run's config, and [`memformers.training.loop.NotFiniteError`][] for a
    training that diverged.
    """
    settings = read_json(folder / CONFIG)
    run = RECALL.parse(settings, str(folder / CONFIG))
    name, S, model = folder.resolve().name, run.train.model.segment_len, build_model(run.train)
    if run.recall.frozen:
        for compress in model.transformer.compressions:
            compress.requires_grad_(False)
    of_memory = memory_facts(model.config)
    facts = {
        "corpus": {"name": "recall stream", "source": "drawn while it is read"},
        "parameters": sum(p.numel() for p in model.parameters()),
        **of_memory,
        "decided": run.train.resolved,
        "unused": unused_settings(run.train),
        "commit": git_commit(),
        "sees_back": of_memory["memory"]["one_layer"] + S,
        "environment": describe_environment(model.device),
    }
    write_json(folder / FACTS, facts)
    with Tracking(folder, name, {**settings, **facts}) as track:
        segments = recall_segments(
            run.recall.stream, run.train.batch_size, S, run.train.seed, longest=run.longest()
        )

        def record(state: TrainingState, metrics: Mapping[str, float]) -> None:
            track.record({"tokens": state.tokens, "seconds": state.seconds, **metrics})

        def evaluate(state: TrainingState) -> None:
            recall = measure(model, run, GLIMPSE * S)[BASELINE]
            bins = zip(recall.edges, recall.accuracy, strict=False)
            right = {f"recall.from_{edge:05}": share for edge, share in bins if share is not None}
            record(state, {"loss.valid": recall.loss, "accuracy.valid": recall.correct() or 0.0, **right})
            print(
                f"{name}: {min(state.tokens / run.train.tokens, 1):.0%}, {state.seconds:.0f} s, "
                f"{recall.within_reach or 0.0:.1%} answered correctly within its reach",
                flush=True,
            )

        state = train_steps(model, (s for s, _ in segments), run.train, record=record, evaluate=evaluate)
        peak = peak_memory(model.device)
        found = measure(model, run, run.recall.evaluated, controls=True)
    result = {**state.progress, "peak_memory_bytes": peak, "recall": asdict(untouched := found.pop(BASELINE))}
    result["within_reach"] = untouched.within_reach
    result["controls"] = {name: asdict(recall) for name, recall in found.items()}
    (folder / MODEL).mkdir(exist_ok=True)
    model.save_pretrained(folder / MODEL)
    write_json(folder / RESULT, result)


def measure(
    model: MemoryLM, run: RecallRun, positions: int, *, controls: bool = False
) -> dict[str, RecallByDistance]:
    """The recall of ``model`` over ``positions`` of each held-out stream, after those that the longest reach
    needs."""
    S = run.train.model.segment_len
    before, counted = (-(-length // S) for length in (run.recall.reach, positions))
    first = CHOOSING_SEED if run.recall.measured_for == "choosing" else CLAIMING_SEED
    segments = recall_segments(run.recall.stream, run.train.batch_size, S, first + run.train.seed)
    changes = controls_of(model.config.memory_sizes) if controls else {}
    return recall_by_distance(
        model,
        islice(segments, before + counted),
        distance_edges(run.recall.reach),  # the same for all arms
        warm_up=before * S,
        controls=changes,
    )
