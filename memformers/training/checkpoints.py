"""Checkpoints of a training: folders, named after the tokens seen, from which it resumes as if it had never
stopped; ``docs/checkpoints.md`` lists their files. Nothing is a pickle, and nothing is ever unpickled.
"""

import contextlib
import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from memformers.common import files
from memformers.common.fields import check_keys
from memformers.common.files import config_from_dict, numbered, read_json, user_path, write_json
from memformers.common.text import UserError
from memformers.data.dataset import DatasetInfo
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import save_tokenizer
from memformers.models.config import ModelConfig
from memformers.models.io import WEIGHTS, read_config, save_tensors
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.runs.folder import CHECKPOINTS, CONFIG, METRICS, RESULT, flatten
from memformers.runs.reader import read_facts
from memformers.training.config import TrainConfig, read_train_config
from memformers.training.distributed import SINGLE_PROCESS, Distributed
from memformers.training.loop import TrainingState, has_ended
from memformers.training.optimizers import Optimizers

BEST, STATE, RANDOM, ABOUT = "best", "state.json", "random.json", "training.json"
OPTIMIZER, MEMORY = "optimizer.safetensors", "memory.safetensors"
UNKNOWN = {"evaluated_tokens": 0}
"""What earlier versions did not say in ``training.json``."""
EVALUATED = {"validation_loss": float | None, "evaluated_tokens": int}
"""What it says of the evaluation at this checkpoint."""
MAY_CHANGE_ON_RESUME = {
    "data", "validation", "test", "document_separator", "device", "checkpoint_every", "checkpoint_minutes",
    "keep_checkpoints", "parallel", "gradient_accumulation_steps", "activation_checkpointing",
}  # fmt: skip
"""Settings that affect results only by rounding, except that of documents, each part of a batch counts alike
in the auxiliary loss. Of texts, the content is compared. With dropout, ``gradient_accumulation_steps`` may
not change, since the parts of a batch draw their own random numbers."""


def save_checkpoint(
    folder: Path,
    model: MemoryLM,
    tokenizer: Tokenizer,
    state: TrainingState,
    about: dict[str, Any],
    ranks: Distributed = SINGLE_PROCESS,
) -> None:
    """Write a checkpoint, which appears whole. All ``ranks`` must call this."""
    assert not state.unread  # nobody knows whether these steps were finite
    memory = {name: ranks.all_streams(x).cpu() for name, x in state.memory.tensors().items()}
    randomness = ranks.all_gather(random_states())
    if not ranks.first:
        return
    with files.atomic_dir(folder) as temporary:
        model.save_pretrained(temporary)
        states = optimizer_states(model, state.optimizers).items()
        tensors = {f"{name}/{key}": x for name, of in states for key, x in of.items()}
        save_tensors(tensors, temporary / OPTIMIZER)
        save_tensors(memory, temporary / MEMORY)
        save_tokenizer(tokenizer, temporary)
        elsewhere = ("optimizers", "memory", "unread", "records", "peak_memory_bytes")
        names = [f.name for f in fields(state) if f.name not in elsewhere]
        write_json(temporary / STATE, {name: getattr(state, name) for name in names})
        write_json(temporary / RANDOM, {"ranks": randomness})
        write_json(temporary / ABOUT, about)


def read_checkpoint(
    folder: Path,
    model: MemoryLM,
    optimizers: Optimizers,
    ranks: Distributed = SINGLE_PROCESS,
) -> TrainingState:
    """Read the checkpoint in ``folder`` into ``model``, the ``optimizers`` and the random states; returns its
    state. UserError if it can't be used; what its manifest lists is as it was written, and not checked."""
    files.check_manifest(folder)
    if (config := read_config(folder, ModelConfig)) != model.config:
        raise UserError(f"{folder} belongs to another model: {config}")
    weights, averages, memory_data = (load_file(folder / n) for n in (WEIGHTS, OPTIMIZER, MEMORY))
    memory = Memory.from_tensors(memory_data)
    memory = memory.map(lambda x: ranks.local_streams(x).to(model.device))
    numbers = read_json(folder / STATE) | {"optimizers": optimizers, "memory": memory}
    state = config_from_dict(TrainingState, numbers, str(folder / STATE))
    randomness = read_json(folder / RANDOM)["ranks"]
    if len(randomness) != ranks.size and (model.config.dropout or not randomness):
        raise UserError(
            f"{folder / RANDOM} was made by {len(randomness)} processes, now there are {ranks.size}; with "
            f"dropout={model.config.dropout}, each draws its own numbers, so start {len(randomness)}."
        )
    model.load_state_dict(weights)
    averages_of = optimizer_states(model, optimizers)
    for name, tensor in averages.items():
        parameter, _, key = name.rpartition("/")
        averages_of[parameter][key] = tensor.to(model.device)
    states = randomness[ranks.rank if len(randomness) == ranks.size else 0]
    cpu, *gpus = (
        torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
        for digits in (states["torch"], *states["cuda"])
    )
    torch.set_rng_state(cpu)
    if len(gpus) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(gpus)
    return state


def optimizer_states(model: nn.Module, optimizers: Optimizers) -> dict[str, dict[str, Tensor]]:
    """The state of each parameter that learns, by its name; empty before its first gradient."""
    of = {p: optimizer for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]}
    return {name: of[p].state[p] for name, p in model.named_parameters() if p in of}


def random_states() -> dict[str, Any]:
    gpus = torch.cuda.get_rng_state_all()
    return {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": [bytes(state.tolist()).hex() for state in gpus],
    }


def read_about(folder: Path) -> dict[str, Any]:
    files.check_manifest(folder, (ABOUT,))
    return read_json(folder / ABOUT)


def keep_best_and_newest(parent: Path, newest: int) -> None:
    """Delete the checkpoints in ``parent`` but the ``newest`` and the best, and link to the best.

    Losses are compared if they are of the same tokens: an extended training may evaluate more of the held-out
    text than before. The best checkpoint is that of the tokens that the newest evaluation read; the best ones
    of other evaluations, which nothing has measured against it, are kept too."""
    checkpoints = numbered(parent)  # the newest first
    best_by_tokens: dict[int, Path] = {}
    lowest: dict[int, float] = {}
    for checkpoint in checkpoints:
        try:
            about = UNKNOWN | read_about(checkpoint)
            check_keys(about, EVALUATED, str(checkpoint / ABOUT))
        except UserError:  # it is damaged, and may be deleted like one without an evaluation
            continue
        loss = about["validation_loss"]
        tokens = about["evaluated_tokens"]
        if loss is not None and loss < lowest.get(tokens, math.inf):
            lowest[tokens] = loss
            best_by_tokens[tokens] = checkpoint
    kept = {*checkpoints[:newest], *best_by_tokens.values()}
    if best_by_tokens:
        link_best(parent, next(iter(best_by_tokens.values())))
    for checkpoint in checkpoints:
        if checkpoint not in kept:
            files.remove(checkpoint)


def link_best(parent: Path, best: Path) -> None:
    """Link to the ``best`` checkpoint in ``parent``, if the file system has links."""
    link = parent / BEST
    temporary = parent / f"{files.UNFINISHED}{BEST}"
    if link.is_dir() and not link.is_symlink():  # of a run that was copied without links, and stale now
        files.remove(link)
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(best.name)
        temporary.replace(link)


def is_finished(config: TrainConfig, folder: Path) -> bool:
    """Whether the run in ``folder`` has its result, and has seen the tokens that ``config`` asks for."""
    if not (folder / RESULT).exists():
        return False
    seen = read_json(folder / RESULT, {"tokens": int})["tokens"]
    return config.max_tokens <= max(seen, read_train_config(folder).max_tokens)


def check_same_config(config: TrainConfig, folder: Path) -> None:
    if not (folder / CONFIG).exists():
        return
    before = read_train_config(folder)
    if (folder / RESULT).exists() and config.max_tokens > before.max_tokens:
        before = replace(before, max_tokens=config.max_tokens)
    if changes := differences(asdict(before), asdict(config)):
        raise UserError(
            f"{folder} can't be resumed with other settings: {changes}. Leave them out, or start a new run. "
            f"(A finished run can be extended to more tokens.)"
        )


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The settings in which two configs would train differently, in words."""
    # As JSON has them, which knows no tuples. A setting that is newer than a config was at its default then.
    configs = (asdict(TrainConfig()), before, now)
    usual, old, new = (dict(flatten(json.loads(json.dumps(config)))) for config in configs)
    old = {name: value for name, value in usual.items() if name in new} | old
    may_change = MAY_CHANGE_ON_RESUME - (
        {"gradient_accumulation_steps"} if new.get("model.dropout") else set()
    )
    names = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
    names -= {name for name in names if name.rpartition(".")[2] in may_change}
    if None in (old.get("model.vocab_size"), new.get("model.vocab_size")):
        names.discard("model.vocab_size")  # left to the text
    if "auto" in (old.get("step.precision"), new.get("step.precision")):
        names.discard("step.precision")  # left to the device
    if all(str(config.get("tokenizer")).endswith(".json") for config in (old, new)):
        names.discard("tokenizer")  # the run has its own file, which is compared
    return ", ".join(f"{name} {old.get(name)} → {new.get(name)}" for name in sorted(names))


def check_apart(folder: Path, *texts: str) -> None:
    if folder.resolve() in [user_path(text).resolve() for text in texts]:
        raise UserError(f"{folder} holds the texts to train on; name another folder for what is trained.")


def check_same_corpus(corpus: DatasetInfo, folder: Path) -> None:
    facts = read_facts(folder)
    if facts and (before := facts["corpus"])["sha256"] != corpus.sha256:
        raise UserError(
            f"{folder} was trained on {before['name']} ({before['source']}); the text from {corpus.source} "
            f"is a different one. Name the same text with data."
        )


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

    def read(path: Path) -> TrainingState:
        restored = read_checkpoint(path, model, state.optimizers, ranks)
        about = read_about(path)
        restored.records, restored.peak_memory_bytes = about["records"], about["peak_memory_bytes"] or 0
        made_with = config_from_dict(TrainConfig, about["config"], str(path / ABOUT))
        if made_with.max_tokens != config.max_tokens:
            if not has_ended(restored, made_with):
                raise UserError(
                    f"it belongs to a training of {made_with.max_tokens:,} tokens, before its end."
                )
            if restored.tokens < config.max_tokens:
                restored.extended_at, restored.evaluations = restored.tokens, 0
                restored.lowest_loss, restored.evaluations_without_improvement = None, 0
        return restored

    ranks.on_rank_zero(lambda: files.remove_leftovers(checkpoints))
    folders = numbered(checkpoints)
    if not folders and (folder / RESULT).exists():
        raise UserError(
            f"{checkpoints} has no checkpoint to continue from; restore one, or name a new folder."
        )
    newest = files.newest_that_loads(folders, read, say=ranks.first) if folders else None
    ranks.check_alike(
        newest and newest[0].name,
        f"expected all processes to read the same checkpoints in {checkpoints}, got different ones; name a "
        f"folder that all of them share.",
    )
    if newest:
        path, state = newest
        ranks.say(f"continues at token {state.tokens:,}, from {path}")
        if state.extended_at == state.tokens > 0:
            ranks.say(
                f"trains on to token {config.max_tokens:,}: the learning rate rises again over "
                f"{config.optim.warmup_fraction:.0%} of the new part, then "
                f"schedule={config.optim.schedule!r} applies."
            )
        if ranks.first:
            for later in folders[: folders.index(path)]:
                files.move(later, files.BROKEN)  # it would pass for the newest
    if ranks.first:
        state.records = cut_metrics(folder, state.records)
    return state


def cut_metrics(folder: Path, records: int) -> int:
    """Keep the first ``records`` lines of a run's metrics; returns their number."""
    path = folder / METRICS
    if not path.exists():
        return 0
    with open(path, encoding="utf-8") as file:
        kept = [line for line, _ in zip(file, range(records), strict=False) if line.endswith("\n")]
    files.write_text(path, "".join(kept))
    return len(kept)
