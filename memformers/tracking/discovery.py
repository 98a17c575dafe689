"""How runs and dashboards find each other, by files of this machine's user: ``dashboard.json`` has the
address of the dashboard that was started last, and each run or comparison leaves a note of its folder."""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import platformdirs

from memformers.common.errors import UserError
from memformers.common.files import read_json, write_json
from memformers.common.network import ask_json, get

AUTO = "auto"
OFF = "off"
WHO = "/memformers"
"""The path at which a dashboard returns its process."""
TOKEN = "default"
"""Runs sent with this token appear on the runs page; it is also the one in labml's own examples."""
COMPARISONS = "/comparisons"
"""The path of a dashboard's pages of comparisons."""
ANSWER_SECONDS = 2.0
DASHBOARD = "MEMFORMERS_DASHBOARD"
"""The environment variable that names the dashboard of a training."""
LABML_URL = "labml_app_url"
"""labml's environment variable for its server's address."""


def find_dashboard(dashboard: str) -> str:
    """Where a run is sent: a labml server's address, ``http://host:port/api/v1/token``; "off"; or "auto", any
    dashboard on this machine. An empty ``dashboard`` means what the environment says, else "auto"."""
    name = dashboard
    for variable in (DASHBOARD, LABML_URL):
        name = name or os.environ.get(variable, "").strip()
    name = name or AUTO
    if name not in (AUTO, OFF) and not name.startswith(("http://", "https://")):
        raise UserError(f"dashboard={name!r} must be auto, off or an address with http:// or https://.")
    return name


def sent_to(dashboard: str) -> str:
    """The labml server's address that a run now goes to, or an empty string."""
    if dashboard == AUTO:
        note = running()
        return api_address(note["url"]) if note else ""
    return "" if dashboard == OFF else dashboard


def check_dashboard(url: str) -> str:
    """The problem with the labml server at ``url``, or an empty string."""
    try:
        status, _ = get(url, ANSWER_SECONDS)
    except OSError as error:
        return f"doesn't answer ({error})"
    # labml's address takes posts only, so "not found" is a good answer.
    return f"answers with an error, {status}" if status >= 500 else ""


def api_address(url: str) -> str:
    """Where runs are sent, for the dashboard at ``url``."""
    return f"{url}/api/v1/{TOKEN}"


def page_address(api: str) -> str:
    """The dashboard's page, for the address that runs are sent to; without a name or a password."""
    scheme, mark, host = api.partition("/api/")[0].rstrip("/").partition("://")
    return scheme + mark + host.rpartition("@")[2]


def state_folder() -> Path:
    return platformdirs.user_state_path("memformers")


def announce(url: str) -> None:
    state_folder().mkdir(parents=True, exist_ok=True)
    write_json(state_folder() / "dashboard.json", {"url": url, "process": os.getpid()})


def running() -> dict[str, Any]:
    """The ``url`` and the ``process`` of the dashboard that was started last; empty if it doesn't run."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        note = read_json(state_folder() / "dashboard.json")
        if ask_json(note["url"] + WHO, ANSWER_SECONDS)["process"] == note["process"]:
            return note
    return {}


def comparison_id(folder: Path) -> str:
    """What a dashboard calls the comparison in ``folder``: 16 hexadecimal digits."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


def note_comparison(folder: Path) -> None:
    """Let dashboards on this machine show the runs in ``folder``."""
    notes = state_folder() / "comparisons"
    notes.mkdir(parents=True, exist_ok=True)
    write_json(notes / f"{comparison_id(folder)}.json", {"folder": str(folder.resolve())})


def noted_comparisons() -> dict[str, Path]:
    """The folders of all comparisons that are still there, by their ids, newest first."""
    notes = []
    for note in (state_folder() / "comparisons").glob("*.json"):
        with contextlib.suppress(OSError, UserError):
            folder = Path(read_json(note, {"folder": str})["folder"])
            if folder.is_dir() and comparison_id(folder) == note.stem:
                notes.append((note.stat().st_mtime, note.stem, folder))
    return {identity: folder for _, identity, folder in sorted(notes, reverse=True)}


def show_comparison(folder: Path, dashboard: str) -> bool:
    """Let dashboards on this machine show the run, or all runs, in ``folder`` in one chart, and print where
    one does so; returns whether one does. ``dashboard`` is what [`find_dashboard`][] gave."""
    if dashboard == OFF:
        return False
    with contextlib.suppress(OSError):  # where the user's own folders can't be written
        note_comparison(folder)
    api = sent_to(dashboard)
    path = f"{COMPARISONS}/{comparison_id(folder)}"
    with contextlib.suppress(OSError):
        if api and get(api.partition("/api/")[0] + path, ANSWER_SECONDS)[0] == 200:
            print(f"dashboard: {page_address(api)}{path}", flush=True)
            return True
    return False
