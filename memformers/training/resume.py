"""A run's folder taken up again where its newest checkpoint left it."""

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock, Timeout

from memformers.data.corpora import Corpus
from memformers.environment import describe_environment
from memformers.files import config_from_dict, read_json, write_text
from memformers.language_model import MemoryLM, ModelConfig
from memformers.run_folder import CHECKPOINTS, CONFIG, FACTS, METRICS
from memformers.sealed import newest_that_loads, numbered, remove_leftovers, say_passed_over, set_aside
from memformers.tracking import flatten
from memformers.training.checkpoints import ABOUT, Checkpoint, read_about, read_checkpoint
from memformers.training.config import TrainConfig
from memformers.training.ranks import Ranks
from memformers.training.state import TrainingState

T = TypeVar("T")
MAY_DIFFER = {
    "data", "device", "checkpoint_every", "keep_checkpoints", "skip_bad_steps",
    "parallel", "accumulate", "activation_checkpointing",
}  # fmt: skip
"""Settings that a resumed training may have otherwise: none changes what is learned from a good step but by
rounding, and the text itself is compared, not where it lies. With dropout, ``accumulate`` may not: other
parts of a batch draw other numbers."""


def check_same_config(config: TrainConfig, folder: Path) -> None:
    """Raise ValueError, naming the settings, unless ``config`` is that of the run in ``folder``, or no run
    was begun there."""
    if not (folder / CONFIG).exists():
        if (folder / METRICS).exists():
            raise ValueError(f"{folder} has metrics, but no {CONFIG}; it is no run that can be resumed.")
        return
    stored = config_from_dict(TrainConfig, read_json(folder / CONFIG), f"{folder / CONFIG}")
    if changes := differences(asdict(stored), asdict(config)):
        raise ValueError(
            f"{folder} can't be resumed with other settings: {changes}. Leave them out, or begin a new run. "
            f"(A longer training is a new one too, since the learning rate falls over tokens.)"
        )


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Where two configs would train differently, in words; empty if nowhere."""
    # As JSON has them, which knows no tuples.
    old, new = (dict(flatten(json.loads(json.dumps(config)))) for config in (before, now))
    may_differ = MAY_DIFFER - {"accumulate"} if new.get("model.dropout") else MAY_DIFFER
    names = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)} - may_differ
    if ModelConfig().vocab_size in (old.get("model.vocab_size"), new.get("model.vocab_size")):
        names.discard("model.vocab_size")  # left to the text
    return ", ".join(f"{name} {old.get(name)} → {new.get(name)}" for name in sorted(names))


def check_same_corpus(corpus: Corpus, folder: Path) -> None:
    """Raise ValueError unless ``corpus`` is that of the run in ``folder``, or no run was begun there."""
    if (folder / FACTS).exists():
        before = read_json(folder / FACTS).get("corpus", {})
        if before.get("sha256") != corpus.sha256:
            raise ValueError(
                f"{folder} was trained on {before.get('name')} ({before.get('source')}); the text from "
                f"{corpus.source} is another. Name the same with data."
            )


def go_on(
    folder: Path,
    model: MemoryLM,
    state: TrainingState,
    config: TrainConfig,
    corpus: Corpus,
    ranks: Ranks | None = None,
) -> tuple[TrainingState, int]:
    """The newest usable checkpoint of ``folder``, put into ``model`` and the optimizer of ``state``; returns
    its state and how many records belong to it. Later records are cut off. Without any checkpoint, the
    training begins anew.

    Raises ValueError where there are checkpoints, but none can be used.
    """
    ranks, checkpoints = ranks or Ranks(), folder / CHECKPOINTS
    if ranks.first:
        remove_leftovers(checkpoints)
    names = ranks.everyones([path.name for path in numbered(checkpoints)])[0]
    if not names:
        return state, cut_metrics(folder, 0) if ranks.first else 0
    folders = [checkpoints / name for name in names]
    path, (checkpoint, records) = newest_that_loads(
        folders,
        lambda path: alike_on_all(lambda: read(path, model, state, config, corpus, ranks), ranks),
        say_passed_over if ranks.first else lambda *_: None,
    )
    state = checkpoint.put(model, state.optimizer)
    if ranks.first:
        print(f"goes on at token {state.tokens:,}, from {path}")
        note_other_environment(path, model.device)
        for later in folders[: folders.index(path)]:
            set_aside(later)  # it would pass for the newest
        records = cut_metrics(folder, records)
    return state, records


def alike_on_all(make: Callable[[], T], ranks: Ranks) -> T:
    """What ``make`` gives; a ValueError that it raises on one rank is raised on all."""
    made, problem = None, ""
    try:
        made = make()
    except ValueError as error:
        problem = str(error)
    if problems := [problem for problem in ranks.everyones(problem) if problem]:
        raise ValueError(problems[0])
    assert made is not None
    return made


def read(
    path: Path, model: MemoryLM, state: TrainingState, config: TrainConfig, corpus: Corpus, ranks: Ranks
) -> tuple[Checkpoint, int]:
    """The checkpoint in ``path`` and how many records belong to it; ValueError for one that can't be used."""
    about = read_about(path)
    made_with = config_from_dict(TrainConfig, about.config, str(path / ABOUT))
    if about.corpus_sha256 != corpus.sha256:
        raise ValueError("it is of another text.")
    if changes := differences(asdict(made_with), asdict(config)):
        raise ValueError(f"it is another training's: {changes}.")
    return read_checkpoint(path, model, state.optimizer, config.batch_size, ranks), about.records


def note_other_environment(path: Path, device: torch.device) -> None:
    """Warn where the checkpoint in ``path`` was made with other versions or hardware."""
    before, now = (
        dict(flatten(environment))
        for environment in (read_about(path).environment, describe_environment(device))
    )
    if differing := [f"{k} {before.get(k)} → {now.get(k)}" for k in now if now[k] != before.get(k)]:
        warnings.warn(
            f"{path} was made elsewhere ({', '.join(differing)}); the training goes on, perhaps not bit "
            f"for bit.",
            RuntimeWarning,
            stacklevel=2,
        )


def cut_metrics(folder: Path, records: int) -> int:
    """Keep the first ``records`` lines of a run's metrics, since those after them will be made again; returns
    how many there are."""
    path = folder / METRICS
    if not path.exists():
        return 0
    with open(path, encoding="utf-8") as file:
        kept = [line for line, _ in zip(file, range(records), strict=False) if line.endswith("\n")]
    write_text(path, "".join(kept))
    return len(kept)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """A block in which no other process trains in ``folder``; ValueError where one does already."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"{folder} is being trained by another process.") from None
    except NotImplementedError:  # how filelock says that a file system has no locks
        print(
            f"{folder} lies where files can't be locked; let no other process train there.", file=sys.stderr
        )
    try:
        yield
    finally:
        lock.release()
