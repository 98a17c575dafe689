"""Resuming a run from its newest checkpoint."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from filelock import Timeout

from memformers.common.atomic_dir import BROKEN, moved, newest_that_loads, numbered, remove_leftovers
from memformers.common.errors import UserError
from memformers.common.files import locked, read_json, write_text
from memformers.common.machine import describe_environment
from memformers.data.dataset import DatasetInfo
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import TOKENIZER
from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import CHECKPOINTS, CONFIG, METRICS, RESULT, flatten
from memformers.runs.reader import read_facts
from memformers.training.checkpoints import ABOUT, About, read_about, read_checkpoint
from memformers.training.config import TrainConfig, read_train_config, train_config_from
from memformers.training.distributed import SINGLE_PROCESS, Distributed
from memformers.training.loop import has_ended
from memformers.training.state import TrainingState

MAY_DIFFER = {
    "data", "document_separator", "device", "checkpoint_every", "checkpoint_minutes", "keep_checkpoints",
    "skip_bad_steps", "parallel", "accumulate", "activation_checkpointing",
}  # fmt: skip
"""Settings that may differ in a resumed training: they change the result of a step only by rounding, and for
the data, the text itself is compared and not its path. With dropout, ``accumulate`` may not differ, since
other parts of a batch draw other random numbers."""


def check_same_config(config: TrainConfig, folder: Path) -> None:
    """Raise ValueError, which names the settings, unless ``config`` is that of the run in ``folder``, or
    there is no run."""
    if not (folder / CONFIG).exists():
        return
    stored = read_train_config(folder)
    goes_on = (folder / RESULT).exists() and config.tokens > stored.tokens
    before = replace(stored, tokens=config.tokens) if goes_on else stored
    if changes := differences(asdict(before), asdict(config)):
        raise UserError(
            f"{folder} can't be resumed with other settings: {changes}. Leave them out, or begin a new run. "
            f"(A finished run can go on to more tokens.)"
        )


def is_finished(config: TrainConfig, folder: Path) -> bool:
    """Whether the run in ``folder`` has its result, and ``config`` asks for no more tokens."""
    return (folder / RESULT).exists() and read_train_config(folder).tokens >= config.tokens


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The settings in which two configs would train differently, in words; empty if there are none."""
    # As JSON has them, which knows no tuples. A setting that is newer than a config was at its default then.
    usual, old, new = (
        dict(flatten(json.loads(json.dumps(config)))) for config in (asdict(TrainConfig()), before, now)
    )
    old = {name: value for name, value in usual.items() if name in new} | old
    may_differ = MAY_DIFFER - {"accumulate"} if new.get("model.dropout") else MAY_DIFFER
    names = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
    names -= {name for name in names if name.rpartition(".")[2] in may_differ}
    if ModelConfig().vocab_size in (old.get("model.vocab_size"), new.get("model.vocab_size")):
        names.discard("model.vocab_size")  # left to the text
    if "auto" in (old.get("step.precision"), new.get("step.precision")):
        names.discard("step.precision")  # left to the device
    return ", ".join(f"{name} {old.get(name)} → {new.get(name)}" for name in sorted(names))


def check_apart(corpus: DatasetInfo, folder: Path) -> None:
    """Raise UserError for the folder of the documents themselves, to which a run or an experiment in
    ``folder`` would add its own files."""
    if Path(corpus.source).resolve() == folder.resolve():
        raise UserError(f"{folder} holds the texts to train on; name another folder for what is trained.")


def check_same_corpus(corpus: DatasetInfo, folder: Path) -> None:
    """Raise ValueError unless ``corpus`` is that of the run in ``folder``, or there is no run."""
    check_apart(corpus, folder)
    if facts := read_facts(folder):
        before = facts["corpus"]
        if before["sha256"] != corpus.sha256:
            raise UserError(
                f"{folder} was trained on {before['name']} ({before['source']}); the text from "
                f"{corpus.source} is a different one. Name the same text with data."
            )


def restore_newest(
    folder: Path,
    model: MemoryLM,
    state: TrainingState,
    config: TrainConfig,
    corpus: DatasetInfo,
    ranks: Distributed = SINGLE_PROCESS,
    tokenizer: Tokenizer | None = None,
) -> tuple[TrainingState, int]:
    """Read the newest usable checkpoint of ``folder`` into ``model`` and the optimizers of ``state``; returns
    its state and how many records belong to it. Later records are removed. Without any checkpoint, the
    training starts from the beginning.

    Raises UserError if there are checkpoints, but none can be used, or if ``ranks`` see different ones, and
    OSError if one can't be read. Then the folder has not changed.
    """
    checkpoints = folder / CHECKPOINTS

    def read(path: Path) -> tuple[TrainingState, About]:
        about = read_about(path)
        made_with = train_config_from(about.config, str(path / ABOUT))
        if about.corpus_sha256 != corpus.sha256:
            raise UserError("it belongs to another text.")
        if changes := differences(asdict(replace(made_with, tokens=config.tokens)), asdict(config)):
            raise UserError(f"it belongs to another training: {changes}.")
        found = read_checkpoint(path, model, state.optimizers, config.batch_size, ranks)
        if tokenizer and read_json(path / TOKENIZER) != tokenizer.to_json():
            raise UserError("it belongs to another tokenizer, so its tokens would be others; name its own.")
        if made_with.tokens != config.tokens:
            if not has_ended(found, made_with):
                raise UserError(f"it belongs to a training of {made_with.tokens:,} tokens, before its end.")
            found.go_on()
        return found, about

    ranks.first_alone(lambda: remove_leftovers(checkpoints))
    folders = numbered(checkpoints)
    newest = newest_that_loads(folders, read, say=ranks.first) if folders else None
    ranks.check_alike(
        newest and newest[0].name,
        f"expected all processes to read the same checkpoints in {checkpoints}, got different ones; name a "
        f"folder that all of them share.",
    )
    if not newest:
        return state, cut_metrics(folder, 0) if ranks.first else 0
    path, (found, about) = newest
    ranks.say(f"continues at token {found.tokens:,}, from {path}")
    if found.begun == found.tokens > 0:
        ranks.say(
            f"trains on to token {config.tokens:,}: the learning rate rises again over "
            f"{config.optim.warmup:.0%} of the new part and goes on as "
            f"schedule={config.optim.schedule!r} says."
        )
    if not ranks.first:
        return found, 0
    before, now = (dict(flatten(each)) for each in (about.environment, describe_environment(model.device)))
    if changed := [f"{name} {before.get(name)} → {x}" for name, x in now.items() if x != before.get(name)]:
        warnings.warn(
            f"{path} was made in another environment ({', '.join(changed)}); the training continues, perhaps "
            f"not bit for bit as before.",
            RuntimeWarning,
            stacklevel=2,
        )
    for later in folders[: folders.index(path)]:
        moved(later, BROKEN)  # it would pass for the newest
    return found, cut_metrics(folder, about.records)


def cut_metrics(folder: Path, records: int) -> int:
    """Keep the first ``records`` lines of a run's metrics, since the later ones will be written again;
    returns how many there are."""
    path = folder / METRICS
    if not path.exists():
        return 0
    with open(path, encoding="utf-8") as file:
        kept = [line for line, _ in zip(file, range(records), strict=False) if line.endswith("\n")]
    write_text(path, "".join(kept))
    return len(kept)


@contextmanager
def alone_in(folder: Path, ranks: Distributed = SINGLE_PROCESS, seconds: float = 0.0) -> Iterator[None]:
    """A block in which no other training uses ``folder``, which is made if it is missing; UserError if one
    does for as many ``seconds``."""
    if not ranks.first:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = locked(folder / ".lock", seconds)
    except Timeout:
        raise UserError(f"{folder} is being trained by another process.") from None
    with lock:
        yield
