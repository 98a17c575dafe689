"""The documentation as a built site."""

import inspect
import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from string import ascii_lowercase

import pytest

import memformers
from docs.building.command_line import help_of
from docs.building.reference import home
from memformers.cli import COMMANDS

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
CUT = """() => [...document.querySelectorAll('pre > code, .md-typeset__scrollwrap')]
    .filter(shown => shown.scrollWidth > shown.clientWidth + 1).map(shown => shown.innerText.trim())"""
"""The blocks of code and the tables that are not seen to the end of their lines."""
SETTINGS = "setting"
"""The head of the first column of tables that have a column for each arm."""
ENTRY = re.compile(
    r'<div class="doc doc-object doc-(\w+)">\s*<h\d id="([^"]+)".*?<div class="doc doc-contents[^>]*>(.{60})',
    re.DOTALL,
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet, which hides warnings from --strict too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def read(site, page):
    return (site / page).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pages(site):
    names = [page.relative_to(site).as_posix() for page in site.rglob("*.html")]
    return {name: read(site, name) for name in names}


def text_of(page):
    return unescape(re.sub(r"<[^>]+>", "", page))


def test_pages_load_only_files_of_the_site(pages, site):
    loads = r'<(?:script|img|iframe|source)[^>]* src="(https?:)?//|<link[^>]* href="(https?:)?//[^>]*styles'
    left = r"arithmatex|\$\$|<!-- (source|table|run)"
    roles = r"|:(func|class|meth|mod|attr):|\]\["
    for name, html in pages.items():
        assert not re.search(loads, html), name
        text = re.sub(r"<(code|pre|script)\b.*?</\1>", "", html, flags=re.DOTALL)
        assert not re.search(left + roles * name.startswith("api/"), text), name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style
    method = pages["method.html"]
    assert method.count('<div class="formula"><math') >= 12
    assert "F.pad(position, (1, 0)).flatten(-2)" in text_of(method)
    assert re.search(r'<a href="drawings/memory.svg"><img [^>]*src="drawings/memory.svg"', method)


def test_marks_of_the_method_link_both_ways(site):
    page = read(site, "method.html")
    ids = re.findall(r' id="((?:text|lines)-\d+-\d)"', page)
    links = re.findall(r'<a class="mark [^"]+"[^>]* href="#([^"]+)">[①-⑨]</a>', page)
    assert len(ids) == len(set(ids)) > 100
    assert set(links) == set(ids)
    assert len(re.findall("[①-⑨]", page)) == len(links)  # none is left that leads nowhere


def test_the_reference_is_complete(pages):
    for module in (p for p in (ROOT / "memformers").rglob("*.py") if not p.name.startswith("__")):
        name = ".".join(module.relative_to(ROOT).with_suffix("").parts)
        assert f'id="{name}"' in pages[f"api/{name}.html"]
    entries = [entry for html in pages.values() for entry in ENTRY.findall(html)]
    assert {"attribute", "class", "function", "module"} <= {kind for kind, _, _ in entries}
    attributes = [(name, begins.strip()) for kind, name, begins in entries if kind == "attribute"]
    assert [name for name, begins in attributes if not begins.startswith("<p>")] == []


@pytest.mark.parametrize("name", memformers.__all__)
def test_a_public_name_is_shown_with_its_arguments_and_examples(name, site):
    page, public = read(site, f"api/{name}.html"), getattr(memformers, name)
    real = [p for p in inspect.signature(public).parameters.values() if p.kind is not p.VAR_KEYWORD]
    # All signatures, of which an overloaded one has several, come before the text.
    shown = text_of(page.partition(f'<h1 id="{home(name)}.{name}"')[2].partition("doc-contents")[0])
    assert [p.name for p in real if not re.search(rf"\b{p.name}\b", shown)] == []
    kinds = [k for k in getattr(public, "__mro__", [public]) if k.__module__.startswith("memformers")]
    explained = text_of(page.partition("Parameters:")[2].partition("</table>")[0])
    explained += " ".join(kind.__doc__ or "" for kind in kinds)  # a sentence may name it
    assert [p.name for p in real if p.name not in explained] == []
    assert text_of(page).count(">>> ") >= 2


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_page_follows_the_help(command, site):
    lines = help_of(command).splitlines()
    options = [
        match[1] for line in lines if (match := re.match(r"│ (-\S+(?:, -\S+)?|\[?[A-Z]{2,}\]?)(?= |$)", line))
    ]
    titles = [line.strip("╭─╮ ") for line in lines if line.startswith("╭")]
    part = read(site, f"commands/{command}.html").partition("<h1")[2]
    shown = [text_of(names) for names in re.findall(r"<dt [^>]*><code[^>]*>(.*?)</code>", part)]
    assert len(options) > 1
    assert all(names.startswith(option) for names, option in zip(shown, options, strict=True))
    assert [text_of(title).strip("¶") for title in re.findall(r"<h2 .*?</h2>", part)] == titles


@pytest.mark.skipif(shutil.which("node") is None, reason="the search is a program for node")
def test_a_search_finds_guides_before_the_reference(site):
    worker = next(site.glob("assets/javascripts/workers/search.*.js"))
    files = [worker, site / "search/search_index.json", site / "javascripts/search.js"]
    guides = {
        "--resume": "checkpoints", "install": "quick-start", "pretrained": "how-to/generate",
        "--bptt": "how-to/train", "ablation": "how-to/compare", "compression rate": "how-to/train",
    }  # fmt: skip
    questions = {
        "how do I resume": "checkpoints", "what shape is memory": "how-to/import",
        "how many keys does a query see": "which-memory", "load Hugging Face weights": "how-to/import",
        "generate text": "how-to/generate", "train on several GPUs": "distributed",
        "train on my own text": "how-to/train", "evaluate in Python": "quick-start",
        "evaluate a long text": "how-to/evaluate", "learning rate": "how-to/train",
    }  # fmt: skip
    asked = [*guides, *questions, *ascii_lowercase, "visible_past_keys", "MemoryLM"]
    command = ["node", ROOT / "tests/docs/search.js", *files, *asked]
    hits = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert all(hits.pop(letter) for letter in ascii_lowercase)  # words of every beginning are in the index
    assert hits.pop("visible_past_keys")[0] == "api/memformers.models.documents.html"
    assert "api/MemoryLM.html" in hits.pop("MemoryLM")
    for question, page in questions.items():  # a newcomer's, each answered by one of the first pages
        assert f"{page}.html" in hits.pop(question)[:4]
    for query, pages_found in hits.items():
        assert pages_found[0].startswith(guides[query])
        assert not pages_found[0].startswith(("api/", "notebooks/", "results/"))
    assert "commands/train.html" in hits["--resume"][:5]


def test_a_site_opened_as_files_can_be_searched(site, page):
    page.set_viewport_size({"width": 1280, "height": 900})
    for path in sorted(site.rglob("*.html")):
        if not path.name.startswith("memformers."):  # a module's source code
            page.goto(path.as_uri())
            cut = [text for text in page.evaluate(CUT) if not text.startswith(SETTINGS)]
            assert cut == [], path
    page.goto((site / "method.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type("resume")
    page.wait_for_selector(".md-search-result__link")
    assert "checkpoints.html" in page.get_attribute(".md-search-result__link", "href")


@pytest.mark.parametrize("width", [390, 1280])
def test_no_formula_is_cut_and_the_text_of_drawings_can_be_read(width, site, page):
    page.set_viewport_size({"width": width, "height": 900})
    for name in ("index", "method"):
        page.goto((site / f"{name}.html").as_uri())
        drawn = page.locator("article img[src$='.svg']")
        assert drawn.count() >= 2
        for shown, natural in drawn.evaluate_all("all => all.map(i => [i.clientWidth, i.naturalWidth])"):
            assert shown >= 0.8 * natural, "12 pixels become 10"
        cut = "all => all.filter(f => f.scrollWidth > f.clientWidth).map(f => f.textContent)"
        assert page.locator(".formula").evaluate_all(cut) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_notebook_can_be_downloaded_and_pages_say_their_language(pages, site):
    languages = {name: re.search(r'<html lang="([^"]+)"', html)[1] for name, html in pages.items()}
    assert {name for name, language in languages.items() if language != "en"} == {"zh.html", "si.html"}
    for path in (ROOT / "experiments/notebooks").glob("*.ipynb"):
        page = pages[f"notebooks/{path.stem}.html"]
        assert f'<a href="{path.name}" download>' in page
        assert (site / "notebooks" / path.name).read_bytes() == path.read_bytes()
