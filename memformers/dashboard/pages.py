"""Our own pages: that of a comparison, the list of them, and the reports. Nothing in them is from the
network."""

import importlib.util
import re
import threading
from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)

from memformers.common.errors import UserError
from memformers.dashboard import live
from memformers.report.page import STYLE, TEMPLATE
from memformers.runs.folder import PAGE
from memformers.tracking.discovery import COMPARISONS

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
}
"""Those of a report, which holds its style and its figures, and no script."""
NONE_YET = (
    "<p>No comparison yet. Start one with: <code>memformers compare --scale 0.1</code>. A run of its own, as "
    'memformers train begins one, is among <a href="/runs">labml\'s runs</a>.</p>'
)


def plotly_file() -> Path:
    """plotly's script in the installed package; UserError where it is missing."""
    found = importlib.util.find_spec("plotly")
    path = Path((found and found.origin) or "").parent / "package_data" / "plotly.min.js"
    if not path.is_file():
        raise UserError("the dashboard needs plotly, which is not installed: pip install '.[dashboard]'")
    return path


def add_pages(app: FastAPI, knows: live.Knows) -> None:
    """Serve our pages; ``knows`` says whether labml's pages have a run."""
    comparisons, lock = live.Comparisons(), threading.Lock()
    files = {path.name: path for path in (WEB / "live.js", WEB / "labml.js", plotly_file())}
    style = STYLE + (WEB / "live.css").read_text(encoding="utf-8")

    def home() -> Response:
        with lock:
            newest = next(iter(comparisons.all()), "")
        return RedirectResponse(f"{COMPARISONS}/{newest}" if newest else COMPARISONS)

    def every(run: str = "") -> Response:
        with lock:
            if run and (found := comparisons.of_run(run)):
                return RedirectResponse(f"{COMPARISONS}/{found}")
            links = live.list_of(comparisons.all(), COMPARISONS)
        body = f"<h1>Comparisons</h1>{links or NONE_YET}"
        page = TEMPLATE.substitute(title="Comparisons", style=STYLE, contents="", body=body)
        return HTMLResponse(page, headers=OF_REPORT)

    def page(identity: str) -> Response:
        with lock:
            if not comparisons.get(identity):
                return PlainTextResponse("There is no such comparison.", 404)
        return FileResponse(WEB / "live.html", headers=HEADERS)

    def data(
        identity: str, metric: str = "", over: str = "tokens", log: bool = False, dark: bool = False,
        seen: str = "",
    ) -> Response:  # fmt: skip
        if not ID.fullmatch(identity) or over not in live.AXES:
            return PlainTextResponse("That is no comparison's id, or no axis.", 400)
        with lock:
            if not (runs := comparisons.get(identity)):
                return PlainTextResponse("There is no such comparison.", 404)
            version = live.version_of(runs, metric, over, log, dark)
            new = (
                {} if version == seen else live.describe(runs, metric, over, log=log, dark=dark, knows=knows)
            )
            return JSONResponse({"version": version, "summary": live.summary(runs), **new})

    def report(identity: str) -> Response:
        with lock:
            runs = comparisons.get(identity)
        if runs and (runs.folder / PAGE).is_file():
            return FileResponse(runs.folder / PAGE, headers=OF_REPORT, media_type="text/html; charset=utf-8")
        return PlainTextResponse("There is no report yet.", 404)

    def file(name: str) -> Response:
        if name == "page.css":
            return Response(style, headers=HEADERS, media_type="text/css; charset=utf-8")
        if name in files:
            return FileResponse(files[name], headers=HEADERS, media_type="text/javascript; charset=utf-8")
        return PlainTextResponse("Not found.", 404)

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
