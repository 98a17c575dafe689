"""Checkpoints of a training: folders from which it continues as if it had never stopped.

checkpoints/000000204800/     named after the tokens seen
  config.json, model.safetensors, tokenizer.json     the model, as from_pretrained takes it
  optimizer.safetensors       what the optimizers remember, each tensor under its parameter's name
  memory.safetensors          memory and compressed memory of the streams, a tensor a layer
  shard-00001-….safetensors   in place of these three with FSDP: what the first process holds of each tensor
  state.json                  steps, tokens, the streams' position, the sums of the next record
  random.json                 random states
  training.json               the run's config, its corpus's checksum, versions, the validation loss
  manifest.json               size and SHA-256 of each of these
checkpoints/best              a link to the one of the lowest validation loss

Nothing in them is a pickle, and nothing is ever unpickled. torch.distributed.checkpoint reads all of them, so
that each process reads its part of every tensor, and writes those of sharded weights, in safetensors.
"""

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memformers.common.atomic_dir import LEFTOVER, FileEntry, atomic_dir, check_manifest, numbered, remove
from memformers.common.errors import UserError
from memformers.common.files import config_from_dict, read_json, write_json
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import save_tokenizer
from memformers.models.config import ModelConfig
from memformers.models.io import CONFIG, PARTS, read_config, read_tensors, save_tensors, stored_tensors
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory, memory_from_tensors, memory_tensors
from memformers.training.distributed import SINGLE_PROCESS, Distributed, full_tensor, is_part
from memformers.training.optimizers import Muon, Optimizers
from memformers.training.state import TrainingState, check_random_states, random_states, set_random_states

BEST = "best"
KEPT: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "step"),
    Muon: ("momentum",),
}
"""The state of each optimizer for a parameter."""
SETTINGS = ("betas", "eps", "momentum", "weight_decay")
"""The settings of a group of parameters that are saved, as far as its optimizer has them."""
STATE, RANDOM, ABOUT = "state.json", "random.json", "training.json"
PIECE = 2**26
"""About how many bytes of tensors a process writes into one file: that many are copied at a time."""


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
    ranks: Distributed = SINGLE_PROCESS,
) -> None:
    """Write a checkpoint that appears as ``folder`` when it is complete and on the disk.

    All ``ranks`` must call this. The first one writes; with FSDP each writes what it holds of the tensors,
    and no rank ever has more. Raises OSError if it can't be written; then no other checkpoint has changed.
    """
    moments = optimizer_tensors(model, state.optimizers)
    memory = {name: ranks.of_all(x) for name, x in memory_tensors(state.memory).items()}
    randomness, sharded = ranks.all_gather(random_states()), ranks.parallel == "fsdp"
    if not sharded:
        memory = {name: full_tensor(x).cpu() for name, x in memory.items()}
    written: dict[str, FileEntry] = {}
    with atomic_dir(folder, written) if ranks.first else contextlib.nullcontext(folder) as temporary:
        if sharded:
            temporary = ranks.all_gather(temporary)[0]
            written |= write_parts({**model.state_dict(), **moments, **memory}, temporary, ranks)
        if not ranks.first:
            return
        if sharded:
            write_json(temporary / CONFIG, asdict(model.config))
        else:
            model.save_pretrained(temporary)
            save_tensors(moments, temporary / "optimizer.safetensors")
            save_tensors(memory, temporary / "memory.safetensors")
        save_tokenizer(tokenizer, temporary)
        write_json(temporary / STATE, state_numbers(model, state))
        write_json(temporary / RANDOM, {"ranks": randomness})
        write_json(temporary / ABOUT, asdict(about))


def write_parts(tensors: dict[str, Tensor], folder: Path, ranks: Distributed) -> dict[str, FileEntry]:
    """Write what each rank holds of ``tensors``, of any shape, into files of its own in ``folder``, and flush
    them to the disk; returns all files, each measured by the rank that wrote it. All ranks must call this;
    OSError on all of them if one can't write."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    ends = accumulate(tensor.nbytes for tensor in tensors.values())
    files = {name: 1 + end // (PIECE * ranks.size) for name, end in zip(tensors, ends, strict=True)}
    try:
        save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), files, save_distributed=True))
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
    own = {p.name: FileEntry.of(p) for p in folder.glob(PARTS.replace("*", f"{ranks.rank + 1:05}-*"))}
    return {name: entry for each in ranks.all_gather(own) for name, entry in each.items()}


@dataclass(frozen=True)
class Checkpoint:
    """This rank's part of a checkpoint that [`read_checkpoint`][] has read, before it is used."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    randomness: dict[str, Any]
    state: TrainingState
    """The state it was made in, with the memory of this rank's streams."""

    def restore(self, model: nn.Module, optimizers: Optimizers) -> TrainingState:
        """Restore weights, optimizers and random states; returns the state. All ranks must call this."""
        named = named_state(model, optimizers)
        model.load_state_dict(self.weights)
        for optimizer in optimizers:
            optimizer.state.clear()
        for key, tensor in self.moments.items():
            name, _, what = key.rpartition("/")
            parameter, optimizer = named[name]
            optimizer.state[parameter][what] = tensor
        set_random_states(self.randomness)
        return self.state


def read_checkpoint(
    folder: Path,
    model: MemoryLM,
    optimizers: Optimizers,
    batch_size: int,
    ranks: Distributed = SINGLE_PROCESS,
) -> Checkpoint:
    """The checkpoint in ``folder`` of a training of ``model`` with ``optimizers``, checked.

    Raises ValueError for a checkpoint that has changed since it was written, or of another model or version;
    and with dropout, which is random on each rank, for one of another number of ``ranks``.
    """
    check_manifest(folder)
    if (config := read_config(folder, ModelConfig)) != model.config:
        raise UserError(f"{folder} belongs to another model: {config}")
    numbers = read_json(folder / STATE)
    if numbers.pop("optimizer", None) != json.loads(json.dumps(describe_optimizers(model, optimizers))):
        raise UserError(f"{folder / STATE} belongs to another optimizer.")
    weights, moments, memory = read_own_tensors(folder, model, optimizers, batch_size, ranks)
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
        f"{name}/{what}": tensor
        for name, (parameter, optimizer) in named_state(model, optimizers).items()
        for what, tensor in optimizer.state.get(parameter, {}).items()
    }


def new_moments(model: MemoryLM, optimizers: Optimizers, kept: Iterable[str]) -> dict[str, Tensor]:
    """Tensors for the optimizers' state to be read into, for all parameters that have some; Muon's have all
    of them or none, since each step has a gradient for every matrix of the layers."""
    known, named = {key.rpartition("/")[0] for key in kept}, named_state(model, optimizers)
    begun = {optimizer for name, (_, optimizer) in named.items() if name in known}
    return {
        f"{name}/{what}": torch.zeros((), dtype=torch.float32, device=parameter.device)
        if what == "step"
        else torch.empty_like(parameter, requires_grad=False)
        for name, (parameter, optimizer) in named.items()
        for what in KEPT[type(optimizer)]
        if name in known or (isinstance(optimizer, Muon) and optimizer in begun)
    }


def read_own_tensors(
    folder: Path, model: MemoryLM, optimizers: Optimizers, batch_size: int, ranks: Distributed
) -> tuple[dict[str, Tensor], dict[str, Tensor], Memory]:
    """What this rank holds of the weights, of the optimizers' state and of the memory in ``folder``, on the
    model's device; ValueError for what doesn't fit the model and ``batch_size``."""
    stored, kinds = stored_tensors(folder), (*Memory().parts, "valid")
    sizes = {name: tuple(tensor.size) for name, tensor in stored.items()}
    remembered = {name: sizes.pop(name) for name in stored if name.partition(".")[0] in kinds}
    weights = {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}
    moments = new_moments(model, optimizers, sizes.keys() - weights.keys())
    expected = {name: tuple(tensor.shape) for name, tensor in {**weights, **moments}.items()}
    if wrong := sorted(n for n in {*sizes, *expected} if sizes.get(n) != expected.get(n)):
        raise UserError(
            f"{folder} belongs to another model: {wrong[0]} is {sizes.get(wrong[0])}, but "
            f"{expected.get(wrong[0])} was expected."
        )
    memory = {}
    for name, size in remembered.items():
        at = int(len(size) > 1)  # of ``[·, B, D]`` or ``[B]``
        if size[at : at + 1] != (batch_size,):
            raise UserError(f"{folder} has {name} of shape {size}, but batch_size={batch_size} was expected.")
        own = (*size[:at], batch_size // ranks.size, *size[at + 1 :])
        dtype = stored[name].properties.dtype
        memory[name] = ranks.of_all(torch.empty(own, dtype=dtype, device=model.device))
    read_tensors(folder, {**weights, **moments, **memory})
    try:
        parts = {name: x.to_local() if is_part(x) else x for name, x in memory.items()}
        remembers = memory_from_tensors(parts, model.config.n_layers)
        model.check_memory(remembers, batch_size // ranks.size)
    except ValueError as error:
        raise UserError(f"the memory in {folder} can't be used: {error}") from None
    return weights, moments, remembers
