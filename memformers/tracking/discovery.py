"""Where a run is sent: to a given address, or to a dashboard on this machine, which writes a note so that
trainings find it."""

import contextlib
import json
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import platformdirs

from memformers.common.errors import UserError
from memformers.common.files import write_json
from memformers.common.network import ask_json, get

AUTO, OFF = "auto", "off"
WHO = "/memformers"
"""The path at which a dashboard returns its identity."""
TOKEN = "default"
"""Runs sent with this token appear on the runs page; it is also the one in labml's own examples."""
ANSWER_SECONDS = 2.0
DASHBOARD = "MEMFORMERS_DASHBOARD"
"""The environment variable that tells a training, and its relay, which dashboard to use."""
LABML_URL = "labml_app_url"
"""The environment variable by which labml itself finds its server."""


def find_dashboard(wish: str) -> str:
    """Where a run is sent: the labml server's address, ``http://host:port/api/v1/token``; "off"; or
    "auto", to a dashboard that runs on this machine whenever there is one.

    An empty value means the value of the environment variable, ours or labml's own, else "auto". ValueError
    for any other word.
    """
    wish = wish or os.environ.get(DASHBOARD, "").strip() or os.environ.get(LABML_URL, "").strip() or AUTO
    if wish not in (AUTO, OFF) and not wish.startswith(("http://", "https://")):
        raise UserError(f"dashboard={wish!r} must be auto, off or an address with http:// or https://.")
    return wish


def sent_to(dashboard: str) -> str:
    """The labml server's address that a run now goes to, or an empty string."""
    return find_running() if dashboard == AUTO else "" if dashboard == OFF else dashboard


def has_run(api: str, run: str, seconds: float = ANSWER_SECONDS) -> bool:
    """Whether the labml server that takes runs at ``api`` has the run of this id, so that a link to it leads
    somewhere."""
    try:
        return get(f"{api.rstrip('/').rpartition('/')[0]}/run/{run}", seconds)[0] == 200
    except OSError:
        return False


def check_dashboard(url: str) -> str:
    """The problem with the labml server at ``url``, or an empty string; within two seconds."""
    try:
        status, _ = get(url, ANSWER_SECONDS)
    except OSError as error:
        return f"doesn't answer ({error})"
    # labml's address takes posts only, so "not found" is a good answer.
    return f"answers with an error, {status}" if status >= 500 else ""


def notes_folder() -> Path:
    """The folder in which running dashboards write their notes."""
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
    """A word that distinguishes a dashboard from other programs that may use its port later."""
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
    """Whether no program listens at the address in ``note`` any more. A dashboard that only answers slowly
    still runs."""
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
