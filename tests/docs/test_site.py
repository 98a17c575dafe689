"""The documentation as a built site."""

import inspect
import json
import re
import shutil
import subprocess
import sys
from html import unescape
from string import ascii_lowercase

import pytest

import memformers
from docs.building.command_line import help_of
from docs.building.reference import home
from docs.building.results import ROOT
from memformers.cli import COMMANDS

pytestmark = pytest.mark.long

# The blocks of code and the tables that are not seen to the end of their lines.
CUT = """() => [...document.querySelectorAll('pre > code, .md-typeset__scrollwrap')]
    .filter(shown => shown.scrollWidth > shown.clientWidth + 1).map(shown => shown.innerText.trim())"""
# The head of the first column of tables that have a column for each arm, and so may be wide.
SETTINGS = "setting"
# An entry of the reference: its kind, its name, and how its text begins.
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
    pages = {}
    for path in site.rglob("*.html"):
        name = path.relative_to(site).as_posix()
        pages[name] = read(site, name)
    return pages


def text_of(page):
    return unescape(re.sub(r"<[^>]+>", "", page))


def test_pages_load_only_files_of_the_site(pages, site):
    loads = r'<(?:script|img|iframe|source)[^>]* src="(https?:)?//|<link[^>]* href="(https?:)?//[^>]*styles'
    for name, html in pages.items():
        assert not re.search(loads, html), name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_nothing_is_left_to_be_built(pages):
    # Formulas, and what comments ask for; in the reference, also marks of other documentation tools.
    unbuilt = r"arithmatex|\$\$|<!-- (source|table|run)"
    unbuilt_reference = unbuilt + r"|:(func|class|meth|mod|attr):|\]\["
    for name, html in pages.items():
        text = re.sub(r"<(code|pre|script)\b.*?</\1>", "", html, flags=re.DOTALL)
        pattern = unbuilt_reference if name.startswith("api/") else unbuilt
        assert not re.search(pattern, text), name


def test_the_method_shows_formulas_code_and_drawings(pages):
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
    # No mark is left that leads nowhere.
    assert len(re.findall("[①-⑨]", page)) == len(links)


def test_each_module_has_a_page_of_the_reference(pages):
    for path in (ROOT / "memformers").rglob("*.py"):
        if not path.name.startswith("__"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            assert f'id="{name}"' in pages[f"api/{name}.html"]


def test_each_attribute_is_explained(pages):
    kinds = set()
    for html in pages.values():
        for kind, name, beginning in ENTRY.findall(html):
            kinds.add(kind)
            if kind == "attribute":
                assert beginning.strip().startswith("<p>"), name
    assert {"attribute", "class", "function", "module"} <= kinds


@pytest.mark.parametrize("name", memformers.__all__)
def test_a_public_name_is_shown_with_its_arguments_and_examples(name, site):
    page = read(site, f"api/{name}.html")
    public = getattr(memformers, name)
    # All signatures, of which an overloaded one has several, come before the text.
    _, _, after_title = page.partition(f'<h1 id="{home(name)}.{name}"')
    signatures = text_of(after_title.partition("doc-contents")[0])
    explanation = text_of(page.partition("Parameters:")[2].partition("</table>")[0])
    # A sentence of its docstring, or of a class above it, may name an argument too.
    for parent in getattr(public, "__mro__", [public]):
        if parent.__module__.startswith("memformers"):
            explanation += parent.__doc__ or ""
    for argument in inspect.signature(public).parameters.values():
        if argument.kind is not argument.VAR_KEYWORD:
            assert re.search(rf"\b{argument.name}\b", signatures)
            assert argument.name in explanation
    assert text_of(page).count(">>> ") >= 2


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_page_follows_the_help(command, site):
    help_text = help_of(command)
    _, _, page = read(site, f"commands/{command}.html").partition("<h1")
    # An option, or what a command needs, at the beginning of a line in a box.
    options = re.findall(r"^│ (-\S+(?:, -\S+)?|\[?[A-Z]{2,}\]?)(?= |$)", help_text, flags=re.MULTILINE)
    assert len(options) > 1
    terms = re.findall(r"<dt [^>]*><code[^>]*>(.*?)</code>", page)
    for term, option in zip(terms, options, strict=True):
        assert text_of(term).startswith(option)
    # Each box has its title in its upper edge.
    boxes = re.findall(r"^╭.*", help_text, flags=re.MULTILINE)
    headings = re.findall(r"<h2 .*?</h2>", page)
    for heading, box in zip(headings, boxes, strict=True):
        assert text_of(heading).strip("¶") == box.strip("╭─╮ ")


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
    queries = [*guides, *questions, *ascii_lowercase, "visible_past_keys", "MemoryLM"]
    command = ["node", ROOT / "tests/docs/search.js", *files, *queries]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    hits = json.loads(ended.stdout)
    # The index has words of every beginning.
    for letter in ascii_lowercase:
        assert hits[letter]
    assert hits["visible_past_keys"][0] == "api/memformers.models.documents.html"
    assert "api/MemoryLM.html" in hits["MemoryLM"]
    # One of the first pages answers a newcomer's question.
    for question, page in questions.items():
        assert f"{page}.html" in hits[question][:4]
    # A word leads to its guide first.
    for word, page in guides.items():
        assert hits[word][0].startswith(page)
    assert "commands/train.html" in hits["--resume"][:5]


def test_no_code_and_no_table_is_cut(site, page):
    page.set_viewport_size({"width": 1280, "height": 900})
    for path in sorted(site.rglob("*.html")):
        # The page of a module has its source code, with lines of any length.
        if path.name.startswith("memformers."):
            continue
        page.goto(path.as_uri())
        for text in page.evaluate(CUT):
            assert text.startswith(SETTINGS), path


def test_a_site_opened_as_files_can_be_searched(site, page):
    page.set_viewport_size({"width": 1280, "height": 900})
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


def test_pages_say_their_language(pages):
    in_other_languages = set()
    for name, html in pages.items():
        if re.search(r'<html lang="([^"]+)"', html)[1] != "en":
            in_other_languages.add(name)
    assert in_other_languages == {"zh.html", "si.html"}


def test_a_notebook_can_be_downloaded(pages, site):
    for path in (ROOT / "experiments/notebooks").glob("*.ipynb"):
        page = pages[f"notebooks/{path.stem}.html"]
        assert f'<a href="{path.name}" download>' in page
        assert (site / "notebooks" / path.name).read_bytes() == path.read_bytes()
