"""The dashboard: its start and end, our own pages, and a guard that lets in only pages and programs of this
machine's user.

Nothing in our pages is from the network. There is no login, so no other web page may reach the dashboard
through the user's browser: neither as another origin, nor by a host name that resolves to this machine.
Starlette's check of hosts takes names alone; here every address is good, since no name leads to it.
"""

import errno
import importlib.util
import ipaddress
import json
import logging
import re
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import platformdirs
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from fastapi.responses import PlainTextResponse as Text
from filelock import Timeout

from memformers.common.console import printable
from memformers.common.errors import UserError
from memformers.common.files import locked, read_json, write_json
from memformers.common.network import LOOPBACK
from memformers.common.processes import handling
from memformers.dashboard import labml, live
from memformers.dashboard.labml import RUN_ID
from memformers.report.data import ReportData
from memformers.report.rendering import STYLE, page_of
from memformers.runs.card import read_card
from memformers.runs.folder import PAGE
from memformers.runs.metrics import read_metrics
from memformers.runs.reader import find_runs
from memformers.tracking.discovery import COMPARISONS, announce, api_address, note_comparison
from memformers.tracking.relay import import_run

ADDRESS = "address.json"
LOG_FILE = "dashboard.log"
CLOSE_SECONDS = 2  # how long a request may take after Ctrl-C
LOG = logging.getLogger("memformers.dashboard")
MAX_BYTES = 1_000_000  # the longest body of a request
WEB = Path(__file__).parent / "web"
ID = re.compile("[0-9a-f]{16}")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'",
    "cache-control": "no-cache",
}
"""These headers prevent that the name of a run runs a script, and show a new version of the page at once."""
OF_REPORT = HEADERS | {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
}  # those of a report, which holds its style and its figures, and no script
OF_RUN = re.compile(
    r"/api/v1/(?:run/status|run|metrics/preferences|metrics|compare/metrics|compare/preferences"
    r"|custom_metrics|logs/(?:stdout|stderr|std_logger))/(?P<run>[^/]+)(?:/\w+)?/?"
)  # the paths that ask about a run; of one that doesn't exist, labml would make records
TRACK = re.compile(r"/api/v1/[^/]+/track")
SAFE_HEADERS = {"x-content-type-options": "nosniff", "x-frame-options": "DENY",
                "referrer-policy": "same-origin"}  # fmt: skip


def serve(folder: Path | None, host: str, port: int, imported: Sequence[Path], open_browser: bool) -> None:
    """Run the dashboard whose records are in ``folder``, by default in the user's folder for data, until
    Ctrl-C, and bring the runs in the ``imported`` folders to it, or to one that already runs on the folder.
    ValueError if it can't be started."""
    # Runs that are imported: a run alone has a page, and so has each folder of runs.
    runs: list[Path] = []
    for path in imported:
        for run in find_runs(path):
            if run not in runs:
                runs.append(run)
                note_comparison(run if run == path else run.parent)

    # One dashboard for a folder of records
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
        bring_in(runs, owner)
        return

    # The server
    labml.quiet_labml(folder / LOG_FILE)
    with lock, listen(host, port) as listener:
        (folder / ADDRESS).unlink(missing_ok=True)  # that of the previous one
        # A browser can't open the address that stands for all of this machine's.
        reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
        url = f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{listener.getsockname()[1]}"
        names = frozenset({host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()})
        labml.use_records(folder)
        app = build(names)
        write_json(folder / ADDRESS, {"url": url})
        if host not in LOOPBACK:
            say(f"it listens on {host} and has no login: whoever reaches that sees and changes all.")
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )  # fmt: skip
        threading.Thread(target=bring_in, args=(runs, url), daemon=True).start()
        if open_browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

        # Until Ctrl-C
        announce(url)
        print(f"dashboard: {url}  (Ctrl-C ends it; records in {folder})", flush=True)
        interrupt = signal.default_int_handler
        with (
            handling(signal.SIGINT, interrupt),
            handling(signal.SIGTERM, interrupt),
            suppress(KeyboardInterrupt),
        ):
            uvicorn.Server(config).run(sockets=[listener])
    print("dashboard: stopped")


def build(names: frozenset[str]) -> FastAPI:
    """The application, for a machine with these ``names`` beside its addresses."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_pages(app)
    labml.add_labml(app)
    add_guard(app, names)
    return app


def listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        message = f"host={host!r} and port={port} can't be listened on: {error}"
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} is taken by another program; choose one with --port, or 0 for any."
        raise UserError(message) from None


def bring_in(runs: list[Path], url: str) -> None:
    """Send whole runs to the dashboard at ``url``, and print which of them arrived."""
    for run in runs:
        try:
            card = read_card(run)
            read_metrics(run)
            if import_run(run, api_address(url)):
                print(printable(f"imported: {card.name}  {url}/run/{card.run}"), flush=True)
                continue
        except (OSError, ValueError) as error:
            say(f"{run} can't be read as a run: {error}")
        say(f"{run} was not imported.")


def say(message: str) -> None:
    print(printable(f"dashboard: {message}"), file=sys.stderr, flush=True)


def add_pages(app: FastAPI) -> None:
    plotly_package = importlib.util.find_spec("plotly")
    plotly = Path((plotly_package and plotly_package.origin) or "").parent / "package_data" / "plotly.min.js"
    if not plotly.is_file():
        raise UserError("the dashboard needs plotly, which is not installed: pip install '.[dashboard]'")
    comparisons = live.Comparisons()
    lock = threading.Lock()  # requests come from several threads
    files = {path.name: path for path in (WEB / "live.js", WEB / "labml.js", plotly)}
    style = STYLE + (WEB / "live.css").read_text(encoding="utf-8")
    nothing = Text("There is nothing at this address.", 404)

    def home() -> Response:
        with lock:
            newest = next(iter(comparisons.all()), "")
        return RedirectResponse(f"{COMPARISONS}/{newest}" if newest else COMPARISONS)

    def every(run: str = "") -> Response:
        """All runs and comparisons, or the page that shows the run with this id in labml."""
        with lock:
            all_runs = comparisons.all()
            for identity, runs in all_runs.items():
                if run and run in [member.identity for member in runs.all]:
                    return RedirectResponse(f"{COMPARISONS}/{identity}")
            listed = live.list_of(all_runs, COMPARISONS)
        page = page_of(ReportData("Runs", tables=listed))
        return HTMLResponse(page, headers=OF_REPORT)

    def page(identity: str) -> Response:
        with lock:
            is_known = comparisons.get(identity)
        return FileResponse(WEB / "live.html", headers=HEADERS) if is_known else nothing

    def data(
        identity: str,
        metric: str = "",
        over: str = "tokens",
        log: bool = False,
        dark: bool = False,
        seen: str = "",
    ) -> Response:
        if not ID.fullmatch(identity) or over not in live.AXES:
            return Text("That is no page's id, or no axis.", 400)
        with lock:
            if not (runs := comparisons.get(identity)):
                return nothing
            version = live.version_of(runs, metric, over, log, dark)
            payload = {"version": version, "summary": live.status(runs)}
            if version != seen:
                payload |= live.describe(runs, metric, over, log=log, dark=dark, knows=labml.is_known)
            return JSONResponse(payload)

    def report(identity: str) -> Response:
        with lock:
            runs = comparisons.get(identity)
        if runs and (runs.folder / PAGE).is_file():
            return FileResponse(runs.folder / PAGE, headers=OF_REPORT, media_type="text/html; charset=utf-8")
        return nothing

    def file(name: str) -> Response:
        if name == "page.css":
            return Response(style, headers=HEADERS, media_type="text/css; charset=utf-8")
        kind = "text/javascript; charset=utf-8"
        return FileResponse(files[name], headers=HEADERS, media_type=kind) if name in files else nothing

    answers: dict[str, Callable[..., Response]] = {
        "/": home,
        COMPARISONS: every,
        f"{COMPARISONS}/files/{{name}}": file,
        f"{COMPARISONS}/{{identity}}": page,
        f"{COMPARISONS}/{{identity}}/report": report,
        f"{COMPARISONS}/{{identity}}/data": data,
    }
    for path, answer in answers.items():
        app.add_api_route(path, answer, response_class=Response)


def add_guard(app: FastAPI, names: frozenset[str]) -> None:
    """Refuse what no page or program of the user's asks ``app``."""

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        refused = refuse(request.headers, names)
        refused = refused or await check_body(request)
        refused = refused or check_run(request.url.path)
        response = refused or await answer(request)
        response.headers.update(SAFE_HEADERS)
        return response

    def say_failed(request: Request, error: Exception) -> Response:
        """labml's handlers find out by KeyError and ValueError that a request lacks something."""
        LOG.warning("%s %s: %r", request.method, request.url.path, error)
        status = 400 if isinstance(error, KeyError | ValueError) else 500
        return Text("The dashboard can't answer this request; its log says why.", status, SAFE_HEADERS)

    for kind in (KeyError, ValueError, Exception):
        app.add_exception_handler(kind, say_failed)


def refuse(headers: Mapping[str, str], names: frozenset[str]) -> Response | None:
    """A refusal of what this dashboard doesn't answer: another name for it, other origins, other sites."""
    host = headers.get("host", "")
    if not is_here(host, names):
        return Text(f"This dashboard is not called {host!r}; start it with --host to give it that name.", 403)
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host.lower()}":
        return Text("Requests of other origins are refused.", 403)
    is_opened = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not is_opened:
        return Text("Requests of other sites are refused, but for links to the page.", 403)
    return None


def check_run(path: str) -> Response | None:
    """A refusal of a path that asks labml about a run that there isn't."""
    asked = OF_RUN.fullmatch(path)
    if not asked:
        return None
    if not RUN_ID.fullmatch(asked["run"]):
        return Text("That is no run's id.", 400)
    run, _, _ = asked["run"].partition("_")  # followed by the rank of a process
    return None if labml.is_known(run) else Text("There is no such run.", 404)


def is_here(host: str, names: frozenset[str]) -> bool:
    """Whether a Host header is an address or one of our ``names``; other names are refused."""
    name = re.sub(r":\d+$", "", host.lower())
    if name == "localhost" or name in names:
        return bool(name)
    try:
        return bool(ipaddress.ip_address(re.sub(r"^\[(.*)\]$", r"\1", name)))
    except ValueError:
        return False


async def check_body(request: Request) -> Response | None:
    """A refusal of a body that is no JSON or too long. One that is too long is read to its end, since a
    program that is still sending would not read the answer."""
    length = request.headers.get("content-length", "0")
    if "transfer-encoding" in request.headers or not length.isdigit() or int(length) > MAX_BYTES:
        async for _ in request.stream():
            pass
        return Text(f"A request says its length, which is at most {MAX_BYTES:,} bytes.", 413)
    try:
        question = json.loads(await request.body() or b"{}")
    except (ValueError, RecursionError):
        return Text("A request's body is JSON, and this one is not.", 400)
    if not isinstance(question, dict) and not TRACK.fullmatch(request.url.path):
        return Text("A JSON object is expected.", 400)
    return None
