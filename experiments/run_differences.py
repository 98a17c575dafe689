"""What differs between two training runs that should have ended with the same bits."""

from pathlib import Path
from typing import Any

from memformers.common.files import numbered, read_json
from memformers.runs.folder import CONFIG
from memformers.runs.metrics import read_metrics
from memformers.training.resuming import differences

FILES = ("model.safetensors", "optimizer.safetensors", "memory.safetensors")
"""The files of a checkpoint that must be equal."""
TIMES = {"seconds", "evaluation_seconds", "tokens_per_second"}
"""Values of a record that no two runs share."""


def find_differences(run: Path, other_run: Path) -> list[str]:
    """The names of what differs: files, settings or records; empty if all is the same."""
    # The newest checkpoints.
    different = []
    checkpoint = numbered(run / "checkpoints")[0]
    other_checkpoint = numbered(other_run / "checkpoints")[0]
    for name in FILES:
        if (checkpoint / name).read_bytes() != (other_checkpoint / name).read_bytes():
            different.append(name)
    settings = differences(read_json(run / CONFIG), read_json(other_run / CONFIG))
    if settings:
        different.append(settings)
    if records_without_times(run) != records_without_times(other_run):
        different.append("the records")
    return different


def records_without_times(run: Path) -> list[dict[str, Any]]:
    records = []
    for record in read_metrics(run):
        records.append({name: value for name, value in record.items() if name not in TIMES})
    return records
