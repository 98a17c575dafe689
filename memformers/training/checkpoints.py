"""Checkpoints of a training: folders from which it continues as if it had never stopped.

checkpoints/000000204800/     named after the tokens seen
  config.json, model.safetensors, tokenizer.json     the model, as from_pretrained takes it
  optimizer.safetensors       what the optimizers remember, each tensor under its parameter's name
  memory.safetensors          memory and compressed memory of the streams, a tensor a layer
  state.json                  steps, tokens, the streams' position, the sums of the next record
  random.json                 random states
  training.json               the run's config, its corpus's checksum, versions, the validation loss
  manifest.json               size and SHA-256 of each of these
checkpoints/best              a link to the one of the lowest validation loss

Nothing in them is a pickle, and nothing is ever unpickled.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from memformers.common.atomic_dir import LEFTOVER, atomic_dir, check_manifest, numbered, remove
from memformers.common.errors import UserError
from memformers.common.files import config_from_dict, read_json, write_json
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import save_tokenizer
from memformers.models.config import ModelConfig
from memformers.models.io import read_config
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory, memory_from_tensors, memory_tensors
from memformers.training.distributed import ALONE, Distributed, full_tensor, placed_like
from memformers.training.optimizers import Muon, Optimizers
from memformers.training.state import TrainingState, check_random_states, random_states, set_random_states

BEST = "best"
OPTIMIZER, MEMORY = "optimizer.safetensors", "memory.safetensors"
KEPT: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "step"),
    Muon: ("momentum",),
}
"""The state of each optimizer for a parameter."""
SETTINGS = ("betas", "eps", "momentum", "weight_decay")
"""The settings of a group of parameters that are saved, as far as its optimizer has them."""
STATE, RANDOM, ABOUT = "state.json", "random.json", "training.json"
FILES = ("config.json", "model.safetensors", "tokenizer.json", OPTIMIZER, MEMORY, STATE, RANDOM, ABOUT)


@dataclass(frozen=True)
class About:
    """What a checkpoint records in addition to the state of the training."""

    config: dict[str, Any]
    """The run's TrainConfig."""
    corpus_sha256: str
    environment: dict[str, Any]
    """Hardware and versions it was made with."""
    records: int
    """How many lines of metrics.jsonl belong to the training so far."""
    validation_loss: float | None
    """In nats per token; None if there was no evaluation."""
    peak_memory_bytes: int | None = None
    """The peak memory of any process of the run; None if the system doesn't report it."""


def save_checkpoint(
    folder: Path,
    model: MemoryLM,
    tokenizer: Tokenizer,
    state: TrainingState,
    about: About,
    ranks: Distributed = ALONE,
) -> None:
    """Write a checkpoint that appears as ``folder`` when it is complete and on the disk.

    All ``ranks`` must call this, and the first one writes. Raises OSError if it can't be written; then no
    other checkpoint has changed.
    """
    weights = {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}
    moments = optimizer_tensors(model, state.optimizers)
    memory = memory_tensors(ranks.all_memory(state.memory))
    randomness = ranks.all_gather(random_states())
    if not ranks.first:
        return
    try:
        with atomic_dir(folder) as temporary:
            model.save_pretrained(temporary, weights)
            save_tokenizer(tokenizer, temporary)
            save_file(moments, temporary / OPTIMIZER)
            save_file(memory, temporary / MEMORY)
            write_json(temporary / STATE, state_numbers(model, state))
            write_json(temporary / RANDOM, {"ranks": randomness})
            write_json(temporary / ABOUT, asdict(about))
    except SafetensorError as error:  # how safetensors says that a disk is full
        raise OSError(str(error)) from None


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint that [`read_checkpoint`][] has read, before they are used."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    randomness: dict[str, Any]
    state: TrainingState
    """The state it was made in, with the memory of this rank's streams."""

    def restore(self, model: nn.Module, optimizers: Optimizers) -> TrainingState:
        """Restore weights, optimizers and random states; returns the state. All ranks must call this."""
        parameters, named = model.state_dict(), named_state(model, optimizers)
        model.load_state_dict(
            {name: placed_like(tensor, parameters[name]) for name, tensor in self.weights.items()}
        )
        for optimizer in optimizers:
            optimizer.state.clear()
        for key, tensor in self.moments.items():
            name, _, what = key.rpartition("/")
            parameter, optimizer = named[name]
            optimizer.state[parameter][what] = placed_like(tensor, parameter)
        set_random_states(self.randomness)
        return self.state


def read_checkpoint(
    folder: Path,
    model: MemoryLM,
    optimizers: Optimizers,
    batch_size: int,
    ranks: Distributed = ALONE,
) -> Checkpoint:
    """The checkpoint in ``folder`` of a training of ``model`` with ``optimizers``, checked.

    Raises ValueError for a checkpoint that has changed since it was written, or of another model or version;
    and with dropout, which is random on each rank, for one of another number of ``ranks``.
    """
    check_manifest(folder, FILES)
    if (config := read_config(folder, ModelConfig)) != model.config:
        raise UserError(f"{folder} belongs to another model: {config}")
    numbers = read_json(folder / STATE)
    if numbers.pop("optimizer", None) != json.loads(json.dumps(describe_optimizers(model, optimizers))):
        raise UserError(f"{folder / STATE} belongs to another optimizer.")
    weights, moments = load_tensors(folder / "model.safetensors"), load_tensors(folder / OPTIMIZER)
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    check_shapes(weights, own, folder / "model.safetensors")
    check_shapes(moments, moment_shapes(model, optimizers, moments), folder / OPTIMIZER)
    memory = ranks.own_memory(load_memory(folder / MEMORY, model, batch_size))
    held = {"optimizers": optimizers, "memory": memory}
    state = config_from_dict(TrainingState, numbers | held, str(folder / STATE))
    randomness = own_randomness(folder / RANDOM, ranks, model.config.dropout)
    check_random_states(randomness)
    return Checkpoint(weights, moments, randomness, state)


def own_randomness(path: Path, ranks: Distributed, dropout: float) -> dict[str, Any]:
    """This rank's random states in ``path``, or the first rank's if the number of ranks doesn't matter."""
    states = read_json(path).get("ranks")
    if not isinstance(states, list) or not states:
        raise UserError(f"{path} holds no random states.")
    if len(states) == ranks.size:
        return states[ranks.rank]
    if dropout:
        raise UserError(
            f"{path} was made by {len(states)} processes, but there are {ranks.size} now; with dropout="
            f"{dropout}, each process draws its own numbers, so start {len(states)} processes."
        )
    return states[0]


def read_about(folder: Path) -> About:
    """The [`About`][] of the checkpoint in ``folder``; else ValueError."""
    check_manifest(folder, (ABOUT,))
    return config_from_dict(About, read_json(folder / ABOUT), str(folder / ABOUT))


def keep_best_and_newest(parent: Path, newest: int) -> None:
    """Link to the best checkpoint in ``parent``, and delete all others but the ``newest`` ones."""
    folders = numbered(parent)
    abouts = {folder: about for folder in folders if (about := usable_about(folder))}
    losses = {f: about.validation_loss for f, about in abouts.items() if about.validation_loss is not None}
    best = min(losses, key=losses.__getitem__, default=None)
    if best is not None:
        link(parent / BEST, best.name)
    for folder in folders[newest:]:
        if folder != best:
            remove(folder)


def usable_about(folder: Path) -> About | None:
    """The [`About`][] of the checkpoint in ``folder``, or None if it can't be used."""
    with contextlib.suppress(ValueError):
        return read_about(folder)
    return None


def link(path: Path, target: str) -> None:
    """Make the symbolic link ``path`` to ``target`` beside it, if the file system supports links."""
    temporary = path.with_name(f"{LEFTOVER}{path.name}")
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(path)


def state_numbers(model: MemoryLM, state: TrainingState) -> dict[str, Any]:
    """The parts of ``state`` that are not tensors. The numbers of all its steps must be read."""
    assert not state.pending
    others = ("optimizers", "memory", "pending")
    numbers = {f.name: getattr(state, f.name) for f in fields(state) if f.name not in others}
    learning = describe_optimizers(model, state.optimizers)
    return {**numbers, "window": asdict(state.window), "optimizer": learning}


def describe_optimizers(model: MemoryLM, optimizers: Optimizers) -> list[dict[str, Any]]:
    """Their settings and the names of their parameters, a dict a group; the learning rate is left out, since
    every step sets it."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        {
            **{name: group[name] for name in SETTINGS if name in group},
            "parameters": [names[parameter] for parameter in group["params"]],
        }
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def named_state(model: nn.Module, optimizers: Optimizers) -> dict[str, tuple[Tensor, torch.optim.Optimizer]]:
    """Each parameter and its optimizer, by the parameter's name; of any shape."""
    of = {p: optimizer for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]}
    return {name: (p, of[p]) for name, p in model.named_parameters() if p in of}  # others are frozen


def optimizer_tensors(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """What the optimizers remember, as ``parameter/what``; nothing of a parameter without a gradient yet."""
    return {
        f"{name}/{what}": full_tensor(tensor)
        for name, (parameter, optimizer) in named_state(model, optimizers).items()
        for what, tensor in optimizer.state.get(parameter, {}).items()
    }


def moment_shapes(
    model: MemoryLM, optimizers: Optimizers, kept: Mapping[str, Tensor]
) -> dict[str, tuple[int, ...]]:
    """The shapes of the optimizers' tensors, for all parameters that have some; Muon's have all of them or
    none, since each step has a gradient for every matrix of the layers."""
    known, named = {key.rpartition("/")[0] for key in kept}, named_state(model, optimizers)
    begun = {optimizer for name, (_, optimizer) in named.items() if name in known}
    return {
        f"{name}/{what}": () if what == "step" else tuple(parameter.shape)
        for name, (parameter, optimizer) in named.items()
        for what in KEPT[type(optimizer)]
        if name in known or (isinstance(optimizer, Muon) and optimizer in begun)
    }


def check_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raise ValueError unless these are exactly the tensors expected, by name and shape."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n)):
        raise UserError(
            f"{path} belongs to another model: {wrong[0]} is {found.get(wrong[0])}, but "
            f"{expected.get(wrong[0])} was expected."
        )


def load_memory(path: Path, model: MemoryLM, batch_size: int) -> Memory:
    """The memory in ``path``, on the model's device; ValueError for a memory that doesn't fit the model."""
    tensors = {name: tensor.to(model.device) for name, tensor in load_tensors(path).items()}
    try:
        memory = memory_from_tensors(tensors, model.config.n_layers)
        model.check_memory(memory, batch_size)
    except ValueError as error:
        raise UserError(f"{path} can't be used: {error}") from None
    return memory


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a safetensors file; UserError for another kind of file."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} can't be read as safetensors: {error}") from None
