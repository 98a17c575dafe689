"""Our own format: a folder with ``config.json`` and ``model.safetensors``, which nothing unpickles. Those in
``weights``, in bfloat16, are made by ``python -m experiments.pretrained``, which writes ``recipe.json``."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from memformers.common.atomic_dir import check_manifest, has_manifest
from memformers.common.errors import UserError
from memformers.common.files import config_from_dict, read_json, replacing, write_json
from memformers.models.config import ModelConfig, NetworkConfig
from memformers.models.registry import name_of

Config = TypeVar("Config", bound=NetworkConfig)
Model = TypeVar("Model", bound="Pretrained")
CONFIG, WEIGHTS = "config.json", "model.safetensors"
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
        when they are loaded. ``weights`` are the whole model's, by name, where each process holds only a part
        of them. Raises ValueError for the current folder, and one where these files are not such a model's.
        """
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
            save_file(state, temporary, {**ties, CHECKSUM: checksum_of(state, ties)})

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
        if has_manifest(folder):
            check_manifest(folder, (CONFIG, WEIGHTS))
        loaded, path = cls(read_config(folder, cls.config_class)), folder / WEIGHTS
        if not path.is_file():
            raise UserError(f"expected {path} beside {CONFIG}, but it is missing.")
        try:
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
        except (SafetensorError, RuntimeError, StopIteration, TypeError, AttributeError) as error:
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
