"""The files of published Transformer-XL models, as Hugging Face's ``transformers`` 4 or the original writes
them. Their weights and vocabularies may be pickles.

A pickle can run any code while it is loaded. Here it can only build tensors, plain containers, and empty
objects in place of the original's modules, which keep their attributes and do nothing; anything else is
refused by name.
"""

import collections
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.files import read_json
from memformers.data.tokenizers import WordTokenizer
from memformers.pretrained.weights_file import load_weights

WEIGHTS, MODEL = ("model.safetensors", "pytorch_model.bin"), "model.pt"
"""Hugging Face's weights, and the original's whole model."""
VOCABULARIES = ("vocab.bin", "vocab.pkl", "cache.pt")
"""Hugging Face's vocabularies, and the original's corpus, which contains one."""
BUILT = {
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "Counter"): collections.Counter,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
}
"""What a pickle may build, by module and name."""
MODULES = ("torch.nn.", "mem_transformer", "utils.", "vocabulary", "data_utils")
"""The beginnings of the names of modules whose objects are replaced by empty ones."""
SETTINGS = ("d_embed", "d_model", "n_head", "d_head", "n_layer", "n_token", "tgt_len", "mem_len", "ext_len",
            "attn_type", "same_length", "clamp_len")  # fmt: skip
"""Attributes of the original's model that are its settings."""


class Replaced:
    """An object of a class that is not loaded: its attributes alone."""

    def __init__(self, *_: object) -> None:
        """Take any arguments."""


class PlainUnpickler(pickle.Unpickler):
    """Builds what [`BUILT`][] has, and empty objects of the original's modules."""

    def find_class(self, module: str, name: str) -> Any:
        """What stands for ``name`` of ``module``; UserError if nothing does."""
        if (module, name) in BUILT:
            return BUILT[module, name]
        if f"{module}.".startswith(MODULES):
            return Replaced
        raise UserError(f"it would load {module}.{name}, which may be code")


def load_plain(path: Path) -> Any:
    """What ``torch.save`` or ``pickle`` wrote to ``path``. UserError for a file that is broken, or would load
    anything that is not known to be harmless."""

    def load(file: Any, **options: Any) -> Any:
        return PlainUnpickler(file, **options).load()

    plain = SimpleNamespace(__name__="pickle", Unpickler=PlainUnpickler, load=load)
    try:
        if is_zipfile(path) and any(name.endswith("/constants.pkl") for name in ZipFile(path).namelist()):
            raise UserError("it is TorchScript, which is code")
        try:
            # Safe, because PyTorch then loads everything by the unpickler above.
            return torch.load(path, map_location="cpu", pickle_module=plain, weights_only=False)
        except (RuntimeError, pickle.UnpicklingError):  # not of torch.save
            with open(path, "rb") as file:
                return load(file)
    except OSError:
        raise
    except Exception as error:  # whatever a broken or hostile pickle may end in
        raise UserError(
            f"{path} can't be read: {' '.join(str(error).split()) or type(error).__name__}."
        ) from None


def is_published(folder: Path) -> bool:
    """Whether ``folder`` has a published model."""
    return (folder / MODEL).is_file() or any((folder / name).is_file() for name in VOCABULARIES)


def weights_of(folder: Path) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """The state dict and the config of the model in ``folder``."""
    if weights := [folder / name for name in WEIGHTS if (folder / name).is_file()]:
        return load_weights(weights[0]), read_json(folder / "config.json")
    if not (folder / MODEL).is_file():
        raise UserError(f"{folder} has no weights; expected one of {', '.join((*WEIGHTS, MODEL))}.")
    model = load_plain(folder / MODEL)
    try:
        state = dict(tensors_of(model))
        attention, words = (
            model._modules["layers"]._modules["0"]._modules["dec_attn"],
            model._modules["word_emb"],
        )
        config = {name: getattr(model, name) for name in SETTINGS}
        config |= {"pre_lnorm": attention.pre_lnorm, "div_val": words.div_val, "cutoffs": list(words.cutoffs)}
        return state, config | {
            "dropout": model._modules["drop"].p,
            "dropatt": attention._modules["dropatt"].p,
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / MODEL} is not a model of the original's program: it lacks {error}."
        ) from None


def tensors_of(module: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a replaced module, of any shape, by the names of its state dict."""
    for name, tensor in {**module._parameters, **module._buffers}.items():
        if tensor is not None:
            yield prefix + name, tensor.detach()
    for name, inner in module._modules.items():
        yield from tensors_of(inner, f"{prefix}{name}.")


def vocabulary_of(folder: Path) -> WordTokenizer:
    """The words of the model in ``folder``, in their order."""
    path = next((folder / name for name in VOCABULARIES if (folder / name).is_file()), None)
    if path is None:
        raise UserError(f"{folder} has no vocabulary; expected one of {', '.join(VOCABULARIES)}.")
    found = load_plain(path)
    found = vars(found.vocab) if isinstance(getattr(found, "vocab", None), Replaced) else found
    words = found.get("idx2sym") if isinstance(found, dict) else None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(
            f"{path} is not the vocabulary of a Transformer-XL: expected idx2sym, a list of words."
        )
    if found.get("lower_case") or found.get("delimiter") is not None:
        raise UserError(
            f"{path} changes or divides words in its own way, with lower_case or delimiter; use another."
        )
    return WordTokenizer(words)
