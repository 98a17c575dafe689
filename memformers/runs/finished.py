"""What runs left in their folders, read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.common.files import read_json
from memformers.runs.folder import CHECKPOINTS, CONFIG, FACTS, PROBE, RESULT, SAMPLE
from memformers.runs.metrics import read_metrics
from memformers.runs.sealed import numbered


@dataclass(frozen=True)
class FinishedRun:
    """A run's folder, read."""

    folder: Path
    config: dict[str, Any]
    facts: dict[str, Any]
    metrics: list[dict[str, float]]
    result: dict[str, Any] | None
    """None for a run that didn't end well."""
    sample: str
    recall: dict[str, Any] | None
    """Its recall by distance, if it was measured: by a probe, else at the training's end."""

    @property
    def model(self) -> str:
        """Its model's name."""
        return str(self.config["model"]["model"])

    @property
    def sees_back(self) -> int:
        """The farthest position that one layer can attend to, its segment and all it remembers."""
        return int(self.facts["memory"]["one_layer"] + self.config["model"]["segment_len"])


def read_runs(folder: Path) -> list[FinishedRun]:
    """The run in ``folder``, or those in its sub-folders, the least memory first."""
    places = [folder] if (folder / FACTS).is_file() else [p.parent for p in folder.glob(f"*/{FACTS}")]
    recalls = (read_probe(folder) or {}).get("recall", {})
    runs = [read_run(place, recalls.get(place.name)) for place in map(Path.resolve, places)]
    if not runs:
        raise UserError(f"{folder} holds no run: {FACTS} is neither in it nor in a sub-folder.")
    return sorted(runs, key=lambda run: (run.facts["memory"]["one_layer"], run.folder))


def read_run(folder: Path, recall: dict[str, Any] | None = None) -> FinishedRun:
    """What a run left behind, with a probe's ``recall``; one that was stopped half-way has no result and
    no sample."""
    sample = folder / SAMPLE
    result = read_json(folder / RESULT) if (folder / RESULT).exists() else None
    return FinishedRun(
        folder=folder,
        config=read_json(folder / CONFIG),
        facts=read_json(folder / FACTS),
        metrics=read_metrics(folder),
        result=result,
        sample=sample.read_text(encoding="utf-8") if sample.exists() else "",
        recall=recall or (result["recall"] if result else None),
    )


def read_probe(folder: Path) -> dict[str, Any] | None:
    """What a probe of the runs in ``folder`` measured; None where there was none, or a run has gone, or was
    trained further, since then."""
    if not (folder / PROBE).exists():
        return None
    found = read_json(folder / PROBE)
    probed = found.get("checkpoints", {})
    places = {name: folder if (folder / FACTS).is_file() else folder / name for name in probed}
    is_current = all(
        place.resolve().name == name and newest_checkpoint(place) == probed[name]
        for name, place in places.items()
    )
    return found if probed and is_current else None


def newest_checkpoint(folder: Path) -> str:
    """The name of a run's newest checkpoint, the tokens seen by then; empty if there is none."""
    return next((path.name for path in numbered(folder / CHECKPOINTS)), "")
