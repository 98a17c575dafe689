"""One run, read from its folder while it is trained."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memformers.dashboard.curves import Curve, thinned
from memformers.dashboard.following import STEP, FollowedJson, FollowedMetrics
from memformers.runs.folder import CARD, CONFIG, FACTS, METRICS, RESULT, flatten
from memformers.runs.plan import Planned

WAITING, RUNNING, FINISHED, STOPPED, FAILED, SILENT = (
    "waiting", "running", "finished", "stopped", "failed", "silent",
)  # fmt: skip
SILENT_SECONDS = 900.0
"""The time without a new record after which a run that has not ended may have died with its machine."""
STOPS = ("killed", "crashed: KeyboardInterrupt", "crashed: SystemExit")
"""The statuses on the card of a run that someone ended."""


class LiveRun:
    """The run ``name`` of a comparison, in ``folder``, which may still be empty."""

    def __init__(self, folder: Path, name: str):
        self.name = name
        self.metrics = FollowedMetrics(folder / METRICS)
        self.files = {file: FollowedJson(folder / file) for file in (CARD, CONFIG, FACTS, RESULT)}
        self.read: dict[str, dict[str, Any]] = {file: {} for file in self.files}
        self.version: tuple[Any, ...] = ()
        """A value that changes whenever anything that is shown changes."""
        self.values: dict[str, float] = {}
        self.curves: dict[tuple[str, str], Curve] = {}

    def update(self, planned: Planned | None, settings: Mapping[str, Any]) -> None:
        """Read the new contents; ``planned`` and ``settings`` come from the comparison."""
        self.metrics.update()
        self.read = {file: json.read() for file, json in self.files.items()}
        self.settings = dict(flatten(self.read[CONFIG])) or dict(settings)
        seed = planned.seed if planned else self.settings.get("seed")
        self.seed = seed if isinstance(seed, int) else None
        self.arm = planned.arm if planned else str(self.settings.get("recall.arm", self.name))
        self.state, self.why = self._state()
        seen = [json.seen for json in self.files.values()]
        version = (self.metrics.file, self.metrics.offset, self.state, self.arm, self.seed, *seen)
        if version != self.version:
            self.version, self.values, self.curves = version, self._values(), {}

    @property
    def identity(self) -> str:
        """Its id in labml; empty before it has one."""
        return str(self.read[CARD].get("run", ""))

    @property
    def changed(self) -> float:
        """The time of its last record, or else of its beginning, in seconds since 1970; 0 if it has not
        begun."""
        return self.metrics.changed or number(self.read[CARD].get("started")) or 0.0

    def _state(self) -> tuple[str, str]:
        status = str(self.read[CARD].get("status", "")).strip()
        if status.startswith(STOPS):
            return STOPPED, status
        if status.startswith("crashed"):
            return FAILED, status.removeprefix("crashed: ")
        if status == "completed" or self.read[RESULT]:
            return FINISHED, ""
        if not self.changed:
            return WAITING, ""
        if time.time() - self.changed > SILENT_SECONDS:
            return SILENT, "It was not ended, and it has recorded nothing for a long time."
        return RUNNING, ""

    def _values(self) -> dict[str, float]:
        """The numbers of its row in the table, as far as they exist."""
        facts, result = self.read[FACTS], self.read[RESULT]
        valid = self.metrics.points("loss.valid")[2]
        train = self.metrics.points("loss.train")[2]
        tokens, seconds = self.metrics.column(STEP), self.metrics.column("seconds")
        speed = self.metrics.points("tokens_per_second")[2]
        found = {
            "held_out": result.get("loss"),
            "bits_per_character": result.get("bits_per_character"),
            "valid": valid[-1] if len(valid) else None,
            "best": valid.min() if len(valid) else None,
            "train": train[-1] if len(train) else None,
            "tokens": tokens[-1] if len(tokens) else None,
            "seconds": seconds[-1] if len(seconds) else None,
            "tokens_per_second": sorted(speed)[len(speed) // 2] if len(speed) else None,
            "parameters": facts.get("parameters"),
            "keys": facts.get("keys"),
            "peak_memory": result.get("peak_memory_bytes"),
        }
        return {name: value for name, said in found.items() if (value := number(said)) is not None}

    def curve(self, metric: str, over: str) -> Curve:
        """The ``metric`` over "tokens" or "seconds"."""
        if (metric, over) not in self.curves:
            tokens, seconds, values = self.metrics.points(metric)
            budget = number(self.settings.get("tokens")) or 0.0
            x = seconds if over == "seconds" else tokens
            self.curves[metric, over] = thinned(Curve(tokens, x, values), budget)
        return self.curves[metric, over]

    def row(self, differing: Mapping[str, str]) -> dict[str, Any]:
        """Its row in the table, with the ``differing`` settings."""
        budget = number(self.settings.get("tokens"))
        done = self.values.get("tokens", 0.0)
        return {
            "name": self.name,
            "arm": self.arm,
            "seed": self.seed,
            "state": self.state,
            "why": self.why,
            "changed": self.changed,
            "progress": min(done / budget, 1.0) if budget else None,
            "values": self.values,
            "settings": {name: self.settings.get(name) for name in differing},
        }


def number(value: Any) -> float | None:
    """A finite number; None for any other value, since a file may contain anything."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
