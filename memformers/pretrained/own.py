"""Our own format: ``config.json``, ``model.safetensors`` and, for a training, ``tokenizer.json``.

The trained models that come with the package are in a folder each, with weights in bfloat16. Beside these
files, ``recipe.json`` says how the model was trained, and the loss of these weights on the held-out text;
``manifest.json`` has the size and the SHA-256 of each file. ``python -m experiments.pretrained`` makes them.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from memformers.common.atomic_dir import check_manifest, has_manifest, newest_that_loads, numbered
from memformers.common.errors import UserError
from memformers.common.files import config_from_dict, read_json, replacing, write_json
from memformers.data.tokenizers import Tokenizer, load_tokenizer
from memformers.models.config import CoreConfig, ModelConfig, NetworkConfig
from memformers.models.core import MemoryCore
from memformers.models.kinds import code_of, note_changed_code
from memformers.models.language_model import MemoryLM
from memformers.pretrained.published import is_published
from memformers.pretrained.transfo_xl import load_published
from memformers.runs.folder import CHECKPOINTS

Model = TypeVar("Model", MemoryLM, MemoryCore)
Config = TypeVar("Config", bound=NetworkConfig)
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
CODE = "code"
"""Where ``config.json`` has the checksums of files of one's own."""
PACKAGED, RECIPE = Path(__file__).parent / "weights", "recipe.json"


def save_model(
    model: MemoryLM | MemoryCore, folder: Path, weights: Mapping[str, Tensor] | None = None
) -> None:
    """[`MemoryLM.save_pretrained`][]; ``weights``, by name, are the whole weights if each process holds only
    a part of the model."""
    if folder == Path():
        raise UserError("folder='' is the current folder; name a folder for the model.")
    if has_manifest(folder):
        raise UserError(f"{folder} is the checkpoint of a training; name another folder.")
    if any((folder / name).exists() for name in (CONFIG, WEIGHTS)):
        try:
            read_config(folder, type(model.config))
        except UserError as error:
            raise UserError(
                f"{folder} has a {CONFIG} or {WEIGHTS} that save_pretrained didn't write and that would be "
                f"overwritten; name another folder ({error})"
            ) from None
    folder.mkdir(parents=True, exist_ok=True)
    code = {CODE: of_files} if (of_files := code_of(model.config)) else {}
    write_json(folder / CONFIG, asdict(model.config) | code)
    with replacing(folder / WEIGHTS) as temporary:
        save_file(dict(model.state_dict() if weights is None else weights), temporary)


def load_model(folder: Path, device: str | torch.device) -> MemoryLM:
    """The model in ``folder``, in eval mode on ``device``; ValueError for a missing, broken or mismatched
    file."""
    if has_manifest(folder):
        check_manifest(folder, (CONFIG, WEIGHTS))
    return with_weights(MemoryLM(read_config(folder, ModelConfig)), folder, device)


def load_core(folder: Path, device: str | torch.device) -> MemoryCore:
    """[`MemoryCore.from_pretrained`][]."""
    return with_weights(MemoryCore(read_config(folder, CoreConfig)), folder, device)


def with_weights(model: Model, folder: Path, device: str | torch.device) -> Model:
    """``model`` with the weights in ``folder``, in eval mode on ``device``; ValueError for a missing, broken
    or mismatched file."""
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise UserError(f"expected {weights} beside config.json, but it is missing.")
    try:
        state = load_file(weights)
        model.to(next(iter(state.values())).dtype).load_state_dict(state)
    except (SafetensorError, RuntimeError, StopIteration, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{weights} doesn't contain the weights of this config: {reason}") from error
    return model.to(device).eval()


def read_config(folder: Path, kind: type[Config]) -> Config:
    """The model's config in ``folder``; else ValueError."""
    path = folder / CONFIG
    data = read_json(path)
    code = data.pop(CODE, None)
    config = config_from_dict(kind, data, str(path))
    note_changed_code(config, code, path)
    return config


def load_checkpoint(folder: Path, device: torch.device) -> tuple[MemoryLM, Tokenizer]:
    """The model and tokenizer in ``folder``: the folder of a run, whose newest complete checkpoint is used,
    the folder of a checkpoint, one with the files of save_pretrained and a tokenizer, or a published
    Transformer-XL; else ValueError."""
    if checkpoints := numbered(folder / CHECKPOINTS):
        return newest_that_loads(checkpoints, lambda path: load_with_tokenizer(path, device))[1]
    if is_published(folder):
        model, words = load_published(folder)
        return model.to(device), words
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} holds no checkpoint; name the folder of a run or of a checkpoint.")
    return load_with_tokenizer(folder, device)


def load_with_tokenizer(folder: Path, device: torch.device) -> tuple[MemoryLM, Tokenizer]:
    """The model and tokenizer whose files are in ``folder`` itself; else ValueError."""
    if has_manifest(folder):
        check_manifest(folder, (TOKENIZER,))
    model, tokenizer = load_model(folder, device), load_tokenizer(folder)
    if model.config.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"{folder} has a model of {model.config.vocab_size} tokens and a tokenizer of "
            f"{tokenizer.vocab_size}; they belong to different trainings."
        )
    return model, tokenizer


def packaged_names() -> list[str]:
    """The names of the models that come with the package."""
    return sorted(path.parent.name for path in PACKAGED.glob(f"*/{RECIPE}"))


def load_packaged(name: str, device: torch.device) -> tuple[MemoryLM, Tokenizer]:
    """The model of the package called ``name``, in eval mode on ``device``, and its tokenizer; UserError for
    another name. The weights become float32, in which the model can be trained further."""
    if name not in packaged_names():
        known = ", ".join(packaged_names())
        raise UserError(f"no pretrained model is called {name!r}; use one of {known}, or name a folder.")
    model, tokenizer = load_with_tokenizer(PACKAGED / name, device)
    return model.float(), tokenizer


def load_folder_or_name(source: Path, device: str | torch.device) -> MemoryLM:
    """[`MemoryLM.from_pretrained`][]: the model in the folder ``source``, or, if there is no such folder, the
    model of the package with this name; else UserError."""
    if source.exists() or len(source.parts) > 1:
        return load_model(source, device)
    return load_packaged(source.name, torch.device(device))[0]
