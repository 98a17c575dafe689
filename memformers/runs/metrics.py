"""Reading a run's metrics, and flattening nested settings."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memformers.runs.folder import METRICS


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested dicts as pairs of dotted names and plain values, for labml's flat configs."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Dotted names as a reader sees them: the last part alone, where no other name ends in it."""
    names = list(names)
    last = Counter(name.rpartition(".")[2] for name in names)
    return {name: name if last[end := name.rpartition(".")[2]] > 1 else end for name in names}


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """All complete records of a run; a last line that a crash truncated is skipped."""
    path = folder / METRICS
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
