"""Token ids that people have: NumPy's .npy, and the .bin of nanoGPT and of llm.c."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from memformers.common.errors import UserError

Ids = npt.NDArray[Any]
"""Token ids ``[n]``, of an integer type; of a file, mapped."""
LLM_C = {20240520: "<u2", 20240801: "<u4"}
"""The first number in the header of llm.c's files, and the type of their ids."""
HEADER = 256
"""Numbers of four bytes in that header: the magic one, the version, how many ids there are, and zeros."""
BLOCK = 1 << 18
"""Ids that are read at once."""


def ids_in(file: Path | Ids, name: str) -> tuple[Ids, list[Ids]]:
    """The ids ``[n]`` in a file, or those of a program, and the documents in them, where NAME_documents.npy
    beside the file has the places at which they begin, and the end, int64 ``[documents + 1]``. UserError,
    with the ``name``, for what is broken or holds something else."""
    found: Ids = mapped(file) if isinstance(file, Path) else np.asanyarray(file)
    if found.ndim != 1 or found.dtype.kind not in "ui" or not len(found):
        got = f"{list(found.shape)} of {found.dtype}"
        raise UserError(f"expected {name} to be token ids [n] of an integer type, got {got}; convert them.")
    if not isinstance(file, Path) or not (beside := file.with_name(f"{file.stem}_documents.npy")).exists():
        return found, []
    lengths = lengths_of(ids_in(beside, str(beside))[0], len(found), str(beside))
    return found, np.split(found, lengths.cumsum()[:-1])


def mapped(path: Path) -> Ids:
    """What a file of ids holds; UserError for one that is broken."""
    try:
        if path.suffix.lower() == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        head, size = np.fromfile(path, "<u4", HEADER), path.stat().st_size
        if len(head) == HEADER and int(head[0]) in LLM_C:
            found: Ids = np.memmap(path, LLM_C[int(head[0])], "r", offset=4 * HEADER)
            if len(found) != head[2]:
                raise ValueError(f"its header says {head[2]:,} ids, and {len(found):,} follow")
            return found
        if size % 2 or not size:
            raise ValueError(f"expected ids of two bytes, got {size:,} bytes")
        return np.memmap(path, "<u2", "r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} can't be read as token ids: {error}; write it again.") from None


def lengths_of(begins: Ids, n_ids: int, name: str) -> npt.NDArray[np.int64]:
    """The lengths of documents that begin at these places, the last of which is the end; UserError unless
    they divide ``n_ids`` ids."""
    places = begins.astype(np.int64)
    lengths: npt.NDArray[np.int64] = np.diff(places)
    if places[0] != 0 or places[-1] != n_ids or (lengths < 0).any():
        raise UserError(
            f"expected {name} to rise from 0 to {n_ids:,}, the number of tokens, got {places[0]:,} to "
            f"{places[-1]:,}, with {(lengths < 0).sum():,} steps back; write it again."
        )
    return lengths


def as_bytes(ids: Ids, name: str) -> Iterator[bytes]:
    """``ids [n]`` as four bytes each; UserError for a negative one."""
    for start in range(0, len(ids), BLOCK):
        block = ids[start : start + BLOCK]
        if block.dtype.kind == "i" and block.min() < 0:
            raise UserError(f"{name}: expected token ids from 0 on, got {block.min():,}; correct them.")
        yield block.astype("<u4").tobytes()


class _Restricted(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts, and runs nothing that a file names."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not run")


def meta_beside(path: Path) -> tuple[int | None, str]:
    """The size of the vocabulary and its characters, empty if tokens are none, as nanoGPT's meta.pkl beside a
    file of ids has them; None without such a file. Nothing else is read of it, and nothing is run."""
    meta = path.with_name("meta.pkl")
    if not meta.exists():
        return None, ""
    try:
        with open(meta, "rb") as file:
            found = _Restricted(file).load()
        size, itos = found["vocab_size"], found.get("itos", {})
        characters = "".join(itos[i] for i in range(size)) if len(itos) == size else ""
        if not isinstance(size, int) or size < 1 or (characters and len(set(characters)) != size):
            raise ValueError(f"vocab_size is {size!r} and itos has {len(itos)} texts")
    except Exception as error:  # a pickle can raise any
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{meta} can't be read: {why}; remove it, and give vocab_size.") from None
    return size, characters
