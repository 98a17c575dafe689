"""Folders and files that other libraries read, by their names: their bytes are no text."""

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from memformers.common.errors import UserError

# By library, the files that each of its folders has.
FOLDERS = (
    ("MosaicML streaming", ("index.json", "*.mds*")),
    ("litdata", ("index.json", "chunk-*.bin")),
    ("Zarr", ("zarr.json",)),
    ("Zarr", (".zgroup",)),
    ("Zarr", (".zarray",)),
)
FILES = {
    ".beton": "FFCV",
    ".ffindex": "FFindex",
    ".h5": "HDF5",
    ".hdf5": "HDF5",
    ".lance": "Lance",
    ".mds": "MosaicML streaming",
    ".pt": "PyTorch",
    ".pth": "PyTorch",
    ".safetensors": "safetensors",
    ".tfrecord": "TFRecord",
    ".tfrecords": "TFRecord",
}
"""Formats of files that hold data, by their suffix."""
WHAT_TO_DO = (
    "read it with that library, and pass the token ids to prepare_ids or write the texts as JSON lines (see "
    "'Other loaders' in the guide on token ids)"
)


def library_of(names: Iterable[str]) -> str:
    """The library that reads a folder with files of these ``names``; empty if none is known."""
    names = list(names)
    for library, patterns in FOLDERS:
        matched = [pattern for pattern in patterns if any(fnmatch(name, pattern) for name in names)]
        if len(matched) == len(patterns):
            return library
    return ""


def check_folder(folder: Path, names: Iterable[str]) -> None:
    """UserError if ``folder``, with files of these ``names``, belongs to another library."""
    if library := library_of(names):
        raise UserError(f"{folder} is a folder of {library}: {WHAT_TO_DO}.")


def check_sizes(folder: Path, files: Iterable[Path]) -> None:
    """UserError if most bytes of ``files`` in ``folder`` are in one format that is no text."""
    n_bytes: dict[str, int] = {}
    for file in files:
        kind = FILES.get(file.suffix.lower(), "")
        n_bytes[kind] = n_bytes.get(kind, 0) + file.stat().st_size
    total = sum(n_bytes.values())
    for kind, size in n_bytes.items():
        if kind and 2 * size > total:
            raise UserError(f"{folder} is mostly files of {kind}, {size:,} of {total:,} bytes: {WHAT_TO_DO}.")
