"""What a dashboard shows of a run besides its metrics: ``labml.json`` in its folder."""

import time
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.common.files import config_from_dict, read_json, write_json
from memformers.runs.folder import CARD


@dataclass(frozen=True)
class RunCard:
    """What labml and the dashboards call a run. Times are in seconds since 1970, and 0 before the run
    starts."""

    comment: str
    """The line below the name, which the search also covers."""
    name: str = ""
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The id, the same in every session of the run, so that all sessions form one curve."""
    launched: float = 0.0
    """When an experiment started its process for the first time; 0 if none did."""
    started: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)
    status: str = ""
    """How the run ended, such as "completed"; empty while it runs."""
    ended: float = 0.0


def open_card(folder: Path, name: str, config: Mapping[str, Any]) -> RunCard:
    """The card of a training that starts or continues, without settings that its model doesn't use."""
    card = known_card(folder) or RunCard(folder.resolve().name)
    unused = ["unused", *config.get("unused", ())]
    card = replace(
        card,
        name=card.name or name,
        started=card.started or time.time(),
        config={setting: value for setting, value in config.items() if setting not in unused},
        status="",
    )
    write_json(folder / CARD, card)
    return card


def note_launch(folder: Path) -> None:
    """Note that an experiment starts the process of the run in ``folder`` now, unless it has begun before."""
    card = known_card(folder)
    if card and not card.started:
        write_json(folder / CARD, replace(card, launched=time.time()))


def close_card(folder: Path, status: str) -> None:
    write_json(folder / CARD, replace(read_card(folder), status=status, ended=time.time()))


def read_card(folder: Path) -> RunCard:
    return config_from_dict(RunCard, read_json(folder / CARD), str(folder / CARD))


def known_card(folder: Path) -> RunCard | None:
    """The card of the run in ``folder``; None, with a warning if it is broken, where there is none."""
    if not (folder / CARD).exists():
        return None
    try:
        return read_card(folder)
    except UserError as error:
        warnings.warn(f"{error} Dashboards will show this run as a new one.", stacklevel=2)
        return None
