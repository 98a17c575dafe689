"""Weights and vocabularies that other programs wrote, such as Hugging Face's ``transformers`` 4. As a pickle
can run any code while it is loaded, all but tensors and plain containers is refused by name."""

import collections
import pickle
import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from safetensors.torch import load_file
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.files import read_json
from memformers.data.tokenizer import WordTokenizer

CONFIG, WEIGHTS = "config.json", ("model.safetensors", "pytorch_model.bin")
VOCABULARIES = ("vocab.bin", "vocab.pkl")
BUILT = {
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "Counter"): collections.Counter,
}
"""What a vocabulary may build, by module and name, beside what a pickle builds without a name."""
TORCH_MAGIC = 0x1950A86A20F9469CFC6C
"""With this number begins what ``torch.save`` wrote before PyTorch 1.6."""


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a state dict from ``path``, a file of safetensors or ``torch.save``, without running code in it,
    and without a prefix that all names share, such as ``module.``. Raises ValueError for any other, or a
    broken file.

    Examples:
        >>> import torch
        >>> from memformers import load_weights
        >>> torch.save({"weight": torch.ones(2, 3)}, "weights.pt")
        >>> load_weights("weights.pt")["weight"].shape
        torch.Size([2, 3])
    """
    if not (path := Path(path)).is_file():
        raise UserError(f"expected {path} to be a file of weights, but it is missing.")
    try:
        is_plain = path.suffix == ".safetensors"
        state = load_file(path) if is_plain else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a broken or hostile pickle may end in
        code = re.search(r"GLOBAL (\S+)", str(error))
        wrong = "can't be read as weights; it is broken, or neither safetensors nor of torch.save"
        if code:
            wrong = (
                f"is refused: loading it would run code ({code[1]}); ask for safetensors, or if you trust it"
            )
            wrong += ", load it elsewhere and save only its state_dict()"
        raise UserError(f"{path} {wrong}.") from None
    if not isinstance(state, dict) or not state:
        raise UserError(f"expected {path} to hold a state dict of tensors, got a {type(state).__name__}.")
    others = [str(name) for name, t in state.items() if not (isinstance(name, str) and isinstance(t, Tensor))]
    if others:
        raise UserError(f"{path} holds more than tensors: {few(others)}; save only the model's state_dict().")
    return without_prefix(state)


def without_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without the prefixes of all its names, such as ``module.``; ``layers.`` is none."""
    beginnings = {name[: name.find(".") + 1] for name in state}
    if len(beginnings) != 1 or beginnings & {"", "layers."}:
        return dict(state)
    return without_prefix({name.partition(".")[2]: tensor for name, tensor in state.items()})


def few(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def is_hugging_faces(folder: Path) -> bool:
    """Whether ``folder`` has a model of ``transformers``."""
    has_vocabulary = any((folder / name).is_file() for name in VOCABULARIES)
    return has_vocabulary or ((folder / CONFIG).is_file() and "model_type" in read_json(folder / CONFIG))


def vocabulary_of(folder: Path) -> WordTokenizer:
    """The words in a ``folder`` of Hugging Face's, in their order; else UserError."""
    path = next((folder / name for name in VOCABULARIES if (folder / name).is_file()), None)
    if path is None:
        wanted = " or ".join(VOCABULARIES)
        raise UserError(f"{folder} has no vocabulary, {wanted}; copy the one published with the weights.")
    try:
        found = load_plain(path)
    except OSError:
        raise
    except Exception as error:  # whatever a broken or hostile pickle may end in
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path} can't be read as a vocabulary: {said}.") from None
    words = found.get("idx2sym") if isinstance(found, dict) else None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(f"expected {path} to have idx2sym, a list of words, got {str(found)[:80]}.")
    if found.get("lower_case") or found.get("delimiter") is not None:
        raise UserError(f"{path} changes or divides words, by lower_case or delimiter; use another.")
    return WordTokenizer(words)


class PlainUnpickler(pickle.Unpickler):
    """Builds plain containers, and what [`BUILT`][] has."""

    def find_class(self, module: str, name: str) -> Any:
        """What is called ``name`` in ``module``; UserError unless it is harmless."""
        if (module, name) not in BUILT:
            raise UserError(f"it would load {module}.{name}, which may be code")
        return BUILT[module, name]


def load_plain(path: Path) -> Any:
    """What ``pickle`` or ``torch.save`` wrote to ``path``, without tensors; an error if broken or code."""
    content = path.read_bytes()
    if is_zipfile(path):
        with ZipFile(path) as archive:
            content = next(archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))
    file = BytesIO(content)
    found = PlainUnpickler(file).load()
    # After the number come the format's version, facts of the machine, and what was saved.
    for _ in range(3 if found == TORCH_MAGIC else 0):
        found = PlainUnpickler(file).load()
    return found
