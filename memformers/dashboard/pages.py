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
from memformers.report.markdown import STYLE, TEMPLATE
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


def add_pages(app: FastAPI, knows: live.Knows) -> None:
    """Serve our pages; ``knows`` says whether labml's pages have a run. UserError where plotly, whose script
    they have from the installed package, is missing."""
    found = importlib.util.find_spec("plotly")
    plotly = Path((found and found.origin) or "").parent / "package_data" / "plotly.min.js"
    if not plotly.is_file():
        raise UserError("the dashboard needs plotly, which is not installed: pip install '.[dashboard]'")
    comparisons, lock = live.Comparisons(), threading.Lock()
    files = {path.name: path for path in (WEB / "live.js", WEB / "labml.js", plotly)}
    style = STYLE + (WEB / "live.css").read_text(encoding="utf-8")
    nothing = PlainTextResponse("There is nothing at this address.", 404)

    def home() -> Response:
        with lock:
            newest = next(iter(comparisons.all()), "")
        return RedirectResponse(f"{COMPARISONS}/{newest}" if newest else COMPARISONS)

    def every(run: str = "") -> Response:
        """All comparisons, or that of the run with this id in labml."""
        with lock:
            known = comparisons.all()
            for identity, runs in known.items():
                if run and any(one.identity == run for one in runs.all):
                    return RedirectResponse(f"{COMPARISONS}/{identity}")
            body = f"<h1>Comparisons</h1>{live.list_of(known, COMPARISONS) or NONE_YET}"
        page = TEMPLATE.substitute(title="Comparisons", style=STYLE, contents="", body=body)
        return HTMLResponse(page, headers=OF_REPORT)

    def page(identity: str) -> Response:
        with lock:
            is_known = comparisons.get(identity)
        return FileResponse(WEB / "live.html", headers=HEADERS) if is_known else nothing

    def data(
        identity: str, metric: str = "", over: str = "tokens", log: bool = False, dark: bool = False,
        seen: str = "",
    ) -> Response:  # fmt: skip
        if not ID.fullmatch(identity) or over not in live.AXES:
            return PlainTextResponse("That is no comparison's id, or no axis.", 400)
        with lock:
            if not (runs := comparisons.get(identity)):
                return nothing
            version = live.version_of(runs, metric, over, log, dark)
            told = {"version": version, "summary": live.summary(runs)}
            if version != seen:
                told |= live.describe(runs, metric, over, log=log, dark=dark, knows=knows)
            return JSONResponse(told)

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
