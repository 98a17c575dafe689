"""The report's page, on a screen and on paper."""

import csv
import re
import shutil
import subprocess

import pytest

from memformers.report.document import write_report
from memformers.report.markdown import answer_of, tex_table
from tests.builders import MODELS
from tests.report.fake_runs import fake_comparison

WIDE = """[...document.querySelectorAll("table, pre, figure, img")].filter(
    element => element.scrollWidth > element.clientWidth + 1
        || element.getBoundingClientRect().right > innerWidth + 1).map(element => element.outerHTML)"""
A4 = {"width": 688, "height": 1000}
"""What is between the margins, in pixels."""


@pytest.fixture
def report(tmp_path):
    fake_comparison(tmp_path, {name: [2.4, 2.5] for name in MODELS})
    return write_report(tmp_path)


def test_a_caption_stands_once_and_belongs_to_its_figure(report):
    html = report.read_text(encoding="utf-8")
    figures = re.findall(
        r'<figure><img [^>]*alt="([^"]+)"[^>]*>\s*<figcaption>([^<]+)</figcaption>\s*</figure>', html
    )
    assert len(figures) == html.count("<img ") == 6
    for title, caption in figures:
        assert title not in caption
        assert html.count(caption) == 1


@pytest.mark.drawn
def test_on_paper_nothing_is_cut_off(report):
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if not (chromium := shutil.which("chromium")):
        pytest.skip("Chromium is not installed; with it, this test looks at the printed report")
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=A4)
        page.goto(report.as_uri())
        assert page.evaluate(WIDE)  # a narrow screen scrolls tables
        page.emulate_media(media="print")
        assert page.evaluate(WIDE) == []
        browser.close()


@pytest.mark.parametrize(("names", "claims"), [(MODELS, 2), ([f"{n} keys " * 5 for n in range(6)], 0)])
def test_a_terminal_shows_the_headline_the_table_and_a_few_claims_in_80_columns(names, claims, tmp_path):
    fake_comparison(tmp_path, {name: [2.4, 2.5] for name in names})
    said = answer_of(write_report(tmp_path).with_suffix(".md").read_text(encoding="utf-8"))
    assert said.startswith("How much memory helps")
    assert max(map(len, said.splitlines())) <= 80
    assert said.count("2.4500 ± 0.6353") == len(names)
    assert sum(line.startswith("- ") for line in said.splitlines()) == claims
    assert not {"|", "**", "\\"} & set(said)


def test_the_table_is_there_for_a_paper_and_the_page_has_its_contents(report):
    with open(report.with_name("results.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["bits_per_character"]) for row in rows] == [2.4, 2.5] * len(MODELS)
    tex = report.with_name("results.tex").read_text(encoding="utf-8")
    assert tex.count(r"$2.4500 $\pm$ 0.6353".removeprefix("$")) == len(MODELS)
    assert tex.count(r" \\") == 1 + len(MODELS)
    html = report.read_text(encoding="utf-8")
    links = re.findall(r'<a href="#([^"]+)">', html)
    assert links == re.findall(r'<h2 id="([^"]+)">', html)
    assert len(links) == html.count("<h2")


def test_latex_typesets_the_table_whatever_its_cells_say(tmp_path):
    if not (latex := shutil.which("pdflatex")):
        pytest.skip("LaTeX is not installed; with it, this test typesets a table")
    rows = [["arm", "β₂ ≥ 0.9 → ×"], [r"a_b & 5 % #1 {x} ~^$ \ é", "2.45\u00a0± 0.01"], ["−0.5 – ≤", ""]]
    document = [r"\documentclass{article}", r"\usepackage{booktabs}", r"\begin{document}", tex_table(rows)]
    (tmp_path / "table.tex").write_text("\n".join([*document, r"\end{document}"]), encoding="utf-8")
    command = [latex, "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert said.returncode == 0, said.stdout


def test_no_line_ends_between_a_number_and_its_interval_or_its_unit(report):
    html = report.read_text(encoding="utf-8")
    assert "2.4500\u00a0±\u00a00.6353" in html
    assert " ± " not in html.partition("<body>")[2]
    assert "300\u00a0MiB" in html
    assert " ± " in report.with_suffix(".md").read_text(encoding="utf-8")
