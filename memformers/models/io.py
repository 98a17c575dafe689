"""Our own format: a folder with ``config.json``, ``model.safetensors`` and ``manifest.json``, without
pickles. ``python -m experiments.pretrained`` makes the models in ``weights``, in bfloat16, and writes their
``recipe.json``."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from memformers.common.errors import UserError, one_line
from memformers.common.files import (
    MANIFEST,
    atomic_write,
    check_manifest,
    config_from_dict,
    has_manifest,
    read_json,
    user_path,
    write_json,
    write_manifest,
)
from memformers.models.config import ModelConfig, NetworkConfig
from memformers.models.hub import download, is_hub_model
from memformers.models.registry import import_memory, register_model

Config = TypeVar("Config", bound=NetworkConfig)
Model = TypeVar("Model", bound="Pretrained")
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
PACKAGED = Path(__file__).parent / "weights"
RECIPE = "recipe.json"


class Pretrained(nn.Module):
    """A model that can be saved to a folder and loaded from it."""

    config_class: ClassVar[type[NetworkConfig]]
    config: NetworkConfig

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, ``model.safetensors`` and last ``manifest.json`` with their checksums, each
        file atomically. Tied weights, as after ``model.head.weight = model.embed.weight``, are written once,
        and tied again when they are loaded. Raises ValueError for the current folder, the checkpoint of a
        training, and a folder in which these files are not such a model's; OSError for a full disk."""
        # Only what save_pretrained wrote may be replaced.
        folder = user_path(folder)
        if folder == Path():
            raise UserError("folder is the current folder; name a folder for the model.")
        if has_manifest(folder) and set(read_json(folder / MANIFEST).get("files", ())) - {CONFIG, WEIGHTS}:
            raise UserError(f"{folder} is the checkpoint of a training; name another folder.")
        if any((folder / name).exists() for name in (CONFIG, WEIGHTS)):
            try:
                read_config(folder, type(self.config))
            except UserError as error:
                foreign = f"{folder} has a {CONFIG} or {WEIGHTS} that save_pretrained didn't write"
                raise UserError(f"{foreign}; name another folder ({error})") from None

        # Tied weights keep their first name, and the others refer to it.
        state = dict(self.state_dict())
        first_names: dict[object, str] = {}
        ties = {}
        for name, x in list(state.items()):
            storage = (x.data_ptr(), x.shape, x.stride(), x.dtype)
            first = first_names.setdefault(storage, name)
            if first != name:
                ties[name] = first
                del state[name]

        # The manifest is written last, so that a folder that has one is complete.
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG, asdict(self.config))
        with atomic_write(folder / WEIGHTS) as temporary:
            save_tensors(state, temporary, ties)
        write_manifest(folder, (CONFIG, WEIGHTS))

    @classmethod
    def from_pretrained(
        cls: type[Model],
        folder: str | Path,
        device: str | torch.device = "cpu",
        *,
        model: str | type[nn.Module] = "",
        revision: str = "",
    ) -> Model:
        """Load a model, in eval mode, to ``device``; nothing is unpickled. Raises ValueError for a missing,
        broken or mismatched file, for one that has changed since it was written, and for a weight that is
        missing or unknown.

        ``folder`` is what [`save_pretrained`][] or transformers wrote, or the checkpoint of a run; or
        ``"OWNER/NAME"`` on Hugging Face's hub, with a branch, tag or commit there as ``revision``; for a
        [`memformers.MemoryLM`][] also the name of one that comes with the package, in float32:
        ``"compressive-shakespeare"`` or ``"transformer-xl-shakespeare"``; a folder comes first. A model with
        your memory needs that again as ``model``, a class or ``"my_memory.py:Averages"``: code is never run
        because a file names it.
        """
        if isinstance(model, str):
            import_memory(model)
        else:
            register_model(model)

        # A folder comes before a model of the package or the hub with the same name.
        is_on_hub = isinstance(folder, str) and is_hub_model(folder)
        if revision and not is_on_hub:
            raise UserError(f"revision is for a model on the hub, and {folder} is none; leave it out.")
        folder = user_path(folder)
        is_name = cls.config_class is ModelConfig and not folder.exists() and len(folder.parts) == 1
        if is_name:
            folder = packaged(folder.name)
        elif is_on_hub:
            folder = download(str(folder), (CONFIG, WEIGHTS, MANIFEST), revision)
        if has_manifest(folder):
            check_manifest(folder, (CONFIG, WEIGHTS))

        # A model with fresh weights, of the config that we or transformers wrote.
        path = folder / WEIGHTS
        data = read_json(folder / CONFIG)
        is_transformers = data.get("model_type") == "memformers"
        if is_transformers:  # which writes other settings beside ours
            data = {f.name: data[f.name] for f in fields(cls.config_class) if f.name in data}
        loaded = cls(config_from_dict(cls.config_class, data, str(folder / CONFIG)))
        if not path.is_file():
            raise UserError(f"expected {path} beside {CONFIG}, but it is missing.")

        # Its weights. Any broken file raises one of these errors.
        try:
            state = load_file(path)
            with safe_open(path, "pt") as file:
                ties = file.metadata() or {}  # other programs write other facts there
            if is_transformers:
                state = {name.removeprefix("model."): x for name, x in state.items()}
                is_tied = "head.weight" in loaded.state_dict().keys() - state.keys()
                ties = {"head.weight": "embed.weight"} if is_tied else {}
            for name, first in ties.items():
                if first in state:  # else it is no tie
                    owner, _, attribute = name.rpartition(".")
                    setattr(loaded.get_submodule(owner), attribute, attrgetter(first)(loaded))
                    state[name] = state[first]
            dtype = next(iter(state.values())).dtype
            loaded.to(dtype).load_state_dict(state)
        except (SafetensorError, RuntimeError, StopIteration, TypeError, AttributeError, KeyError) as error:
            problem = f"{path} doesn't contain the weights of this config: {one_line(error)}"
            raise UserError(problem) from error
        if is_name:
            loaded = loaded.float()
        return loaded.to(device).eval()


def read_config(folder: Path, kind: type[Config]) -> Config:
    return config_from_dict(kind, read_json(folder / CONFIG), str(folder / CONFIG))


def save_tensors(tensors: dict[str, Tensor], path: Path, facts: Mapping[str, str] | None = None) -> None:
    """Write ``tensors`` by name as safetensors, with ``facts``; OSError if it can't be."""
    try:
        save_file(tensors, path, dict(facts) if facts else None)
    except SafetensorError as error:  # how safetensors says that a disk is full
        raise OSError(str(error)) from None


def packaged_names() -> list[str]:
    return sorted(path.parent.name for path in PACKAGED.glob(f"*/{RECIPE}"))


def packaged(name: str) -> Path:
    names = packaged_names()
    if name not in names:
        raise UserError(
            f"no pretrained model is called {name!r}; use one of {', '.join(names)}, or OWNER/NAME on the "
            f"hub, or a folder."
        )
    return PACKAGED / name
