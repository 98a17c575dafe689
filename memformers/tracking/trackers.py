"""Other trackers that show a run: TensorBoard, wandb and trackio, each behind the same two methods, and each
imported only here. labml has its own process, ``relay.py``."""

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from memformers.common.errors import UserError
from memformers.runs.metrics import TOKENS

TRACK = "MEMFORMERS_TRACK"
"""The environment variable that names the trackers of a training, with commas between them."""


class Tracker(Protocol):
    """Shows one run. ``__init__`` takes its name, its group, its id, its settings, and a folder to use."""

    module: ClassVar[str]
    """The module that it imports from the package of its name."""

    def __init__(self, name: str, group: str, identity: str, settings: Mapping[str, Any], folder: Path): ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Show finite ``values`` at a number of tokens."""

    def finish(self) -> None:
        """Show nothing more."""


class TensorBoard:
    module: ClassVar[str] = "tensorboard.summary"

    def __init__(self, name: str, group: str, identity: str, settings: Mapping[str, Any], folder: Path):
        self.writer = import_tracker("tensorboard").Writer(str(folder))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


class Wandb:
    module: ClassVar[str] = "wandb"

    def __init__(self, name: str, group: str, identity: str, settings: Mapping[str, Any], folder: Path):
        wandb = import_tracker("wandb")
        folder.mkdir(parents=True, exist_ok=True)  # where WANDB_MODE=offline keeps it
        self.run = wandb.init(
            project="memformers", name=name, group=group, id=identity or None, config=dict(settings),
            dir=str(folder), resume="allow", reinit="create_new",
        )  # fmt: skip

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step)

    def finish(self) -> None:
        self.run.finish()


class Trackio:
    module: ClassVar[str] = "trackio"

    def __init__(self, name: str, group: str, identity: str, settings: Mapping[str, Any], folder: Path):
        trackio = import_tracker("trackio")
        # Its names are unique in a project, so the group is a part of them.
        self.run = trackio.init(
            project="memformers", name=f"{group}-{name}", group=group, config=dict(settings), resume="allow"
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step)

    def finish(self) -> None:
        self.run.finish()


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


def import_tracker(name: str) -> Any:
    """The module that a tracker needs; UserError if it isn't installed."""
    try:
        return importlib.import_module(TRACKERS[name].module)
    except ImportError as error:
        raise UserError(f"{name} is not installed ({error}): pip install {name}") from None


def find_trackers(track: str = "") -> Sequence[str]:
    """The names of trackers in a list with commas, or if that is empty, in $MEMFORMERS_TRACK; UserError for
    one that is unknown or not installed."""
    names = (track or os.environ.get(TRACK, "")).split(",")
    known = [name.strip() for name in names if name.strip()]
    for name in known:
        if name not in TRACKERS:
            raise UserError(f"expected track to be of {', '.join(TRACKERS)}, got {name!r}.")
        import_tracker(name)
    return known


def split_record(record: Mapping[str, float]) -> tuple[dict[str, float], int]:
    """The finite values of a record of metrics, and the tokens at which trackers draw them."""
    values = {}
    for name, value in record.items():
        if name != TOKENS and math.isfinite(value):
            values[name] = value
    return values, int(record[TOKENS])
