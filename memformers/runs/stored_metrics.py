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
FORMAT = 1
"""Of the columns; it changes with what is read of a record."""
# The names of metadata: which file the columns are of, and how many lines it has
SOURCE = "source"
LINES = "lines"


class StoredMetrics(Metrics):
    """[`Metrics`][memformers.runs.metrics.Metrics] that also read and write the file of columns. A file that
    can't be read or written changes nothing but the time."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.stored = path.with_name(COLUMNS)
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError, SafetensorError):
            self.load()

    def read(self) -> list[dict[str, float]]:
        """The records that were appended since the last call, and since the columns were stored."""
        before = None
        with contextlib.suppress(OSError):
            before = describe_source(self.path)
        records = super().read()
        # Where records were read earlier, the file may have been written anew since then.
        is_whole = len(records) == self.n_records
        if before and is_whole and self.offset >= MIN_BYTES and not self.broken:
            with contextlib.suppress(OSError, SafetensorError):
                self.store(before)
        return records

    def load(self) -> None:
        """Take the stored columns if they are those of the whole file."""
        columns = {}
        with safe_open(self.stored, "numpy") as file:
            metadata = file.metadata()
            source = json.loads(metadata[SOURCE])
            if source != describe_source(self.path):
                return
            n_lines = int(metadata[LINES])
            for name in file.keys():  # noqa: SIM118 (safetensors' file can't be iterated)
                columns[json.loads(name)] = file.get_tensor(name)
        n_records = len(columns[TOKENS])
        for column in columns.values():
            if column.shape != (n_records,) or column.dtype != np.float64:
                return
        self.forget((source["device"], source["inode"]))
        self.columns = columns
        self.n_records = n_records
        self.n_lines = n_lines
        self.offset = source["size"]

    def store(self, before: dict[str, int]) -> None:
        """Write the columns of a file that was as ``before`` when its reading began."""
        source = describe_source(self.path)
        if source != before or self.offset != source["size"]:  # it was written meanwhile, or a line still is
            return
        columns = {}
        for name, column in self.columns.items():
            columns[json.dumps(name)] = column  # safetensors takes no lone surrogate, and no "__metadata__"
        with atomic_write(self.stored) as temporary:
            save_file(columns, temporary, {SOURCE: json.dumps(source), LINES: str(self.n_lines)})


def describe_source(path: Path) -> dict[str, int]:
    """What differs between two states of a file, and between two formats of its columns. Contents may change
    while the time of modification is set back; the time of the last change of the status shows it."""
    status = os.stat(path)
    return {
        "format": FORMAT,
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "modified": status.st_mtime_ns,
        "status_changed": status.st_ctime_ns,
    }
