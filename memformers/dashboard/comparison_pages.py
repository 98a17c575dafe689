"""The comparison page on the dashboard's server: its files, and the numbers that it requests."""

import re
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response

from memformers.dashboard.comparisons import Knows, LiveComparisons
from memformers.tracking.comparisons import COMPARISONS

WEB = Path(__file__).parent / "web"
"""The page's own files, and the chart library uPlot 1.6.32 with its licence."""
PAGE = "comparisons.html"
FILES = {path.name: path for path in WEB.iterdir() if path.suffix in (".css", ".js")}
TYPES = {".css": "text/css", ".js": "text/javascript"}
ID = re.compile("[0-9a-f]{16}")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'",
    "cache-control": "no-cache",
}
"""These headers prevent that the name of a run runs a script, and show a new version of the page at once."""


def add_pages(app: FastAPI, knows: Knows) -> None:
    """Serve the page of comparisons; ``knows`` says whether labml's pages have a run."""
    comparisons = LiveComparisons(knows)

    def page(identity: str = "", run: str = "") -> Response:
        if run and (found := comparisons.of_run(run)):
            return RedirectResponse(f"{COMPARISONS}/{found}")
        status = 404 if identity and not comparisons.known(identity) else 200
        return FileResponse(WEB / PAGE, status, HEADERS, media_type="text/html; charset=utf-8")

    def all_of_them() -> list[dict[str, Any]]:
        return comparisons.list()

    def data(identity: str, metric: str = "", over: str = "tokens", seen: str = "") -> Response:
        if not ID.fullmatch(identity) or over not in ("tokens", "seconds"):
            return PlainTextResponse("A comparison is asked for by its id, over tokens or seconds.", 400)
        described = comparisons.describe(identity, metric, over, seen)
        if described is None:
            return PlainTextResponse("There is no such comparison.", 404)
        return JSONResponse(described)

    def file(name: str) -> Response:
        if name not in FILES:
            return PlainTextResponse("Not found.", 404)
        kind = TYPES[FILES[name].suffix]
        return FileResponse(FILES[name], headers=HEADERS, media_type=f"{kind}; charset=utf-8")

    app.add_api_route(COMPARISONS, page, response_class=Response)
    app.add_api_route(f"{COMPARISONS}/list", all_of_them)
    app.add_api_route(f"{COMPARISONS}/files/{{name}}", file, response_class=Response)
    app.add_api_route(f"{COMPARISONS}/{{identity}}", page, response_class=Response)
    app.add_api_route(f"{COMPARISONS}/{{identity}}/data", data, response_class=Response)
