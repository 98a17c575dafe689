"""Resuming a training: whether the run in a folder is finished or may be continued with these settings, and
its state at the newest checkpoint."""

import json
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from memformers.common import files
from memformers.common.errors import UserError
from memformers.common.files import config_from_dict, numbered, read_json
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import CHECKPOINTS, METRICS, RESULT, flatten
from memformers.training.checkpoints import ABOUT, read_about, read_checkpoint
from memformers.training.config import TrainConfig
from memformers.training.distributed import SINGLE_PROCESS, Distributed
from memformers.training.optimizers import Optimizers
from memformers.training.state import TrainingState, has_ended

MAY_CHANGE_ON_RESUME = {
    "data", "validation", "test", "document_separator", "device", "checkpoint_every", "checkpoint_minutes",
    "keep_checkpoints", "parallel", "gradient_accumulation_steps", "activation_checkpointing",
}  # fmt: skip
"""Settings that affect results only by rounding, except that with documents, each part of a batch counts
alike in the auxiliary loss. Texts are compared by content. With dropout, ``gradient_accumulation_steps`` may
not change, since the parts of a batch draw their own random numbers."""


def is_finished(config: TrainConfig, previous: TrainConfig, folder: Path) -> bool:
    """Whether the run in ``folder``, with its ``previous`` config, has its result, and has seen the tokens
    that ``config`` asks for."""
    if not (folder / RESULT).exists():
        return False
    n_read = read_json(folder / RESULT, {"tokens": int})["tokens"]
    return config.max_tokens <= max(n_read, previous.max_tokens)


def check_same_config(config: TrainConfig, previous: TrainConfig, folder: Path) -> None:
    """Raise UserError if the run in ``folder``, with its ``previous`` config, would train differently."""
    if (folder / RESULT).exists() and config.max_tokens > previous.max_tokens:
        previous = replace(previous, max_tokens=config.max_tokens)
    changes = differences(asdict(previous), asdict(config))
    if changes:
        raise UserError(
            f"{folder} can't be resumed with other settings: {changes}. Leave them out, or start a new run. "
            f"(A finished run can be extended to more tokens.)"
        )


def differences(previous: dict[str, Any], current: dict[str, Any]) -> str:
    """The settings in which two configs would train differently, in words."""
    # Compare them as JSON, which has no tuples. A setting that is newer than a config had its default value
    # then.
    defaults = flat_json(asdict(TrainConfig()))
    settings = flat_json(current)
    previous_settings = {name: value for name, value in defaults.items() if name in settings}
    previous_settings |= flat_json(previous)
    names: set[str] = set()
    for name in settings.keys() | previous_settings.keys():
        if settings.get(name) != previous_settings.get(name):
            names.add(name)

    # What may change
    may_change = set(MAY_CHANGE_ON_RESUME)
    if settings.get("model.dropout"):
        may_change.remove("gradient_accumulation_steps")
    names = {name for name in names if name.rpartition(".")[2] not in may_change}
    both = (previous_settings, settings)
    if any(values.get("model.vocab_size") is None for values in both):
        names.discard("model.vocab_size")  # left to the text
    if any(values.get("step.precision") == "auto" for values in both):
        names.discard("step.precision")  # left to the device
    if all(str(values.get("tokenizer")).endswith(".json") for values in both):
        names.discard("tokenizer")  # the run has its own file, which is compared
    return ", ".join(f"{name} {previous_settings.get(name)} → {settings.get(name)}" for name in sorted(names))


def flat_json(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of ``config`` by their dotted names, as JSON has them."""
    return dict(flatten(json.loads(json.dumps(config))))


def restore_newest(
    folder: Path,
    model: MemoryLM,
    state: TrainingState,
    config: TrainConfig,
    ranks: Distributed = SINGLE_PROCESS,
) -> TrainingState:
    """Read the newest usable checkpoint of ``folder``, if there is one, into ``model`` and the optimizers of
    ``state``; returns its state. Later records are removed. UserError if none can be used, or if a run that
    has its result has none."""
    checkpoints = folder / CHECKPOINTS
    if ranks.first:
        files.remove_leftovers(checkpoints)
    ranks.barrier()
    folders = numbered(checkpoints)
    if not folders and (folder / RESULT).exists():
        raise UserError(
            f"{checkpoints} has no checkpoint to continue from; restore one, or name a new folder."
        )

    # The newest usable one. All ranks must find the same
    newest = None
    if folders:
        newest = files.newest_that_loads(
            folders, lambda path: restore(path, model, state.optimizers, config, ranks), say=ranks.first
        )
    ranks.check_alike(
        newest and newest[0].name,
        f"expected all processes to read the same checkpoints in {checkpoints}, got different ones; name a "
        f"folder that all of them share.",
    )
    if newest:
        path, state = newest
        describe_restored(path, state, config, ranks)
        if ranks.first:
            for broken in folders[: folders.index(path)]:
                files.move(broken, files.BROKEN)  # it would pass for the newest
    if ranks.first:
        state.records = cut_metrics(folder, state.records)
    return state


def restore(
    path: Path, model: MemoryLM, optimizers: Optimizers, config: TrainConfig, ranks: Distributed
) -> TrainingState:
    """Read the checkpoint in ``path``; UserError if a training of ``config`` can't continue from it."""
    state = read_checkpoint(path, model, optimizers, ranks)
    about = read_about(path)
    state.records = about["records"]
    state.peak_memory_bytes = about["peak_memory_bytes"] or 0
    made_with = config_from_dict(TrainConfig, about["config"], str(path / ABOUT))
    if made_with.max_tokens == config.max_tokens:
        return state

    # The training is extended: it begins with a new schedule and new evaluations.
    if not has_ended(state, made_with):
        raise UserError(f"it belongs to a training of {made_with.max_tokens:,} tokens, before its end.")
    if state.tokens < config.max_tokens:
        state.extended_at = state.tokens
        state.evaluations = 0
        state.lowest_loss = None
        state.evaluations_without_improvement = 0
    return state


def describe_restored(path: Path, state: TrainingState, config: TrainConfig, ranks: Distributed) -> None:
    ranks.say(f"continues at token {state.tokens:,}, from {path}")
    if state.extended_at == state.tokens > 0:
        ranks.say(
            f"trains on to token {config.max_tokens:,}: the learning rate rises again over "
            f"{config.optim.warmup_fraction:.0%} of the new part, then "
            f"schedule={config.optim.schedule!r} applies."
        )


def cut_metrics(folder: Path, records: int) -> int:
    """Keep the first ``records`` lines of a run's metrics; returns their number."""
    path = folder / METRICS
    if not path.exists():
        return 0
    with open(path, encoding="utf-8") as file:
        lines = [line for line in islice(file, records) if line.endswith("\n")]
    files.write_text(path, "".join(lines))
    return len(lines)
