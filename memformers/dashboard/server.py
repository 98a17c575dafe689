"""Starts and ends labml's dashboard, with its folder, its port and its runs."""

import errno
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import platformdirs
from filelock import Timeout

from memformers.common.errors import UserError
from memformers.common.files import locked, read_json, write_json
from memformers.common.network import LOOPBACK
from memformers.common.processes import handling
from memformers.runs.folder import read_card, read_metrics
from memformers.runs.reader import find_runs
from memformers.tracking.discovery import announce, api_address, note_comparison
from memformers.tracking.recorder import import_run

ADDRESS, LOG_FILE = "address.json", "dashboard.log"
CLOSE_SECONDS = 2
"""How long a request may take after Ctrl-C."""


def serve(folder: Path | None, host: str, port: int, imported: Sequence[Path], open_browser: bool) -> None:
    """Run the dashboard whose records are in ``folder``, by default in the user's folder for data, until
    Ctrl-C, and bring the runs in the ``imported`` folders to it, or to one that already runs on the folder.
    ValueError if it can't be started."""
    runs = {run: place for place in imported for run in find_runs(place)}
    for together in {run if run == place else run.parent for run, place in runs.items()}:
        note_comparison(together)
    folder = folder or platformdirs.user_data_path("memformers") / "dashboard"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        lock = locked(folder / ".lock")
    except Timeout:
        owner = "an address that it is about to open"
        with suppress(OSError, ValueError, KeyError):
            owner = str(read_json(folder / ADDRESS)["url"])
        if not (runs and owner.startswith("http")):
            what_to_do = "open that one, or name another folder with --folder."
            raise UserError(f"{folder} belongs to the dashboard that runs at {owner}; {what_to_do}") from None
        print(f"dashboard: {owner}")
        bring_in(list(runs), owner)
        return
    with lock:
        (folder / ADDRESS).unlink(missing_ok=True)  # that of the previous one
        serve_alone(folder, host, port, list(runs), open_browser)


def serve_alone(folder: Path, host: str, port: int, runs: list[Path], open_browser: bool) -> None:
    """Run the dashboard in a folder that this process owns."""
    try:
        import uvicorn

        from memformers.dashboard.labml import build, open_records, quiet_labml
    except ImportError as error:
        install = "pip install '.[dashboard]' in a clone of the repository"
        raise UserError(f"the dashboard needs {error.name}, which is not installed: {install}") from None
    quiet_labml(folder / LOG_FILE)

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with listen(host, port) as listener:
        here = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
        url = f"http://{f'[{here}]' if ':' in here else here}:{listener.getsockname()[1]}"
        names = frozenset({host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()})
        app = build(names, open_records(folder, say))
        write_json(folder / ADDRESS, {"url": url})
        if host not in LOOPBACK:
            say(f"it listens on {host} and has no login: whoever reaches that sees and changes all.")
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )  # fmt: skip
        if runs:
            threading.Thread(target=bring_in, args=(runs, url), daemon=True).start()
        if open_browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        announce(url)
        print(f"dashboard: {url}  (Ctrl-C ends it; records in {folder})", flush=True)
        with handling(signal.SIGINT, stop), handling(signal.SIGTERM, stop), suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
    print("dashboard: stopped")


def listen(host: str, port: int) -> socket.socket:
    """A socket at ``host`` and ``port``; ValueError if that is impossible."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        said = f"host={host!r} and port={port} can't be listened on: {error}"
        if error.errno == errno.EADDRINUSE:
            said = f"port {port} is taken by another program; choose one with --port, or 0 for any."
        raise UserError(said) from None


def bring_in(runs: list[Path], url: str) -> None:
    """Send whole runs to the dashboard at ``url``, and print which of them arrived."""
    for run in runs:
        try:
            card = read_card(run)
            read_metrics(run)
            arrived = import_run(run, api_address(url))
        except (OSError, ValueError) as error:
            arrived = False
            say(f"{run} can't be read as a run: {error}")
        if arrived:
            print(f"imported: {card.name}  {url}/run/{card.run}", flush=True)
        else:
            say(f"{run} was not imported.")


def say(message: str) -> None:
    """Print a message for the user who started the dashboard."""
    print(f"dashboard: {message}", file=sys.stderr, flush=True)
