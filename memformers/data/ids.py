"""Files of token ids: NumPy's, raw ones, and those of other trainers, with the documents that they list."""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from memformers.common.errors import UserError
from memformers.data.files import BLOCK, Ids, drop_resident_pages

Lengths = npt.NDArray[np.int64]
"""How many tokens each document has ``[n]``; none for a plain sequence."""
ID_SUFFIXES = (".npy", ".bin", ".ds")
DOCUMENTS_SUFFIX = "_documents.npy"
"""How the names of files end that list the starts of documents of token ids."""
DATATROVE_SUFFIXES = (".ds.index", ".ds.metadata", ".ds.loss")
NUMPY_MAGIC = b"\x93NUMPY"

# 256 int32: a magic number, a version, and how many ids follow, of so many bytes.
LLM_C_HEADERS = {(20240520, 1): 2, (20240801, 7): 4}
"""Of llm.c, for GPT-2 and for Llama 3; modded-nanogpt writes the first one."""
LLM_C_HEADER_BYTES = 1024

MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_HEADER_BYTES = 34
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
NO_DOCUMENTS: Lengths = np.zeros(0, np.int64)


def documents_beside(path: Path) -> Path:
    """The file that lists the documents of the token ids at ``path``, if there is one."""
    return path.with_name(f"{path.stem}{DOCUMENTS_SUFFIX}")


def index_beside(path: Path) -> Path:
    """The index in which Megatron, RWKV or datatrove list the documents at ``path``, if there is one."""
    return path.with_name(f"{path.name}.index") if is_datatrove(path) else path.with_suffix(".idx")


def is_datatrove(path: Path) -> bool:
    return path.suffix.lower() == ".ds"


def is_beside_ids(path: Path) -> bool:
    """Whether the file at ``path`` only describes the token ids in another one."""
    name = path.name.lower()
    if name.endswith((DOCUMENTS_SUFFIX, *DATATROVE_SUFFIXES)):
        return True
    return name.endswith(".idx") and path.with_suffix(".bin").is_file()


def ids_in(file: Path | Ids, name: str, vocab_size: int | None = None) -> tuple[Ids, Lengths]:
    """The ids in a file, or of a program, and the lengths of their documents if these are listed: in an index
    beside the file, or in NAME_documents.npy as their starts and the end. UserError for anything else."""
    if isinstance(file, Path):
        ids, lengths = read_id_file(file, vocab_size)
    else:
        ids, lengths = np.asanyarray(file), NO_DOCUMENTS
    if ids.ndim != 1 or ids.dtype.kind not in "ui" or not len(ids):
        got = f"{list(ids.shape)} of {ids.dtype}"
        raise UserError(f"expected {name} to be token ids [n] of an integer type, got {got}; convert them.")
    if not isinstance(file, Path) or not documents_beside(file).exists():
        return ids, lengths
    if len(lengths):
        raise UserError(
            f"{documents_beside(file)} and {index_beside(file)} list documents; keep one of them."
        )
    return ids, read_documents(documents_beside(file), len(ids))


def read_documents(path: Path, n_tokens: int) -> Lengths:
    """The lengths of the documents whose starts, and the end, are in the .npy file at ``path``."""
    starts = ids_in(path, str(path))[0].astype(np.int64)
    lengths = np.diff(starts)
    n_wrong = int((lengths < 1).sum())
    if starts[0] != 0 or starts[-1] != n_tokens or n_wrong:
        raise UserError(
            f"expected {path} to rise from 0 to {n_tokens:,}, the number of tokens, got {starts[0]:,} to "
            f"{starts[-1]:,}, with {n_wrong:,} steps that don't rise; write it again."
        )
    return lengths


def read_id_file(path: Path, vocab_size: int | None) -> tuple[Ids, Lengths]:
    try:
        if path.suffix.lower() == ".npy":
            return read_npy(path), NO_DOCUMENTS
        if not path.stat().st_size:
            refuse(path, "expected some ids, got 0 bytes; write it again")
        if is_datatrove(path):
            return read_datatrove(path, vocab_size)
        if index_beside(path).exists():
            return read_megatron(path)
        return read_raw(path, vocab_size), NO_DOCUMENTS
    except UserError:
        raise
    except Exception as error:  # the header of a .npy file is parsed as Python
        refuse(path, f"{' '.join(str(error).split())}; write it again")


def refuse(path: Path, problem: str) -> NoReturn:
    raise UserError(f"{path} can't be read as token ids: {problem}.") from None


def read_npy(path: Path) -> Ids:
    with open(path, "rb") as file:
        has_header = file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC
    if not has_header:
        names = f"{path.stem}.uint16.bin or {path.stem}.uint32.bin"
        refuse(path, f"it has no header of NumPy's; if these are raw ids, call it {names}")
    return np.lib.format.open_memmap(path, mode="r")


def read_raw(path: Path, vocab_size: int | None) -> Ids:
    """The ids in a file without an index. Their width is that in the header or the name, as in
    x.uint32.bin, or else what ``vocab_size`` ids need."""
    size = path.stat().st_size
    if size >= LLM_C_HEADER_BYTES:
        magic, version, count = np.fromfile(path, "<i4", count=3).tolist()
        if width := LLM_C_HEADERS.get((magic, version), 0):
            if size != LLM_C_HEADER_BYTES + count * width:
                n_bytes = size - LLM_C_HEADER_BYTES
                refuse(
                    path,
                    f"its header says {count:,} ids of {width} bytes, got {n_bytes:,} bytes; write it again",
                )
            return np.memmap(path, f"<u{width}", "r", offset=LLM_C_HEADER_BYTES)
    width = named_width(path) or default_width(vocab_size)
    if size % width:
        refuse(path, f"expected ids of {width} bytes, got {size:,} bytes; write it again")
    ids: Ids = np.memmap(path, f"<u{width}", "r")
    check_width(path, ids)
    return ids


def named_width(path: Path) -> int:
    """The bytes of an id in a file called as x.uint32.bin; 0 if the name says nothing."""
    kind = Path(path.stem).suffix.lower()
    return {".uint16": 2, ".uint32": 4, ".uint64": 8}.get(kind, 0)


def default_width(vocab_size: int | None) -> int:
    return 4 if (vocab_size or 0) > 1 << 16 else 2


def check_width(path: Path, ids: Ids) -> None:
    """UserError for ids that are 0 at every second place: each is a part of a wider one."""
    width = ids.dtype.itemsize
    even_has_nonzero = has_nonzero(ids, 0)
    odd_has_nonzero = has_nonzero(ids, 1)
    if len(ids) < 4 or even_has_nonzero == odd_has_nonzero:
        return
    if odd_has_nonzero:
        refuse(
            path,
            "every second id is 0, as in wider ids in big-endian order; write them in little-endian order",
        )
    n_bytes = 2 * width
    share = "every second id is"
    # Eight bytes that are read two by two.
    if len(ids) % 4 == 0 and width == 2 and not has_nonzero(ids[::2], 1):
        n_bytes = 8
        share = "three of four ids are"
    stem = Path(path.stem).stem if named_width(path) else path.stem
    words = {4: "four", 8: "eight", 16: "sixteen"}
    name = f"{stem}.uint{8 * n_bytes}.bin" if n_bytes < 16 else f"{stem}.npy, by numpy.save"
    refuse(
        path,
        f"{share} 0, so they have {words[n_bytes]} bytes; call it {name} (zeros that are meant: use .npy)",
    )


def has_nonzero(ids: Ids, parity: int) -> bool:
    """Whether an id at an even place (``parity`` 0), or at an odd one (1), isn't 0."""
    return any(block[parity::2].any() for block in blocks_of_ids(ids))


def blocks_of_ids(ids: Ids) -> Iterator[Ids]:
    """``ids [n]`` in parts of an even number each."""
    for start in range(0, len(ids), BLOCK):
        yield ids[start : start + BLOCK]
        drop_ids(ids)


def drop_ids(ids: Ids) -> None:
    """Give back the memory that holds what was read of a file of ids."""
    if isinstance(ids, np.memmap):
        drop_resident_pages(ids._mmap)  # type: ignore[attr-defined]


def read_datatrove(path: Path, vocab_size: int | None) -> tuple[Ids, Lengths]:
    """``path.index`` lists where each document ends, in tokens."""
    size = path.stat().st_size
    index = index_beside(path)
    if not index.exists():
        return read_raw(path, vocab_size), NO_DOCUMENTS
    if index.stat().st_size % 8 or not index.stat().st_size:
        refuse(index, "expected the ends of documents, of 8 bytes each; write it again")
    ends = np.fromfile(index, "<u8").astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    n_tokens = int(ends[-1])
    width = size // n_tokens if n_tokens > 0 else 0
    if width not in (2, 4) or size != n_tokens * width or (lengths < 0).any():
        refuse(
            path,
            f"{index.name} ends at {n_tokens:,} tokens, and the file has {size:,} bytes; write both again",
        )
    return np.memmap(path, f"<u{width}", "r"), lengths[lengths > 0]


def read_megatron(path: Path) -> tuple[Ids, Lengths]:
    """The index of Megatron and RWKV: a header, then the length of each sequence (int32), where it starts in
    bytes (int64), and the number of the first sequence of each document, and of all (int64)."""
    index = index_beside(path)
    size = index.stat().st_size
    with open(index, "rb") as file:
        header = file.read(MEGATRON_HEADER_BYTES)
    if not header.startswith(MEGATRON_MAGIC) or len(header) < MEGATRON_HEADER_BYTES:
        problem = f"{index.name} isn't an index of Megatron's or RWKV's (MMIDIDX), which list its documents"
        refuse(path, f"{problem}; write it again, or move it away")
    version = int.from_bytes(header[9:17], "little")
    kind = MEGATRON_TYPES.get(header[17])
    if version != 1 or kind is None:
        refuse(path, f"{index.name} has version {version} and type {header[17]}, not version 1 and integers")
    n_sequences = int.from_bytes(header[18:26], "little")
    n_bounds = int.from_bytes(header[26:34], "little")
    expected = MEGATRON_HEADER_BYTES + 12 * n_sequences + 8 * n_bounds
    # A multimodal index ends with a byte for each sequence.
    if size not in (expected, expected + n_sequences) or not n_sequences or n_bounds < 2:
        refuse(path, f"{index.name} should have {expected:,} bytes, got {size:,}; write it again")
    sizes = np.fromfile(index, "<i4", n_sequences, offset=MEGATRON_HEADER_BYTES).astype(np.int64)
    pointers = np.fromfile(index, "<i8", n_sequences, offset=MEGATRON_HEADER_BYTES + 4 * n_sequences)
    bounds = np.fromfile(index, "<i8", n_bounds, offset=MEGATRON_HEADER_BYTES + 12 * n_sequences)
    ends = np.concatenate([[0], sizes.cumsum()])  # [n_sequences + 1], in tokens
    width = np.dtype(kind).itemsize
    if (sizes < 0).any() or (pointers != width * ends[:-1]).any():
        refuse(path, f"the sequences in {index.name} don't follow each other; write both again")
    if bounds[0] != 0 or bounds[-1] != n_sequences or (np.diff(bounds) < 0).any():
        refuse(path, f"the documents in {index.name} don't rise from 0 to {n_sequences:,}; write both again")
    if path.stat().st_size != width * ends[-1]:
        n_bytes = int(width * ends[-1])
        refuse(path, f"{index.name} lists {n_bytes:,} bytes, got {path.stat().st_size:,}; write both again")
    lengths = np.diff(ends[bounds])
    return np.memmap(path, kind, "r"), lengths[lengths > 0]


def documents_ended_by(marker: int, ids: Ids, name: str) -> Lengths:
    """The lengths of the documents in ``ids [n]``, of which each ends with the id ``marker``."""
    ends = []
    start = 0
    for block in blocks_of_ids(ids):
        ends.append(start + 1 + (block == marker).nonzero()[0])
        start += len(block)
    marks = np.concatenate(ends)
    if not len(marks):
        raise UserError(
            f"document_end={marker} doesn't occur in {name}; give the id that ends its documents."
        )
    # What follows the last marker is a document too.
    return np.diff(np.unique(np.concatenate([[0], marks, [len(ids)]])))
