"""Checkpoints of a training: folders, named after the tokens seen, from which it resumes as if it had never
stopped; ``docs/checkpoints.md`` lists their files. Nothing is a pickle, and nothing is ever unpickled.
"""

import contextlib
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from memformers.common import files
from memformers.common.errors import UserError
from memformers.common.fields import check_keys
from memformers.common.files import config_from_dict, numbered, read_json, write_json
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import save_tokenizer
from memformers.models.config import ModelConfig
from memformers.models.io import WEIGHTS, read_config, save_tensors
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.training.distributed import SINGLE_PROCESS, Distributed
from memformers.training.optimizers import Optimizers
from memformers.training.state import TrainingState

BEST = "best"
"""The link to the checkpoint with the lowest held-out loss."""
STATE = "state.json"
ABOUT = "training.json"
OPTIMIZER = "optimizer.safetensors"
MEMORY = "memory.safetensors"
RANDOM = "random"
"""The prefix of random states among the optimizer's tensors: random, rank and device, with / between them."""
NOT_IN_STATE = {"optimizers", "memory", "pending", "records", "peak_memory_bytes"}
"""Fields of the training's state that other files have, or that are empty at a checkpoint."""
UNKNOWN = {"evaluated_tokens": 0}
"""Values of the fields that earlier versions did not write to ``training.json``."""
EVALUATED = {"validation_loss": float | None, "evaluated_tokens": int}
"""Its fields about the evaluation at this checkpoint."""


def save_checkpoint(
    folder: Path,
    model: MemoryLM,
    tokenizer: Tokenizer,
    state: TrainingState,
    about: dict[str, Any],
    ranks: Distributed = SINGLE_PROCESS,
) -> None:
    """Write a checkpoint, which appears whole. All ``ranks`` must call this."""
    assert not state.pending  # losses of these steps haven't been checked yet

    # State of each rank
    memory = {}
    for name, tensor in state.memory.tensors().items():
        memory[name] = ranks.all_streams(tensor).cpu()
    randomness = ranks.all_gather(random_states())
    if not ranks.first:
        return

    # Weights, tokenizer
    with files.atomic_dir(folder) as temporary:
        model.save_pretrained(temporary)
        save_tokenizer(tokenizer, temporary)

        # Optimizers and random states
        tensors = {}
        for parameter, moments in optimizer_states(model, state.optimizers).items():
            for name, tensor in moments.items():
                tensors[f"{parameter}/{name}"] = tensor
        for rank, states in enumerate(randomness):
            for device, tensor in states.items():
                tensors[f"{RANDOM}/{rank}/{device}"] = tensor
        save_tensors(tensors, temporary / OPTIMIZER)

        # Memory, counters
        save_tensors(memory, temporary / MEMORY)
        names = [field.name for field in fields(state) if field.name not in NOT_IN_STATE]
        write_json(temporary / STATE, {name: getattr(state, name) for name in names})
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
    config = read_config(folder, ModelConfig)
    if config != model.config:
        raise UserError(f"{folder} belongs to another model: {config}")

    # Read everything, before anything is changed
    weights = load_file(folder / WEIGHTS)
    moments, randomness = read_optimizer(folder)
    memory = Memory.from_tensors(load_file(folder / MEMORY))
    memory = memory.map(lambda x: ranks.local_streams(x).to(model.device))
    values = read_json(folder / STATE) | {"optimizers": optimizers, "memory": memory}
    state = config_from_dict(TrainingState, values, str(folder / STATE))
    n_ranks = len(randomness)
    if n_ranks != ranks.size and (model.config.dropout or not randomness):
        raise UserError(
            f"{folder / OPTIMIZER} has the random states of {n_ranks} processes, now there are {ranks.size}; "
            f"with dropout={model.config.dropout}, each draws its own numbers, so start {n_ranks}."
        )

    # Restore it
    model.load_state_dict(weights)
    states = optimizer_states(model, optimizers)
    for (parameter, name), tensor in moments.items():
        states[parameter][name] = tensor.to(model.device)
    set_random_states(randomness[ranks.rank if n_ranks == ranks.size else 0])
    return state


def read_optimizer(folder: Path) -> tuple[dict[tuple[str, str], Tensor], list[dict[str, Tensor]]]:
    """The moments in a checkpoint, by parameter and name; and the random states of each rank, by device."""
    moments: dict[tuple[str, str], Tensor] = {}
    randomness: dict[int, dict[str, Tensor]] = {}
    for key, tensor in load_file(folder / OPTIMIZER).items():
        owner, _, name = key.rpartition("/")
        prefix, _, rank = owner.partition("/")
        if prefix == RANDOM:
            randomness.setdefault(int(rank), {})[name] = tensor
        else:
            moments[owner, name] = tensor
    return moments, [randomness[rank] for rank in sorted(randomness)]


def optimizer_states(model: nn.Module, optimizers: Optimizers) -> dict[str, dict[str, Tensor]]:
    """The state of each parameter that learns, by its name; empty before its first gradient."""
    owners: dict[Tensor, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            owners |= dict.fromkeys(group["params"], optimizer)
    return {name: owners[p].state[p] for name, p in model.named_parameters() if p in owners}


def random_states() -> dict[str, Tensor]:
    """The states of this process's random number generators, as bytes, by device."""
    states = {"cpu": torch.get_rng_state()}
    for i, state in enumerate(torch.cuda.get_rng_state_all()):
        states[f"cuda{i}"] = state
    return states


def set_random_states(states: dict[str, Tensor]) -> None:
    """Restore what [`random_states`][] returned; for GPUs, only if their number is the same."""
    torch.set_rng_state(states["cpu"])
    n_gpus = torch.cuda.device_count()
    if len(states) == 1 + n_gpus:
        torch.cuda.set_rng_state_all([states[f"cuda{i}"] for i in range(n_gpus)])


def read_about(folder: Path) -> dict[str, Any]:
    files.check_manifest(folder, (ABOUT,))
    return read_json(folder / ABOUT)


def keep_best_and_newest(parent: Path, newest: int) -> None:
    """Delete the checkpoints in ``parent`` but the ``newest`` and the best, and link to the best.

    Losses are compared if they are of the same tokens: an extended training may evaluate more of the held-out
    text than before. The best checkpoint is the best one on the tokens that the newest evaluation read. The
    best ones on other tokens can't be compared with it, so they are kept, too."""
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
        best = next(iter(best_by_tokens.values()))  # on the tokens of the newest evaluation
        link_best(parent, best)
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
