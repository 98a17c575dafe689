"""The pages of the dashboard's server: labml's own, whose files are copies or labml's, and the page of
comparisons, with the numbers that it requests."""

import re
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response

from memformers.dashboard.comparisons import LiveComparisons
from memformers.dashboard.guard import Knows
from memformers.tracking.discovery import COMPARISONS

WEB = Path(__file__).parent / "web"
"""The comparison page's own files, and the chart library uPlot 1.6.32 with its licence."""
COPIES = WEB / "labml"
"""The folder of the copies: d3 6.7.0 (BSD), Bootstrap 5.0.0-beta2's styles (MIT) and Font Awesome Free 5.9.0
(styles MIT, fonts OFL), with their licences, in the versions that labml-app 0.5.14's page requests."""
COPY_OF = {
    "https://d3js.org/d3.v6.min.js": "d3/dist/d3.min.js",
    "https://cdn.jsdelivr.net/npm/bootstrap@5.0.0-beta2/dist/css/bootstrap.min.css": (
        "bootstrap/dist/css/bootstrap.min.css"
    ),
    "https://cdnjs.cloudflare.com/ajax/libs/font-awesome/5.9.0/css/all.css": "fontawesome/css/all.css",
}
"""The copy of each file that labml's page loads from a public server."""
LOCAL = "/local/"
ON_LABML_PAGE = (
    '<link href="/comparisons/files/on_labml_page.css" rel="stylesheet">'
    '<script src="/comparisons/files/on_labml_page.js" defer></script>'
)
"""The addition to labml's page: a link to our page of comparisons."""
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

OF_REPORT = HEADERS | {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
}
"""Those of a report, which holds its style and its figures, and no script."""


def page_files(static: Path) -> dict[str, Path]:
    """Every file that may be served, by its path on the server; since none is joined, no other can be."""
    files = {f"/{path.relative_to(static).as_posix()}": path for path in _files(static)}
    return files | {f"{LOCAL}{path.relative_to(COPIES).as_posix()}": path for path in _files(COPIES)}


def index_page(static: Path) -> str:
    """labml's page, which loads the copies and nothing from the network."""
    html = (static / "index.html").read_text(encoding="utf-8")
    for url, copy in COPY_OF.items():
        html = html.replace(url, LOCAL + copy)
    return html.replace("</head>", f"{ON_LABML_PAGE}</head>")


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def add_pages(app: FastAPI, knows: Knows) -> None:
    """Serve the page of comparisons; ``knows`` says whether labml's pages have a run."""
    comparisons = LiveComparisons(knows)

    def page(identity: str = "", run: str = "") -> Response:
        if run and (found := comparisons.of_run(run)):
            return RedirectResponse(f"{COMPARISONS}/{found}")
        status = 404 if identity and not comparisons.known(identity) else 200
        return FileResponse(WEB / PAGE, status, HEADERS, media_type="text/html; charset=utf-8")

    def data(identity: str, metric: str = "", over: str = "tokens", seen: str = "") -> Response:
        if not ID.fullmatch(identity) or over not in ("tokens", "seconds"):
            return PlainTextResponse("A comparison is asked for by its id, over tokens or seconds.", 400)
        described = comparisons.describe(identity, metric, over, seen)
        if described is None:
            return PlainTextResponse("There is no such comparison.", 404)
        return JSONResponse(described)

    def report(identity: str) -> Response:
        if page := comparisons.report(identity):
            return FileResponse(page, headers=OF_REPORT, media_type="text/html; charset=utf-8")
        return PlainTextResponse("There is no report yet.", 404)

    def file(name: str) -> Response:
        if name not in FILES:
            return PlainTextResponse("Not found.", 404)
        kind = TYPES[FILES[name].suffix]
        return FileResponse(FILES[name], headers=HEADERS, media_type=f"{kind}; charset=utf-8")

    app.add_api_route("/", lambda: RedirectResponse(COMPARISONS), response_class=Response)
    app.add_api_route(COMPARISONS, page, response_class=Response)
    app.add_api_route(f"{COMPARISONS}/list", comparisons.list)
    app.add_api_route(f"{COMPARISONS}/files/{{name}}", file, response_class=Response)
    app.add_api_route(f"{COMPARISONS}/{{identity}}", page, response_class=Response)
    app.add_api_route(f"{COMPARISONS}/{{identity}}/report", report, response_class=Response)
    app.add_api_route(f"{COMPARISONS}/{{identity}}/data", data, response_class=Response)
