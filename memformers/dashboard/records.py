"""labml's records as files that are written atomically: labml-db's drivers, made safe.

Records refer to each other, so where one can't be read, all are set aside: they are copies of what runs have
in their folders, and come again. They are JSON, with marks for the types that labml stores besides plain
values, and not pickles: a file that someone else wrote must not be able to run code.
"""

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from labml_db import Index, Key, Model
from labml_db.driver.file import FileDbDriver
from labml_db.index_driver.file import FileIndexDbDriver

from memformers.common.files import write_text
from memformers.common.text import UserError

ASIDE = "unreadable"
"""The folder of the files that can't be read."""


def to_text(record: Any) -> str:
    return json.dumps(_marked(record), default=_to_json)


def from_text(text: str) -> dict[str, Any]:
    """The record or index in a text; ValueError or TypeError if it isn't one."""
    record = json.loads(text, object_hook=_from_json)
    if not isinstance(record, dict):
        raise UserError(f"it holds a {type(record).__name__}, not a record")
    return record


def _marked(value: Any) -> Any:
    """``value``; a dict in it that looks like a mark below, since a run may send anything, is marked too."""
    if isinstance(value, dict):
        items = {name: _marked(item) for name, item in value.items()}
        return {"$dict": list(items.items())} if any(str(name).startswith("$") for name in items) else items
    return [_marked(item) for item in value] if isinstance(value, list | tuple) else value


def _to_json(value: Any) -> Any:
    if isinstance(value, Key):
        return {"$key": str(value)}
    if isinstance(value, set):
        return {"$set": sorted(value)}
    if isinstance(value, np.ndarray):
        return {"$array": base64.b64encode(value.astype("<f8").tobytes()).decode()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} can't be part of a record")


def _from_json(value: dict[str, Any]) -> Any:
    match value:
        case {"$dict": items}:
            return dict(items)
        case {"$key": key}:
            return Key(key)
        case {"$set": items}:
            return set(items)
        case {"$array": data}:
            return np.frombuffer(base64.b64decode(data), "<f8")
    return value


class Records:
    """The drivers for labml's models and indexes in ``folder``, which only this process uses. All records are
    read once; ``is_damaged`` when one can't be, which ``say`` tells the user, and all are set aside."""

    def __init__(self, folder: Path, say: Callable[[str], None], models: list[Any], indexes: list[Any]):
        self.folder, self.say, self.models, self.index_types = folder, say, models, indexes
        self.install()
        for driver in self.drivers.values():
            for key in driver.get_all():
                driver.load_dict(key)
        for index in self.indexes.values():
            for key in index.get_all():
                owner = self.drivers.get(key.partition(":")[0])
                if owner is None or not owner.path(key).exists():
                    self.found_broken(self.folder / "indexes", f"{key} is missing")
        if self.is_damaged:
            self.begin_again()

    def install(self) -> None:
        """Let labml use what is here, without unfinished files of a dashboard that was killed."""
        self.is_damaged = False
        (self.folder / "indexes").mkdir(parents=True, exist_ok=True)
        for unfinished in self.folder.glob("*/.*"):
            unfinished.unlink(missing_ok=True)
        self.drivers = {model.__name__: RecordDriver(self, model) for model in self.models}
        self.indexes = {index.__name__: IndexDriver(self, index) for index in self.index_types}
        Model.set_db_drivers(list(self.drivers.values()))
        Index.set_db_drivers(list(self.indexes.values()))

    def begin_again(self) -> None:
        """Set all records aside, and start with none."""
        aside = self.folder / ASIDE / f"{time.time_ns()}"
        aside.mkdir(parents=True)
        for path in self.folder.iterdir():
            if path.is_dir() and path.name != ASIDE:
                path.replace(aside / path.name)
        again = "runs that go on come again, and --import brings others."
        self.say(f"all records were set aside as {aside}; {again}")
        self.install()

    def read(self, path: Path) -> dict[str, Any] | None:
        """The contents of the file; None if it doesn't exist or can't be read."""
        try:
            return from_text(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            self.found_broken(path, error)
        return None

    def found_broken(self, path: Path, why: object) -> None:
        """Remember, and say, that something can't be read."""
        if not self.is_damaged:
            self.say(f"{path} couldn't be read: {why}")
        self.is_damaged = True


class RecordDriver(FileDbDriver):
    """The records of one model, a file for each."""

    def __init__(self, records: Records, model: Any):
        super().__init__(None, model, records.folder / model.__name__)
        self._records = records

    def path(self, key: str) -> Path:
        return Path(self._db_path, f"{key}.json")

    def load_dict(self, key: str) -> dict[str, Any] | None:
        return self._records.read(self.path(key))

    def save_dict(self, key: str, data: dict[str, Any]) -> None:
        write_text(self.path(key), to_text(data))

    def delete(self, key: str) -> None:
        self.path(key).unlink(missing_ok=True)


class IndexDriver(FileIndexDbDriver):
    """One index: a file that maps names to keys of records."""

    def __init__(self, records: Records, index: Any):
        super().__init__(None, index, records.folder / "indexes" / f"{index.__name__}.json")
        self.entries: dict[str, str] = records.read(self._index_path) or {}
        """The keys by their names."""
        self._cache = self.entries

    def _save_cache(self) -> None:
        write_text(self._index_path, to_text(self.entries))

    def get_all(self) -> list[str]:
        """The keys of all records in the index, as labml's driver for MongoDB returns them."""
        return list(self.entries.values())
