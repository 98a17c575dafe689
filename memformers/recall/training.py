"""The training and measurement of one arm from one seed, in the folder of a run."""

from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from memformers.common.files import write_json
from memformers.common.machine import describe_environment, peak_memory
from memformers.data.recall_stream import recall_segments
from memformers.evaluation.memory_ablation import UNTOUCHED, controls_of
from memformers.evaluation.recall_by_distance import Recall, recall_by_distance
from memformers.models.costs import memory_facts
from memformers.models.language_model import MemoryLM
from memformers.recall.config import ArmRun
from memformers.runs.folder import FACTS, RESULT
from memformers.tracking.recorder import Tracking
from memformers.training.loop import train
from memformers.training.run import build_model
from memformers.training.state import Progress

MODEL = "model"
"""The folder of the trained model, in the folder of its run."""
HELD_OUT_SEED = 2**62
"""The seed of the stream that is measured, the same for all arms and seeds."""
GLIMPSE = 4
"""The number of its segments that are measured during a training, after those that fill the memories."""


def train_arm(run: ArmRun, folder: Path, dashboard: str = "") -> None:
    """Train as ``run`` says in ``folder``, which exists; save the model, measure it, and write
    ``result.json``.

    Raises [`memformers.training.loop.NotFiniteError`][] for a training that diverged.
    """
    model = build_model(run.train)
    if run.more.frozen:
        for compress in model.transformer.compressions:
            compress.requires_grad_(False)
    facts = describe(run, model)
    run.save(folder)
    write_json(folder / FACTS, facts)
    name = f"{run.more.arm}, seed {run.train.seed}"
    with Tracking(
        folder, name, {**asdict(run.train), "recall": asdict(run.more), **facts}, dashboard
    ) as track:
        segments = recall_segments(
            run.more.stream,
            run.train.batch_size,
            run.train.model.segment_len,
            run.train.seed,
            longest=run.longest(),
        )

        def record(progress: Progress, metrics: dict[str, float]) -> None:
            track.record({"tokens": progress.tokens, "seconds": progress.seconds, **metrics})

        def evaluate(progress: Progress) -> None:
            recall = measure(model, run, GLIMPSE * run.train.model.segment_len)[UNTOUCHED]
            track.record({"tokens": progress.tokens, "seconds": progress.seconds, **curves(recall)})
            print(
                f"{name}: {progress.tokens / run.train.tokens:.0%}, {progress.seconds:.0f} s, "
                f"{recall.within_reach or 0.0:.1%} right within its reach",
                flush=True,
            )

        progress = train(model, (s for s, _ in segments), run.train, record=record, evaluate=evaluate)
        peak = peak_memory(model.device)
        found = measure(model, run, run.more.evaluated, controls=True)
    result = {**asdict(progress), "peak_memory_bytes": peak, "recall": asdict(found[UNTOUCHED])}
    result["within_reach"] = found[UNTOUCHED].within_reach
    result["controls"] = {name: asdict(recall) for name, recall in found.items() if name != UNTOUCHED}
    (folder / MODEL).mkdir(exist_ok=True)
    model.save_pretrained(folder / MODEL)
    write_json(folder / RESULT, result)


def measure(model: MemoryLM, run: ArmRun, positions: int, *, controls: bool = False) -> dict[str, Recall]:
    """The recall of ``model`` over ``positions`` of each held-out stream, after those that the longest reach
    needs."""
    S = run.train.model.segment_len
    before, counted = (-(-length // S) for length in (run.more.reach, positions))
    segments = recall_segments(run.more.stream, run.train.batch_size, S, HELD_OUT_SEED)
    changes = controls_of(model.config.lengths) if controls else {}
    return recall_by_distance(
        model, islice(segments, before + counted), run.more.edges, warm_up=before * S, controls=changes
    )


def curves(recall: Recall) -> dict[str, float]:
    """The record of an evaluation."""
    bins = zip(recall.edges, recall.accuracy, strict=False)
    right = {f"recall.from_{edge:05}": share for edge, share in bins if share is not None}
    asks = sum(recall.asks_by_place.values())
    correct = sum((recall.by_place[p] or 0.0) * n for p, n in recall.asks_by_place.items())
    return {"loss.valid": recall.loss, "accuracy.valid": correct / max(asks, 1), **right}


def describe(run: ArmRun, model: MemoryLM) -> dict[str, Any]:
    """The facts of ``run.json``."""
    facts = memory_facts(model.config)
    return {
        "corpus": {"name": "recall stream", "source": "drawn while it is read"},
        "parameters": sum(p.numel() for p in model.parameters()),
        **facts,
        "sees_back": facts["memory"]["one_layer"] + model.config.segment_len,
        "environment": describe_environment(model.device),
    }
