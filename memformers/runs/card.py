"""What dashboards show of a run besides its metrics: ``labml.json`` in its folder."""

import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.common.files import config_from_dict, read_json, write_json
from memformers.runs.folder import CARD


@dataclass(frozen=True)
class Card:
    """What a dashboard shows of a run besides its metrics: ``labml.json`` in its folder."""

    run: str
    """Its id: the same in every session of the run, so that all sessions form one curve."""
    comment: str
    """The line below the name, which the search also covers."""
    compare_with: str = ""
    """The id of the run with which labml's comparison shows this one; empty for none."""
    name: str = ""
    """Empty until the training chooses one."""
    started: float = 0.0
    """In seconds since 1970, as are all times here; 0 before it starts."""
    config: dict[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    """Of its settings, those that the user chose."""
    status: str = ""
    """How it ended, such as "completed"; empty while it runs."""
    ended: float = 0.0


def new_run_id() -> str:
    """An id that no other run has."""
    return uuid.uuid4().hex


def plan_run(folder: Path, run: str, comment: str, compare_with: str, name: str = "") -> None:
    """Write how the dashboard will show a training before it starts, which may choose the ``name`` itself."""
    write_json(folder / CARD, Card(run, comment, compare_with, name))


def open_card(folder: Path, name: str, config: Mapping[str, Any], given: Sequence[str] = ()) -> Card:
    """The card of a training that starts or goes on in ``folder``, without settings that its model doesn't
    use; the user chose the ``given`` ones."""
    card = known_card(folder) or Card(new_run_id(), folder.resolve().name)
    no_use = ["unused", *config.get("unused", ())]
    card = replace(
        card,
        name=card.name or name,
        started=card.started or time.time(),
        config={name: value for name, value in config.items() if name not in no_use},
        given=tuple(given),
        status="",
    )
    write_json(folder / CARD, card)
    return card


def close_card(folder: Path, status: str) -> None:
    """Write how the run in ``folder`` ended."""
    write_json(folder / CARD, replace(read_card(folder), status=status, ended=time.time()))


def read_card(folder: Path) -> Card:
    """The card of the run in ``folder``; ValueError if it can't be read."""
    return config_from_dict(Card, read_json(folder / CARD), str(folder / CARD))


def known_card(folder: Path) -> Card | None:
    """The card of the run in ``folder``; None if it has none, or one that can't be read, which is a warning,
    since only a dashboard needs it."""
    try:
        return read_card(folder) if (folder / CARD).exists() else None
    except UserError as error:
        warnings.warn(f"{error} The run is another one for dashboards.", stacklevel=2)
        return None
