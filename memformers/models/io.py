"""Our own format: a folder with ``config.json`` and ``model.safetensors``, which nothing unpickles. Those in
``weights``, in bfloat16, are made by ``python -m experiments.pretrained``, which writes ``recipe.json``.

A training whose processes hold parts of the weights leaves safetensors files of these parts instead, which
torch.distributed.checkpoint puts together. It reads and writes them without a pickle, unlike its own format.
"""

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from memformers.common.atomic_dir import check_manifest, has_manifest
from memformers.common.errors import UserError
from memformers.common.files import config_from_dict, read_json, replacing, write_json
from memformers.models.config import ModelConfig, NetworkConfig
from memformers.models.registry import name_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

Config = TypeVar("Config", bound=NetworkConfig)
Model = TypeVar("Model", bound="Pretrained")
CONFIG, WEIGHTS = "config.json", "model.safetensors"
PARTS = "shard-*.safetensors"
"""In place of WEIGHTS, the files that each process wrote, as torch.distributed.checkpoint names them."""
CHECKSUM = "memformers.sha256"
"""The name of the weights' checksum among the facts in their file."""
PACKAGED, RECIPE = Path(__file__).parent / "weights", "recipe.json"


class Pretrained(nn.Module):
    """A model that can be saved to a folder and loaded from it."""

    config_class: ClassVar[type[NetworkConfig]]
    config: NetworkConfig

    def save_pretrained(self, folder: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write ``config.json`` and ``model.safetensors``, with a checksum of the weights, each atomically.
        Tied weights, as after ``model.head.weight = model.embed.weight``, are written once, and tied again
        when they are loaded. ``weights``, by name, are saved in place of the model's own. Raises ValueError
        for the current folder, and one where these files are not such a model's; OSError for a full disk."""
        if (folder := Path(folder)) == Path():
            raise UserError("folder='' is the current folder; name a folder for the model.")
        if has_manifest(folder):
            raise UserError(f"{folder} is the checkpoint of a training; name another folder.")
        if any((folder / name).exists() for name in (CONFIG, WEIGHTS)):
            try:
                read_config(folder, type(self.config))
            except UserError as error:
                whose = f"{folder} has a {CONFIG} or {WEIGHTS} that save_pretrained didn't write"
                raise UserError(f"{whose}; name another folder ({error})") from None
        names: dict[object, str] = {}  # of what is tied, the first name is kept, and the others refer to it
        ties, state = {}, dict(self.state_dict() if weights is None else weights)
        for name, x in list(state.items()):
            if (first := names.setdefault((x.data_ptr(), x.shape, x.stride(), x.dtype), name)) != name:
                ties[name] = first
                del state[name]
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG, asdict(self.config))
        with replacing(folder / WEIGHTS) as temporary:
            save_tensors(state, temporary, {**ties, CHECKSUM: checksum_of(state, ties)})

    @classmethod
    def from_pretrained(
        cls: type[Model],
        folder: str | Path,
        device: str | torch.device = "cpu",
        *,
        model: str | type[nn.Module] = "",
        gate: str | type[nn.Module] = "",
        compression: str | type[nn.Module] = "",
        compression_loss: str | type[nn.Module] = "",
    ) -> Model:
        """Load a model, in eval mode, to ``device``; nothing is unpickled. Raises ValueError for a missing,
        broken or mismatched file, and for weights that have changed since they were written.

        ``folder`` is what [`save_pretrained`][] wrote, or the checkpoint of a run; for a
        [`memformers.MemoryLM`][] also the name of one that comes with the package, in float32:
        ``"compressive-shakespeare"`` or ``"transformer-xl-shakespeare"``; a folder comes first. Parts of your
        own are given again, as classes or as ``"my_memory.py:Averages"``: a model never runs them by itself.
        """
        own = {"model": model, "gate": gate, "compression": compression, "compression_loss": compression_loss}
        for setting, name in own.items():
            name_of(name, setting)
        folder = Path(folder)
        is_name = cls.config_class is ModelConfig and not folder.exists() and len(folder.parts) == 1
        folder = packaged(folder.name) if is_name else folder
        parts = [path.name for path in sorted(folder.glob(PARTS))] if has_manifest(folder) else []
        if has_manifest(folder):
            check_manifest(folder, (CONFIG, *(parts or [WEIGHTS])))
        loaded, path = cls(read_config(folder, cls.config_class)), folder / (parts[0] if parts else WEIGHTS)
        if not path.is_file():
            raise UserError(f"expected {path} beside {CONFIG}, but it is missing.")
        try:
            if parts:
                found = stored_tensors(folder)
                names = loaded.state_dict()
                state = {n: torch.empty(found[n].size, dtype=found[n].properties.dtype) for n in names}
                read_tensors(folder, state)
            else:
                state = load_file(path)
            with safe_open(path, "pt") as file:
                facts = file.metadata() or {}  # other programs write other facts there
            ties = {name: first for name, first in facts.items() if first in state}
            if facts.get(CHECKSUM, "") not in ("", checksum_of(state, ties)):
                raise UserError(f"{path} has changed since it was written: its checksum differs.")
            for name, first in ties.items():
                owner, _, last = name.rpartition(".")
                setattr(loaded.get_submodule(owner), last, attrgetter(first)(loaded))
                state[name] = state[first]
            loaded.to(next(iter(state.values())).dtype).load_state_dict(state)
        except (SafetensorError, RuntimeError, StopIteration, TypeError, AttributeError, KeyError) as error:
            why = " ".join(str(error).split())
            raise UserError(f"{path} doesn't contain the weights of this config: {why}") from error
        return (loaded.float() if is_name else loaded).to(device).eval()


def checksum_of(state: Mapping[str, Tensor], ties: Mapping[str, str]) -> str:
    """SHA-256 of weights by name, in hexadecimal digits, and of what is tied to them."""
    digest = hashlib.sha256(repr(sorted(ties.items())).encode())
    for name, x in sorted(state.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_config(folder: Path, kind: type[Config]) -> Config:
    """The model's config in ``folder``; else ValueError."""
    data = read_json(folder / CONFIG)
    data.pop("code", None)  # earlier versions wrote checksums of the user's files there
    return config_from_dict(kind, data, str(folder / CONFIG))


def save_tensors(tensors: dict[str, Tensor], path: Path, facts: Mapping[str, str] | None = None) -> None:
    """Write ``tensors``, of any shape and by name, as safetensors with ``facts``; OSError if it can't be."""
    try:
        save_file(tensors, path, dict(facts) if facts else None)
    except SafetensorError as error:  # how safetensors says that a disk is full
        raise OSError(str(error)) from None


def stored_tensors(folder: Path) -> "dict[str, TensorStorageMetadata]":
    """Size, dtype and parts of each tensor in the safetensors files of ``folder``, whether they hold whole
    tensors or parts. UserError for a file that can't be read, and for a tensor of which a part is missing."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader  # not above: it takes long

    try:
        found: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UserError(f"the tensors in {folder} can't be read as safetensors: {error}") from None
    for name, tensor in found.items():
        if sum(part.sizes.numel() for part in tensor.chunks) != tensor.size.numel():
            raise UserError(f"{folder} doesn't hold each part of {name} once; it is incomplete.")
    return found


def read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read ``tensors``, of any shape and by name, which [`stored_tensors`][] has found in ``folder``: of
    those that processes hold in parts, only this one's."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None


def packaged_names() -> list[str]:
    """The names of the models that come with the package."""
    return sorted(path.parent.name for path in PACKAGED.glob(f"*/{RECIPE}"))


def packaged(name: str) -> Path:
    """The folder of the package's model called ``name``; else UserError."""
    if name not in (names := packaged_names()):
        raise UserError(
            f"no pretrained model is called {name!r}; use one of {', '.join(names)}, or a folder."
        )
    return PACKAGED / name
