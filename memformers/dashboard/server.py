"""Starts and ends labml's dashboard, with its folder, its port and its runs."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import platformdirs

from memformers.common.errors import UserError
from memformers.common.network import LOOPBACK
from memformers.runs.folder import COMPARISON, find_runs, read_card
from memformers.tracking.comparisons import note_comparison
from memformers.tracking.discovery import announced, api_address, new_identity
from memformers.tracking.feeding import feed

INSTALL = "pip install '.[dashboard]' in a clone of the repository"
LOCK, LOG_FILE = "lock.json", "dashboard.log"
CLOSE_SECONDS = 2
"""How long a request may take after Ctrl-C."""


@dataclass(frozen=True)
class Settings:
    """The settings of a dashboard."""

    folder: Path
    host: str
    port: int
    mongo: str
    runs: tuple[Path, ...]
    """Folders of runs to bring in."""
    open_browser: bool


def default_folder() -> Path:
    """The default folder of the records."""
    return platformdirs.user_data_path("memformers") / "dashboard"


def serve(settings: Settings) -> None:
    """Run the dashboard until Ctrl-C. If one already runs on the folder, bring the runs to it, if
    there are any. ValueError if it can't be started."""
    found = {folder: find_runs(folder) for folder in settings.runs}
    runs = [run for inside in found.values() for run in inside]
    for folder in dict.fromkeys(together(run, folder) for folder, inside in found.items() for run in inside):
        note_comparison(folder)
    settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(settings.folder / LOCK, "a+", encoding="utf-8") as lock:
        if owner := take(lock.fileno(), settings.folder):
            if not (runs and owner.startswith("http")):
                raise UserError(
                    f"{settings.folder} belongs to the dashboard that runs at {owner}; open that one, or "
                    f"name another folder with --folder."
                )
            print(f"dashboard: {owner}")
            bring_in(runs, owner)
            return
        serve_alone(settings, runs)


def together(run: Path, given: Path) -> Path:
    """The folder of the runs that are shown in one chart with ``run``: those of its comparison, or otherwise
    all that the user has ``given`` with it."""
    return run.parent if (run.parent / COMPARISON).exists() else given


def serve_alone(settings: Settings, runs: list[Path]) -> None:
    """Run the dashboard in a folder that this process owns."""
    try:
        import uvicorn

        from memformers.dashboard.application import build, open_mongo, open_records, quiet_labml
    except ImportError as error:
        raise UserError(f"the dashboard needs {error.name}, which is not installed: {INSTALL}") from None
    quiet_labml(settings.folder / LOG_FILE)
    with listen(settings.host, settings.port) as listener:
        port = listener.getsockname()[1]
        url = f"http://{bracketed(reachable(settings.host))}:{port}"
        records = None
        if settings.mongo:
            open_mongo(settings.mongo)
        else:
            records = open_records(settings.folder, say)
        place = settings.mongo.rpartition("@")[2] or settings.folder  # without a password
        identity = new_identity()
        names = frozenset({settings.host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()})
        app = build(identity, names, records)
        (settings.folder / LOCK).write_text(json.dumps({"url": url}), encoding="utf-8")
        if settings.host not in LOOPBACK:
            say(f"it listens on {settings.host} and has no login: whoever reaches that sees and changes all.")
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )
        if runs:
            threading.Thread(target=bring_in, args=(runs, url), daemon=True).start()
        if settings.open_browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        with announced(url, identity), ends_well():
            print(
                f"dashboard: {url}  (Ctrl-C ends it; records in {place})",
                flush=True,
            )
            server.run(sockets=[listener])
    print("dashboard: stopped")


def take(lock: int, folder: Path) -> str:
    """Make this process the folder's only dashboard until it ends in any way; returns an empty string, or the
    address of the dashboard that already has the folder."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            return str(json.loads((folder / LOCK).read_text(encoding="utf-8"))["url"])
        except (ValueError, KeyError):
            return "an address that it is about to open"
    os.truncate(lock, 0)  # the address of the previous one
    return ""


def listen(host: str, port: int) -> socket.socket:
    """A socket at ``host`` and ``port``; ValueError if that is impossible."""
    if not 0 <= port < 1 << 16:  # some systems take it modulo 65536 instead
        raise UserError(f"port={port} of host={host!r} is out of range; use 0 to 65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"host={host!r} and port={port} are not an address of this machine: {error}"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} is taken by another program; choose one with --port, or 0 for any."
            ) from None
        raise UserError(f"host={host!r} and port={port} can't be listened on: {error}") from None
    return listener


def reachable(host: str) -> str:
    """The address at which this machine itself reaches a server that listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def bracketed(host: str) -> str:
    """A host as it is written in a URL."""
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def ends_well() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM, after which uvicorn has closed everything, end only the block."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def bring_in(runs: list[Path], url: str) -> None:
    """Send whole runs to the dashboard at ``url``, and print which of them arrived."""
    over = threading.Event()
    over.set()
    for run in runs:
        try:
            arrived = feed(run, lambda: api_address(url), over)
        except (ValueError, KeyError) as error:
            arrived = False
            say(f"{run} can't be read as a run: {error}")
        if arrived:
            print(f"imported: {read_card(run).name}  {url}/run/{read_card(run).run}", flush=True)
        else:
            say(f"{run} was not imported.")


def say(message: str) -> None:
    """Print a message for the user who started the dashboard."""
    print(f"dashboard: {message}", file=sys.stderr, flush=True)
