"""Metrics that are parsed once: a long ``metrics.jsonl`` gets its columns beside it, as tensors, which load
in a fiftieth of the time. Whoever reads the run later takes these, as long as the file is the same."""

import contextlib
import json
import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from memformers.common.files import atomic_write
from memformers.runs.folder import COLUMNS
from memformers.runs.metrics import TOKENS, Metrics

MIN_BYTES = 1 << 20
"""So many bytes of records are worth a file of columns; they take a tenth of a second to parse."""
SOURCE = "source"
"""The name of the metadata that say which file the columns are of."""


class StoredMetrics(Metrics):
    """[`Metrics`][memformers.runs.metrics.Metrics] that also read and write the file of columns. A file that
    can't be read or written changes nothing but the time."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.stored = path.with_name(COLUMNS)
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError, SafetensorError):
            self.load()

    def forget(self, inode: tuple[int, int] | None) -> None:
        super().forget(inode)
        self.n_stored_bytes = 0
        """How much of ``metrics.jsonl`` the file of columns has."""

    def read(self) -> list[dict[str, float]]:
        """The records that were appended since the last call, and since the columns were stored."""
        records = super().read()
        if self.offset - self.n_stored_bytes >= MIN_BYTES and not self.broken:
            with contextlib.suppress(OSError, SafetensorError):
                self.store()
        return records

    def load(self) -> None:
        """Take the stored columns if they are those of the whole file."""
        columns = {}
        with safe_open(self.stored, "numpy") as file:
            source = json.loads(file.metadata()[SOURCE])
            if source != describe_source(self.path, source["lines"]):
                return
            for name in file.keys():  # noqa: SIM118 (safetensors' file can't be iterated)
                columns[name] = file.get_tensor(name)
        n_records = len(columns[TOKENS])
        for column in columns.values():
            if column.shape != (n_records,) or column.dtype != np.float64:
                return
        self.forget((source["device"], source["inode"]))
        self.columns = columns
        self.n_records = n_records
        self.n_lines = source["lines"]
        self.offset = source["size"]
        self.n_stored_bytes = self.offset

    def store(self) -> None:
        source = describe_source(self.path, self.n_lines)
        is_read = self.inode == (source["device"], source["inode"]) and self.offset == source["size"]
        if not is_read:  # a line is being written, or the file was replaced
            return
        with atomic_write(self.stored) as temporary:
            save_file(self.columns, temporary, {SOURCE: json.dumps(source)})
        self.n_stored_bytes = self.offset


def describe_source(path: Path, n_lines: int) -> dict[str, int]:
    """What differs between two states of a file, and how many lines it has."""
    status = os.stat(path)
    return {
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "modified": status.st_mtime_ns,
        "lines": n_lines,
    }
