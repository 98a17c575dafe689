"""What a dashboard shows of a run besides its metrics: ``labml.json`` in its folder."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.common.files import read_json, write_json
from memformers.runs.folder import CARD, METRICS, RESULT


@dataclass(frozen=True)
class Card:
    """A run as the dashboard shows it."""

    run: str
    """Its id: the same in every session of the run, so that all sessions form one curve."""
    name: str
    comment: str
    """The line below the name, which the search also covers."""
    started: float
    """In seconds since 1970, as are all times here."""
    config: Mapping[str, Any]
    given: tuple[str, ...]
    """Of its settings, those that the user chose."""
    compare_with: str
    """The id of the run with which labml's comparison shows this one; empty for none."""
    status: str
    """How it ended, such as "completed"; empty while it runs, or if this is not known."""
    ended: float


def new_run_id() -> str:
    """An id that no other run has."""
    return uuid.uuid4().hex


def plan_run(folder: Path, run: str, comment: str, compare_with: str, name: str = "") -> None:
    """Write, before a training in ``folder`` starts, how the dashboard will show it; without a ``name``, the
    training chooses one."""
    planned = {"run": run, "comment": comment, "compare_with": compare_with}
    write_json(folder / CARD, planned | ({"name": name} if name else {}))


def open_card(folder: Path, name: str, config: Mapping[str, Any], given: Sequence[str] = ()) -> Card:
    """The card of a training that starts, or continues, in ``folder``, with settings ``config`` of which the
    user chose the ``given`` ones."""
    planned = read_json(folder / CARD) if (folder / CARD).exists() else {}
    fresh = {"run": new_run_id(), "comment": folder.resolve().name, "started": time.time()}
    data = {**fresh, "name": name, **planned, "config": dict(config), "given": list(given)}
    data.pop("status", None)
    write_json(folder / CARD, data)
    return read_card(folder)


def close_card(folder: Path, status: str) -> None:
    """Write how the run in ``folder`` ended."""
    write_json(folder / CARD, {**read_json(folder / CARD), "status": status, "ended": time.time()})


def read_card(folder: Path) -> Card:
    """The card of the run in ``folder``, with defaults for what an older version didn't write; ValueError if
    it can't be read."""
    data = read_json(folder / CARD) if (folder / CARD).exists() else {}
    metrics = (folder / METRICS).stat().st_mtime if (folder / METRICS).exists() else time.time()
    status = data.get("status", "")
    if not status and (folder / RESULT).exists():
        status = "completed"
    return Card(
        run=str(data.get("run") or uuid.uuid5(uuid.NAMESPACE_URL, folder.resolve().as_uri()).hex),
        name=str(data.get("name", folder.resolve().name)),
        comment=str(data.get("comment", folder.resolve().name)),
        started=float(data.get("started", metrics)),
        config=data.get("config", {}),
        given=tuple(data.get("given", ())),
        compare_with=str(data.get("compare_with", "")),
        status=str(status),
        ended=float(data.get("ended", metrics)),
    )


def find_runs(folder: Path) -> list[Path]:
    """All runs in ``folder``, be it a run, a comparison, or a folder of these; ValueError if none."""
    runs = [path.parent for path in _metrics_in(folder)]
    if not runs:
        raise UserError(f"{folder} holds no run: no {METRICS} in it or in its sub-folders.")
    return sorted(runs, key=lambda run: read_card(run).started)


def _metrics_in(folder: Path) -> Iterator[Path]:
    for pattern in (METRICS, f"*/{METRICS}", f"*/*/{METRICS}"):
        yield from folder.glob(pattern)
