"""The report's page, on a screen and on paper, and its short form for a terminal."""

import csv
import json
import re
import shutil

import pytest

from memformers.report.document import write_report
from memformers.report.markdown import answer_of
from tests.builders import MODELS
from tests.report.fake_runs import changed, fake_comparison

WIDE = """[...document.querySelectorAll("table, pre, figure, svg")].filter(
    element => element.scrollWidth > element.clientWidth + 1
        || element.getBoundingClientRect().right > innerWidth + 1).map(element => element.outerHTML)"""
A4 = {"width": 688, "height": 1000}
"""What is between the margins, in pixels."""
FILL = """[...document.querySelectorAll("path[style*='stroke: var']")].map(p => getComputedStyle(p).stroke)"""


@pytest.fixture
def report(tmp_path):
    fake_comparison(tmp_path, {name: [2.4, 2.5] for name in MODELS})
    changed(tmp_path / "experiment.json", commands=["memformers compare --scale 0.05"])
    return write_report(tmp_path)


def test_the_page_begins_with_the_answer_and_folds_what_few_want(report):
    html = report.read_text(encoding="utf-8")
    title = re.search("<h1>(.*?)</h1>", html)[1]
    assert len(title.split()) <= 6
    order = [
        html.index(text)
        for text in (title + "</h1>", 'class="bars"', "Trial: 5\u00a0%", "<table>", "<figure>")
    ]
    assert order == sorted(order)
    assert html.count("<i style=") == len(MODELS)
    folded = re.findall("<summary>(.*?)</summary>", html)
    assert {"Other units, and accuracy", "Settings"} <= set(folded)
    assert html.count("<details>") == html.count("</details>") == len(folded)
    assert 'style="text-align:right">2.450\u00a0±\u00a00.635' in html


def test_a_caption_stands_once_and_belongs_to_its_figure(report):
    html = report.read_text(encoding="utf-8")
    caption = r"<figcaption>([^<]+)</figcaption>\s*</figure>"
    figures = re.findall(
        rf'<figure><svg role="img" aria-label="([^"]+)".*?</svg>\s*{caption}', html, re.DOTALL
    )
    assert len(figures) == html.count("<figure>") == 6
    for title, caption in figures:
        assert title not in caption
        assert html.count(caption) == 1


@pytest.mark.drawn
def test_on_paper_nothing_is_cut_off_and_in_the_dark_no_two_arms_swap_colours(report):
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if not (chromium := shutil.which("chromium")):
        pytest.skip("Chromium is not installed; with it, this test looks at the printed report")
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=A4)
        page.goto(report.as_uri())
        light = page.evaluate(FILL)
        page.emulate_media(color_scheme="dark")
        dark = page.evaluate(FILL)
        pairs = set(zip(light, dark, strict=True))
        assert len({a for a, _ in pairs}) == len(pairs) == len({b for _, b in pairs})
        assert ("rgb(213, 94, 0)", "rgb(245, 138, 60)") in pairs
        page.emulate_media(media="print")
        assert page.evaluate(WIDE) == []
        browser.close()


@pytest.mark.parametrize(("names", "claims"), [(MODELS, 2), ([f"{n} keys " * 5 for n in range(6)], 0)])
def test_a_terminal_shows_the_headline_the_table_and_a_few_claims_in_80_columns(names, claims, tmp_path):
    fake_comparison(tmp_path, {name: [2.4, 2.5] for name in names})
    said = answer_of(write_report(tmp_path).with_suffix(".md").read_text(encoding="utf-8"))
    assert said.startswith("Memory compared on")
    assert max(map(len, said.splitlines())) <= 80
    assert said.count("2.450 ± 0.635") == len(names)
    assert sum(line.startswith("- ") for line in said.splitlines()) == claims
    assert not {"|", "*", "\\"} & set(said)


def test_the_results_are_there_as_csv_and_json_and_the_page_has_its_contents(report):
    with open(report.with_name("results.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["bits_per_character"]) for row in rows] == [2.4, 2.5] * len(MODELS)
    found = json.loads(report.with_name("results.json").read_text())
    assert [arm["bits_per_character"]["n"] for arm in found["arms"]] == [2] * len(MODELS)
    assert found["base"] == "transformer-xl"
    html = report.read_text(encoding="utf-8")
    links = re.findall(r'<a href="#([^"]+)">', html)
    assert links == re.findall(r'<h2 id="([^"]+)">', html)
    assert len(links) == html.count("<h2")


def test_no_line_ends_between_a_number_and_its_interval_or_its_unit(report):
    html = report.read_text(encoding="utf-8").partition("<table>")[2]
    assert " ± " not in html
    assert "300\u00a0MiB" in html
    assert " ± " in report.with_suffix(".md").read_text(encoding="utf-8")
