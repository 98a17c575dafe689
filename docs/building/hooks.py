"""What mkdocs calls while it builds the site."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.building import reference
from docs.building.command_line import command_pages
from docs.building.drawings import DRAWINGS, svg
from docs.building.markdown import COMMENT, relinked
from docs.building.pages import finished, of_notebook, with_figures
from docs.building.results import ROOT
from memformers.cli import COMMANDS
from memformers.report.rendering import dark_rules

FIGURE_STYLE = "stylesheets/figures.css"
"""The colours of figures on a dark page."""
NOTEBOOKS = sorted((ROOT / "experiments/notebooks").glob("*.ipynb"))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the commands, and the reference: a page for each public name, and one for each module among
    the internals."""
    config.extra_css.append(FIGURE_STYLE)
    for entry in config.nav or []:
        if "Commands" in entry:
            entry["Commands"] += [{name: f"commands/{name}.md"} for name in COMMANDS]
        if "API reference" in entry:
            entry["API reference"] = reference.public_navigation()
        if "Internals" in entry:
            entry["Internals"] += reference.module_navigation()
    return config


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is drawn, what lies elsewhere, the notebooks and the reference's pages."""
    # Pages and drawings that are made from the source
    pages = reference.pages() | command_pages()
    pages[FIGURE_STYLE] = dark_rules('[data-md-color-scheme="slate"] .figure ')
    for name, draw in DRAWINGS.items():
        pages[f"drawings/{name}.svg"] = svg(draw())
        for page, language in config.extra["languages"].items():
            pages[f"drawings/{name}.{page.removesuffix('.md')}.svg"] = svg(draw(), language)
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    # Pages of the repository outside of docs/
    for uri, path in config.extra["elsewhere"].items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for notebook in NOTEBOOKS:
        folder = str(ROOT / "experiments")
        files.append(File(f"notebooks/{notebook.name}", folder, config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, **_: Any) -> str:
    """Put in the public names that a page asks for, leave out what it asked for in comments, and weigh it for
    the search."""
    uri = page.file.src_uri
    elsewhere = config.extra["elsewhere"]
    page.meta.setdefault("search", {"boost": boost_of(uri, config.extra["boosts"])})
    if uri.endswith(".ipynb") or uri.startswith(tuple(config.extra["wide"])):
        page.meta["hide"] = ["toc"]  # without it, the longest lines of code and most tables fit the page
    pages = {path: site for site, path in elsewhere.items()}
    try:
        markdown = reference.with_public_names(COMMENT.sub("", markdown))
        return relinked(markdown, elsewhere.get(uri, f"docs/{uri}"), pages)
    except ValueError as error:
        raise PluginError(f"{uri}: {error}") from None


def boost_of(uri: str, boosts: Mapping[str, float]) -> float:
    """The weight of a page in the search: that of the first beginning of its path that is listed."""
    for beginning, boost in boosts.items():
        if uri.startswith(beginning):
            return boost
    return 1


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Finish a page."""
    uri = page.file.src_uri
    try:
        is_notebook = uri.endswith(".ipynb")
        return of_notebook(html, Path(page.file.abs_src_path)) if is_notebook else finished(html, uri)
    except ValueError as error:
        raise PluginError(f"{uri}: {error}") from None


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    """Say which language a page is in, since the theme knows that of the site only, and put in its figures,
    which a search would otherwise read."""
    language = config.extra["languages"].get(page.file.src_uri, "en")
    return with_figures(output.replace('<html lang="en"', f'<html lang="{language}"', 1))


def on_post_build(config: MkDocsConfig) -> None:
    """Copy the notebooks that their pages offer for download, and fix the search.

    lunr compares the nodes of its index by their edges, written without a separator: an edge "1" to node 234
    and the edges "1" to 2 and "3" to 4 are both "1234". So words with digits made words that no page has, and
    what begins like them found nothing.
    """
    site = Path(config.site_dir)
    for notebook in NOTEBOOKS:
        shutil.copyfile(notebook, site / "notebooks" / notebook.name)
    # The text of the theme's minified worker is replaced. Nothing else reaches its lunr, which has had no
    # release since 2020 (https://github.com/olivernn/lunr.js/issues/503). The search plugin's separator could
    # only keep all digits out of the index, also those of 2019; its pipeline ends before there are nodes.
    # Plugins with other engines load their index by fetch, which a site that is opened as files can't.
    (worker,) = site.glob("assets/javascripts/workers/search.*.js")
    ambiguous = "e=e+s+o.id}"
    separated = 'e=e+s+o.id+","}'
    code = worker.read_text(encoding="utf-8")
    if ambiguous not in code:
        raise PluginError(f"{worker.name} has no {ambiguous} to fix; see whether its lunr still needs it")
    worker.write_text(code.replace(ambiguous, separated), encoding="utf-8")
