"""labml's web page, file by file, and copies of the files that it would load from the network."""

from pathlib import Path

COPIES = Path(__file__).parent / "web" / "labml"
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


def page_files(static: Path) -> dict[str, Path]:
    """Every file that may be served, by its path on the server: labml's page, and the copies. No other file
    can be requested, since no path is ever joined."""
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
