"""Checkpoints of a training: folders from which it continues as if it had never stopped.

checkpoints/000000204800/     named after the tokens seen
  config.json, model.safetensors, tokenizer.json     the model, as from_pretrained takes it
  optimizer.safetensors       what the optimizers remember, each tensor under its parameter's name
  memory.safetensors          memory and compressed memory of the streams, a tensor a layer
  shard-00001-….safetensors   in place of these three with FSDP: what the first process holds of each tensor
  state.json                  steps, tokens, the streams' position, the sums of the next record
  random.json                 random states
  training.json               the run's config, its corpus's checksum, versions, the held-out loss
  manifest.json               size and SHA-256 of each of these
checkpoints/best              a link to the one of the lowest held-out loss

Nothing in them is a pickle, and nothing is ever unpickled. torch.distributed.checkpoint reads all of them, so
that each process reads its part of every tensor, and writes those of sharded weights, in safetensors.
"""

import contextlib
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
from memformers.training.state import TrainingState, random_states, set_random_states

KEPT: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "step"),
    Muon: ("momentum",),
}
"""The state of each optimizer for a parameter, which begins with zeros."""
BEST, STATE, RANDOM, ABOUT = "best", "state.json", "random.json", "training.json"
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
    assert not state.pending  # the numbers of all its steps were read
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
        tensors = ("optimizers", "memory", "pending")
        numbers = {f.name: getattr(state, f.name) for f in fields(state) if f.name not in tensors}
        save_tokenizer(tokenizer, temporary)
        write_json(temporary / STATE, numbers)
        write_json(temporary / RANDOM, {"ranks": randomness})
        write_json(temporary / ABOUT, about)


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


def read_checkpoint(
    folder: Path,
    model: MemoryLM,
    optimizers: Optimizers,
    batch_size: int,
    ranks: Distributed = SINGLE_PROCESS,
) -> TrainingState:
    """Read the checkpoint in ``folder`` into ``model``, the ``optimizers`` and the random states; returns its
    state, with the memory of this rank's part of ``batch_size`` streams. All ``ranks`` must call this.

    Raises ValueError for a checkpoint that has changed since it was written, or of another model or version;
    and with dropout, which is random on each rank, for one of another number of ``ranks``. What was read by
    then stays, until another checkpoint is read.
    """
    check_manifest(folder)
    if (config := read_config(folder, ModelConfig)) != model.config:
        raise UserError(f"{folder} belongs to another model: {config}")
    stored, memory = stored_tensors(folder), {}
    sizes = {name: tuple(tensor.size) for name, tensor in stored.items()}
    for name in [n for n in stored if n.partition(".")[0] in (*Memory().parts, "valid")]:
        own, at = [*sizes[name]], int(len(sizes[name]) > 1)  # of ``[·, B, D]`` or ``[B]``
        own[at : at + 1] = [batch_size // ranks.size]
        dtype = stored[name].properties.dtype
        memory[name] = ranks.of_all(torch.empty(own, dtype=dtype, device=model.device))
    tensors = {**model.state_dict(), **optimizer_tensors(model, optimizers), **memory}
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := sorted(n for n in {*sizes, *expected} if sizes.get(n) != expected.get(n)):
        want, got = expected.get(wrong[0]), sizes.get(wrong[0])
        raise UserError(
            f"{folder} belongs to another model or batch_size: expected {wrong[0]} to be {want}, got {got}."
        )
    read_tensors(folder, tensors)
    try:
        parts = {name: x.to_local() if is_part(x) else x for name, x in memory.items()}
        held = memory_from_tensors(parts, model.config.n_layers)
        model.check_memory(held, batch_size // ranks.size)
    except ValueError as error:
        raise UserError(f"the memory in {folder} can't be used: {error}") from None
    numbers = read_json(folder / STATE) | {"optimizers": optimizers, "memory": held}
    numbers.pop("optimizer", None)  # earlier versions wrote its settings there
    state = config_from_dict(TrainingState, numbers, str(folder / STATE))
    randomness = read_json(folder / RANDOM, {"ranks": list[dict[str, Any]]})["ranks"]
    if len(randomness) != ranks.size and (model.config.dropout or not randomness):
        raise UserError(
            f"{folder / RANDOM} was made by {len(randomness)} processes, now there are {ranks.size}; with "
            f"dropout={model.config.dropout}, each draws its own numbers, so start {len(randomness)}."
        )
    set_random_states(randomness[ranks.rank if len(randomness) == ranks.size else 0])
    return state


def optimizer_tensors(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """What the optimizers remember, of any shape, as ``parameter/what``: the tensors themselves, and zeros,
    with which an optimizer begins, for a parameter that had no gradient yet."""
    of = {p: optimizer for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]}
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter not in of:  # it is frozen
            continue
        kept = of[parameter].state[parameter]
        for what in () if kept else KEPT[type(of[parameter])]:
            scalar = torch.zeros((), dtype=torch.float32, device=parameter.device)
            kept[what] = scalar if what == "step" else torch.zeros_like(parameter)
        tensors |= {f"{name}/{what}": tensor for what, tensor in kept.items()}
    return tensors


def read_about(folder: Path) -> About:
    """The [`About`][] of the checkpoint in ``folder``; else ValueError."""
    check_manifest(folder, (ABOUT,))
    return config_from_dict(About, read_json(folder / ABOUT), str(folder / ABOUT))


def usable_about(folder: Path) -> About | None:
    """The [`About`][] of the checkpoint in ``folder``, or None if it can't be used."""
    with contextlib.suppress(ValueError):
        return read_about(folder)
    return None


def keep_best_and_newest(parent: Path, newest: int) -> None:
    """Link to the best checkpoint in ``parent``, if the file system has links, and delete all others but the
    ``newest`` ones."""
    folders = numbered(parent)
    abouts = {folder: about for folder in folders if (about := usable_about(folder))}
    losses = {f: about.validation_loss for f, about in abouts.items() if about.validation_loss is not None}
    if best := min(losses, key=losses.__getitem__, default=None):
        temporary = parent / f"{LEFTOVER}{BEST}"
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(best.name)
            temporary.replace(parent / BEST)
    for folder in folders[newest:]:
        if folder != best:
            remove(folder)
