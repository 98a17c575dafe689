"""How a training finds a dashboard that runs on this machine: by a note that the dashboard leaves."""

import contextlib
import json
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import platformdirs

from memformers.files import write_json
from memformers.network import ask_json

AUTO, OFF = "auto", "off"
WHO = "/memformers"
"""Where a dashboard says who it is."""
TOKEN = "default"
"""Runs sent with this token appear on the runs page; it is also the one in labml's own examples."""
ANSWER_SECONDS = 2.0


def notes_folder() -> Path:
    """Where running dashboards leave their notes."""
    return platformdirs.user_state_path("memformers") / "dashboards"


@contextlib.contextmanager
def announced(url: str, identity: str) -> Iterator[None]:
    """Let trainings find the dashboard at ``url``, which answers ``identity``, during the block."""
    folder = notes_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        if is_gone(old):
            old.unlink(missing_ok=True)
    note = folder / f"{identity}.json"
    write_json(note, {"url": url, "identity": identity})
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def new_identity() -> str:
    """A word by which a dashboard is told from whatever else may come to use its port."""
    return uuid.uuid4().hex


def find_running() -> str:
    """The address for runs of the newest dashboard that runs on this machine, or an empty string."""
    try:
        notes = sorted(notes_folder().glob("*.json"), key=lambda note: note.stat().st_mtime, reverse=True)
    except OSError:
        return ""
    for note in notes:
        if url := is_running(note):
            return api_address(url)
    return ""


def is_running(note: Path) -> str:
    """The address in ``note`` if the dashboard that left it answers there, else an empty string."""
    try:
        said = json.loads(note.read_text(encoding="utf-8"))
        if ask_json(said["url"] + WHO, ANSWER_SECONDS)["identity"] == said["identity"]:
            return str(said["url"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return ""


def is_gone(note: Path) -> bool:
    """Whether nobody listens any more where ``note`` says. One that is only slow to answer is there."""
    try:
        address = urlsplit(json.loads(note.read_text(encoding="utf-8"))["url"])
        socket.create_connection((address.hostname, address.port), ANSWER_SECONDS).close()
    except TimeoutError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return True
    return False


def api_address(url: str) -> str:
    """Where runs are sent, for the dashboard at ``url``."""
    return f"{url}/api/v1/{TOKEN}"


def page_address(api: str) -> str:
    """The dashboard's page, for the address that runs are sent to; without a name or a password."""
    root = api.partition("/api/")[0].rstrip("/")
    scheme, mark, host = root.partition("://")
    return scheme + mark + host.rpartition("@")[2]
