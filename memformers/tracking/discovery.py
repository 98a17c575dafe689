"""How runs, comparisons and dashboards find each other.

A dashboard on this machine writes a note so that trainings find it. A comparison writes one too, by which
dashboards find its folder; it outlives both, so a dashboard that is started later shows it too.
"""

import contextlib
import hashlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import platformdirs

from memformers.common.errors import UserError
from memformers.common.files import read_json, write_json
from memformers.common.network import ask_json, get

AUTO, OFF = "auto", "off"
WHO = "/memformers"
"""The path at which a dashboard returns its identity."""
TOKEN = "default"
"""Runs sent with this token appear on the runs page; it is also the one in labml's own examples."""
COMPARISONS = "/comparisons"
"""Where a dashboard has its page of them."""
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
    """Whether the labml server that takes runs at ``api`` has the run, so that a link leads somewhere."""
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


def notes_folder(kind: str) -> Path:
    """The folder of this machine's notes of "dashboards" or of "comparisons"."""
    return platformdirs.user_state_path("memformers") / kind


def write_note(kind: str, name: str, said: dict[str, str], is_old: Callable[[Path], bool]) -> Path:
    """The path of a new note, after those of the same kind that are old were deleted."""
    folder = notes_folder(kind)
    folder.mkdir(parents=True, exist_ok=True)
    for note in folder.glob("*.json"):
        if is_old(note):
            note.unlink(missing_ok=True)
    write_json(folder / f"{name}.json", said)
    return folder / f"{name}.json"


@contextlib.contextmanager
def announced(url: str, identity: str) -> Iterator[None]:
    """Let trainings find the dashboard at ``url``, which answers ``identity``, during the block."""
    note = write_note("dashboards", identity, {"url": url, "identity": identity}, is_gone)
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def newest_first(notes: Path) -> list[Path]:
    """The notes in a folder, those of which may go at any moment."""
    times = {}
    for note in notes.glob("*.json"):
        with contextlib.suppress(OSError):
            times[note] = note.stat().st_mtime
    return sorted(times, key=lambda note: times[note], reverse=True)


def find_running() -> str:
    """The address for runs of the newest dashboard that runs on this machine, or an empty string."""
    running = filter(None, map(is_running, newest_first(notes_folder("dashboards"))))
    return next((api_address(url) for url in running), "")


def is_running(note: Path) -> str:
    """The address in ``note`` if the dashboard that left it answers there, else an empty string."""
    try:
        said = read_json(note)
        if ask_json(said["url"] + WHO, ANSWER_SECONDS)["identity"] == said["identity"]:
            return str(said["url"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return ""


def is_gone(note: Path) -> bool:
    """Whether no program listens at the address in ``note`` any more; one that is only slow still does."""
    try:
        address = urlsplit(read_json(note)["url"])
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


def comparison_id(folder: Path) -> str:
    """What a dashboard calls the comparison in ``folder``: 16 hexadecimal digits."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


def note_comparison(folder: Path) -> None:
    """Let dashboards on this machine show the runs in ``folder``; notes of folders that are gone go too.
    Raises OSError where the note can't be written."""
    known = noted_comparisons()
    gone = [identity for identity, other in known.items() if not other.is_dir()]
    said = {"folder": str(folder.resolve())}
    write_note("comparisons", comparison_id(folder), said, lambda note: note.stem in gone)


def noted_comparisons() -> dict[str, Path]:
    """The folders of all comparisons, by their ids; that which was begun last comes first."""
    found = {}
    for note in newest_first(notes_folder("comparisons")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            folder = Path(read_json(note)["folder"])
            if comparison_id(folder) == note.stem:
                found[note.stem] = folder
    return found


def show_comparison(folder: Path, dashboard: str) -> None:
    """Let dashboards on this machine show all runs in ``folder`` in one chart, and print where one does so;
    ``dashboard`` is what [`find_dashboard`][] gave."""
    if dashboard == OFF:
        return
    with contextlib.suppress(OSError):  # where the user's own folders can't be written
        note_comparison(folder)
    if page := comparison_page(sent_to(dashboard), folder):
        print(f"dashboard: {page}  (all runs in one chart)", flush=True)


def comparison_page(api: str, folder: Path) -> str:
    """Where the dashboard that takes runs at ``api`` shows the comparison in ``folder``; else empty."""
    path = f"{COMPARISONS}/{comparison_id(folder)}"
    with contextlib.suppress(OSError):
        if api and get(f"{api.partition('/api/')[0]}{path}", ANSWER_SECONDS)[0] == 200:
            return page_address(api) + path
    return ""
