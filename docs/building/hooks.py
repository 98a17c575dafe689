"""What mkdocs calls while it builds the site."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.building.drawings import DRAWINGS, svg
from docs.building.markdown import expanded, named, relinked
from docs.building.maths import with_mathml
from docs.building.notebooks import for_the_site
from docs.building.source import ROOT

ELSEWHERE = {
    "results/speed.md": "experiments/benchmarks/RESULTS.md",
    "results/decoding.md": "experiments/benchmarks/DECODING.md",
    "results/figures/attention.png": "experiments/benchmarks/figures/attention.png",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
"""Files of the site that lie outside of docs/."""
HIDDEN = ("__init__", "__main__")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the reference: a page for each module."""
    nav: list[Any] = config.nav or []
    for entry in nav:
        if "API reference" in entry:
            entry["API reference"] = ["api/index.md", *({name: page_of(name)} for name in modules())]
    return config


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is drawn, what lies elsewhere, the notebooks and the reference's pages."""
    for name, draw in DRAWINGS.items():
        files.append(File.generated(config, f"drawings/{name}.svg", content=svg(draw())))
    for uri, path in ELSEWHERE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for notebook in sorted((ROOT / "experiments/notebooks").glob("*.ipynb")):
        uri, folder = f"notebooks/{notebook.name}", str(ROOT / "experiments")
        files.append(File(uri, folder, config.site_dir, config.use_directory_urls))
    for name in modules():
        files.append(File.generated(config, page_of(name), content=f"::: {name}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put in the source lines and tables that a page asks for."""
    uri = page.file.src_uri
    if uri in ELSEWHERE:
        return relinked(markdown, {path: site for site, path in ELSEWHERE.items()})
    try:
        return named(expanded(markdown), uri)
    except (ValueError, OSError, IndexError) as error:
        raise PluginError(f"{uri}: {error}") from None


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Draw the formulas, and complete a notebook's page."""
    try:
        if page.file.src_uri.endswith(".ipynb"):
            return for_the_site(html, Path(page.file.abs_src_path))
        return with_mathml(html)
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from None


def modules() -> list[str]:
    """All public modules by name, packages before what is in them."""
    paths = sorted(ROOT.glob("memformers/**/*.py"), key=lambda path: path.with_suffix("").parts)
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    packages = [name.removesuffix(".__init__") for name in names if name.endswith(".__init__")]
    return packages[:1] + sorted(
        [name for name in names if name.rpartition(".")[2] not in HIDDEN and "._" not in name] + packages[1:]
    )


def page_of(module: str) -> str:
    """Where its page is."""
    return f"api/{module}.md"
