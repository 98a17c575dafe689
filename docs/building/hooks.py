"""What mkdocs calls while it builds the site."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parents[2]))

import memformers
from docs.building.command_line import command_pages
from docs.building.drawings import DRAWINGS, svg
from docs.building.markdown import COMMENT, named, relinked
from docs.building.marks import with_marks
from docs.building.maths import with_mathml
from docs.building.notebooks import for_the_site
from docs.building.reference import (
    module_navigation,
    module_page,
    modules,
    page_of,
    public_navigation,
    public_page,
    with_public_names,
)
from docs.building.source import ROOT
from memformers.cli import COMMANDS
from memformers.report.markdown import DARK, inline_svg

ELSEWHERE = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
"""Files of the site that lie outside of docs/."""
LANGUAGES = {"zh.md": "zh-Hans", "si.md": "si"}
"""Pages that are not in English."""
WIDE = ("results/", "scaling.md", "recipes.md", "which-memory.md")
"""How the paths of pages with wide tables begin."""
BOOSTS = {
    "api/index.md": 0.01,
    "api/memformers.": 0.001,
    "api/": 0.01,
    "changelog.md": 0.1,
    "commands/": 2,
    "contributing.md": 0.1,
    "design.md": 0.3,
    "notebooks/": 0.2,
    "results/index.md": 1,
    "results/": 0.3,
    "recipes.md": 0.1,
    "troubleshooting.md": 0.3,
}
"""Weights of pages in a search, by how their path begins; the first that fits. What isn't here counts 1: a
title counts 1,000 times as much as text, and a reference is all titles, so guides would come last."""
UNBROKEN = re.compile(r"(?<=\d) (?=[%±] ?\d?|(?:[KM]iB|[Ms])\b)|(?<=%) (?=±)|(?<=±) (?=\d)")
"""Spaces within a number with its unit and its interval, such as 65.7 % ± 0.6."""
INLINE = re.compile(r"(?<!<pre>)(?<!</span>)<code>([^<]+)</code>")
SHORT = 30
"""The most characters of code that stays in a line. A browser breaks --option after its dashes."""
FIGURE = re.compile(r'<img alt="([^"]*)" src="[./]*(?:results/)?figures/(\w+)\.svg"\s*/?>')
WIDE_FIGURE = 400
"""The points from which a figure scrolls on a telephone, so that it stays readable."""
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
DRAWING = re.compile(r'<img [^>]*src="([^"]*drawings/[^"]+)"[^>]*>')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the commands, and the reference: a page for each public name, and one for each module among
    the internals."""
    for entry in config.nav or []:
        if "Commands" in entry:
            entry["Commands"] += [{name: f"commands/{name}.md"} for name in COMMANDS]
        if "API reference" in entry:
            entry["API reference"] = public_navigation()
        if "Internals" in entry:
            entry["Internals"] += module_navigation()
    return config


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is drawn, what lies elsewhere, the notebooks and the reference's pages."""
    for name, draw in DRAWINGS.items():
        files.append(File.generated(config, f"drawings/{name}.svg", content=svg(draw())))
        for page, language in LANGUAGES.items():
            uri = f"drawings/{name}.{page.removesuffix('.md')}.svg"
            files.append(File.generated(config, uri, content=svg(draw(), language)))
    for uri, path in ELSEWHERE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for notebook in sorted((ROOT / "experiments/notebooks").glob("*.ipynb")):
        uri, folder = f"notebooks/{notebook.name}", str(ROOT / "experiments")
        files.append(File(uri, folder, config.site_dir, config.use_directory_urls))
    for name in memformers.__all__:
        files.append(File.generated(config, page_of(name), content=public_page(name)))
    for name in modules():
        files.append(File.generated(config, page_of(name), content=module_page(name)))
    for uri, content in command_pages().items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put in the public names that a page asks for, leave out what it asked for in comments, and weigh it for
    the search."""
    uri = page.file.src_uri
    boosts = [boost for beginning, boost in BOOSTS.items() if uri.startswith(beginning)]
    page.meta.setdefault("search", {"boost": boosts[0] if boosts else 1})
    if uri.endswith(".ipynb") or uri.startswith(WIDE):
        page.meta["hide"] = ["toc"]  # without it, the longest lines of code and most tables fit the page
    if uri in ELSEWHERE:
        return relinked(markdown, {path: site for site, path in ELSEWHERE.items()})
    try:
        return named(with_public_names(COMMENT.sub("", markdown)), uri)
    except ValueError as error:
        raise PluginError(f"{uri}: {error}") from None


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Draw the formulas, link the marks, complete a notebook's page, keep numbers in one line, and let a
    click on a drawing show it larger."""
    try:
        if page.file.src_uri.endswith(".ipynb"):
            return for_the_site(html, Path(page.file.abs_src_path))
        html = UNBROKEN.sub("\u00a0", with_marks(with_mathml(html)))
        html = INLINE.sub(unbroken, html)
        if page.file.src_uri.startswith("results/"):
            html = TABLE.sub(narrow, html)
        return DRAWING.sub(r'<a href="\1">\g<0></a>', html)
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from None


def on_post_build(config: MkDocsConfig) -> None:
    """Copy the notebooks that their pages offer for download, and mend the search.

    lunr compares the nodes of its index by their edges, written without a separator: an edge "1" to node 234
    and the edges "1" to 2 and "3" to 4 are both "1234". So words with digits made words that no page has, and
    what begins like them found nothing.
    """
    site = Path(config.site_dir)
    for notebook in (ROOT / "experiments/notebooks").glob("*.ipynb"):
        shutil.copyfile(notebook, site / "notebooks" / notebook.name)
    (worker,) = site.glob("assets/javascripts/workers/search.*.js")
    ambiguous, separated = "e=e+s+o.id}", 'e=e+s+o.id+","}'
    code = worker.read_text(encoding="utf-8")
    if ambiguous not in code:
        raise PluginError(f"{worker.name} has no {ambiguous} to mend; see whether its lunr still needs it")
    worker.write_text(code.replace(ambiguous, separated), encoding="utf-8")


def unbroken(code: re.Match[str]) -> str:
    """Code in a sentence: short code stays in its line, and in longer code each option does."""
    if len(code[1]) <= SHORT:
        return f'<code class="short">{code[1]}</code>'
    options = re.sub(r"(?<!\S)--[\w-]+", r'<span class="short">\g<0></span>', code[1])
    return f"<code>{options}</code>"


def narrow(table: re.Match[str]) -> str:
    """A table of results that breaks no name, and whose numbers a search doesn't show."""
    return (
        table[0]
        .replace("Transformer-XL", "Transformer\u2011XL")
        .replace("<table", "<table data-search-exclude", 1)
    )


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Say which language a page is in, since the theme knows that of the site only, and put figures into the
    page, where they follow its colours."""
    language = LANGUAGES.get(page.file.src_uri, "en")
    output = output.replace('<html lang="en"', f'<html lang="{language}"', 1)
    return FIGURE.sub(figure, output)


def figure(found: re.Match[str]) -> str:
    svg = (ROOT / f"docs/results/figures/{found[2]}.svg").read_text(encoding="utf-8")
    dark = "".join(f"--c{light[1:]}:{colour};" for light, colour in DARK.items())
    style = f'<style>[data-md-color-scheme="slate"] .figure {{ {dark} }}</style>'
    svg = re.sub("<style>@media.*?</style>", style, svg, count=1)
    width = float(svg.partition('width="')[2].partition("pt")[0])
    return f'<div class="figure{" wide" * (width > WIDE_FIGURE)}">{inline_svg(svg, found[1])}</div>'
