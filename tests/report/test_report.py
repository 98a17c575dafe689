"""What else a report of runs says and looks like: on a screen, on paper and in a terminal."""

import csv
import html
import json
import re
import shlex

import pytest

from memformers.common.errors import UserError
from memformers.common.files import write_json
from memformers.common.intervals import Mean
from memformers.report.data import Bullets, Code, Details, Notice, ReportData, Section, Table
from memformers.report.document import write_report
from memformers.report.numbers import number, unbroken
from memformers.report.rendering import fenced, in_terminal, markdown_table, page_of, text_table
from tests.builders import COMPARED
from tests.report.fake_runs import FACTS, changed, fake_comparison, fake_run, markdown_of

WIDE = """[...document.querySelectorAll("table, pre, figure, svg")].filter(
    element => element.scrollWidth > element.clientWidth + 1
        || element.getBoundingClientRect().right > innerWidth + 1).map(element => element.outerHTML)"""
# What is between the margins, in pixels.
A4 = {"width": 688, "height": 1000}
FILL = (
    """[...document.querySelectorAll("svg path[style*='stroke: #']")].map(p => getComputedStyle(p).stroke)"""
)


@pytest.fixture
def comparison(tmp_path):
    """A trial of all models, from one seed."""
    fake_comparison(tmp_path, dict(zip(COMPARED, ([2.5], [2.4], [2.3]), strict=True)))
    changed(tmp_path / "experiment.json", commands=["memformers compare --scale 0.05"], scale=0.05)
    return tmp_path


@pytest.fixture
def seeds(tmp_path):
    """The page of the report of all models, from three seeds."""
    fake_comparison(tmp_path, {name: [2.4, 2.5, 2.45] for name in COMPARED})
    return write_report(tmp_path).page


@pytest.mark.drawn
def test_the_page_answers_first_and_folds_details(comparison):
    page = write_report(comparison).page.read_text(encoding="utf-8")
    markdown = (comparison / "report.md").read_text(encoding="utf-8")
    assert markdown.startswith("# Memory compared on Tiny Shakespeare\n")
    assert "| Transformer-XL | 1 | 2.400 |" in markdown
    assert "| 1.680 | 1.200 | 99.0 | 50.0 % |" in markdown
    assert "differ in more than their memory" not in markdown
    # The headline, its chart, a warning, the table and then the figures.
    order = ["Tiny Shakespeare</h1>", 'class="chart"', "Trial: 5\u00a0%", "<table ", "<figure>"]
    places = [page.index(text) for text in order]
    assert places == sorted(places)
    assert page.count("<li style=") == len(COMPARED)
    folded = re.findall("<summary>(.*?)</summary>", page)
    assert {"Other units, and accuracy", "Settings"} <= set(folded)
    assert page.count("<details>") == page.count("</details>") == len(folded)
    # Nothing is loaded, and links stay on the page.
    assert not re.search(r'(src|href)="(?!#)', page)
    assert "&lt;b&gt;tags&lt;/b&gt;" in page
    assert "<b>tags" not in page
    assert re.findall(r'<a href="#([^"]+)">', page) == re.findall(r'<h2 id="([^"]+)">', page)
    images = re.findall(r"\]\((figures/.*?)\)", markdown)
    for image in images:
        assert b"<svg" in (comparison / image).read_bytes()
    captioned = (
        r'<figure><div role="img" aria-label="[^"]+"><svg.*?</svg>\s*</div>\s*<figcaption>[^<]+</figcaption>'
    )
    assert len(re.findall(captioned, page, re.DOTALL)) == len(images) == page.count("<figure>") == 4


def test_results_are_also_csv_and_json(seeds):
    page = seeds.read_text(encoding="utf-8")
    # Numbers of the page don't break before their unit or interval.
    assert "2.450\u00a0±\u00a00.124" in page
    assert "300\u00a0MiB" in page
    assert " ± " not in page.partition("<table>")[2]
    assert " ± " in seeds.with_suffix(".md").read_text(encoding="utf-8")
    with open(seeds.with_name("results.csv"), newline="") as file:
        bits = [float(row["bits_per_character"]) for row in csv.DictReader(file)]
    assert bits == [2.4, 2.5, 2.45] * len(COMPARED)
    results = json.loads(seeds.with_name("results.json").read_text())
    assert [arm["bits_per_character"]["n"] for arm in results["arms"]] == [3] * len(COMPARED)
    assert results["base"] == "transformer-xl"


@pytest.mark.parametrize(("names", "claims"), [(COMPARED, 2), ([f"{n} keys " * 5 for n in range(6)], 0)])
def test_the_terminal_summary_fits_80_columns(names, claims, tmp_path):
    fake_comparison(tmp_path, {name: [2.4, 2.5, 2.45] for name in names})
    answer = write_report(tmp_path).answer
    assert answer.startswith("Memory compared on Tiny Shakespeare\n")
    assert max(map(len, answer.splitlines())) <= 80
    assert answer.count("2.450 ± 0.124") == len(names)
    assert len(re.findall("^- ", answer, re.MULTILINE)) == claims
    assert not {"|", "*", "\\"} & set(answer)


def test_a_report_of_one_run_leaves_comparisons_out(tmp_path):
    fake_run(tmp_path / "one", "transformer-xl", 2.4)
    page = write_report(tmp_path / "one").page.read_text()
    markdown = markdown_of(tmp_path / "one")
    assert 'class="chart"' not in page.partition("</style>")[2]
    assert "thin lines are the loss of the training text" in markdown
    assert "(figures/loss.svg)" in markdown
    changed(tmp_path / "one/result.json", bits_per_byte=None, peak_memory_bytes=None)
    markdown = markdown_of(tmp_path / "one")
    assert "–" not in markdown.partition("## How it was made")[0]
    assert "bits per byte" not in markdown


@pytest.mark.drawn
def test_nothing_is_cut_off_on_screen_or_paper(seeds, page):
    page.set_viewport_size({"width": 1280, "height": 1000})
    page.goto(seeds.as_uri())
    assert page.evaluate(WIDE) == []
    light = page.evaluate(FILL)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(FILL)
    # Each colour has one dark colour, and no two have the same.
    pairs = set(zip(light, dark, strict=True))
    assert len(set(light)) == len(pairs) == len(set(dark))
    assert ("rgb(213, 94, 0)", "rgb(245, 138, 60)") in pairs
    page.set_viewport_size(A4)
    page.emulate_media(media="print")
    assert page.evaluate(WIDE) == []
    # On a telephone, a model's name has at most two lines.
    page.emulate_media(media="screen")
    page.set_viewport_size({"width": 390, "height": 1000})
    high = """[...document.querySelectorAll(".chart span, td:first-child")].filter(
        element => /^Transformer/.test(element.textContent)).map(e => e.getClientRects()[0].height)"""
    heights = page.evaluate(high)
    assert len(heights) > 3
    assert max(heights) < 50


@pytest.mark.parametrize(
    ("read", "expected"),
    [((9_000, 9_000), "over the whole held-out text, with memory carried"),
     ((2_048, 2_048), "over the same part of the held-out text (2,048 tokens; the table's losses: all"),
     ((2_048, 9_000), "over unequal parts of the held-out text (2,048 or 9,000 tokens;")],
)  # fmt: skip
def test_curves_say_how_much_of_the_held_out_text_they_are_over(read, expected, tmp_path):
    for model, tokens in zip(COMPARED, read, strict=False):
        fake_run(tmp_path / model, model, 2.5, read=tokens)
    markdown = markdown_of(tmp_path)
    assert expected in markdown
    assert "the losses in the table are over the whole held-out text." in markdown
    for model in COMPARED[:2]:
        changed(tmp_path / model / "result.json", held_out_tokens=90_000)
    last = "9,000 of 90,000 tokens of the held-out text"
    markdown = markdown_of(tmp_path)
    assert f"the losses in the table are over {last}." in markdown
    assert f"Loss over {last}, by position in the segment" in markdown
    assert "the whole held-out text" not in markdown


def test_the_position_caption_says_all_tokens_if_so(tmp_path):
    fake_run(tmp_path / "run", "transformer-xl", 2.5)
    assert "Loss over the whole held-out text, by position in the segment" in markdown_of(tmp_path / "run")


def write_probe(folder, tokens):
    """A probe of the run in ``folder`` over this number of ``tokens``."""
    (folder / "checkpoints" / "000000001000").mkdir(parents=True)
    mean = {"mean": 0.1, "half_width": 0.01, "n": 4}
    costs = {"memory zeroed": mean, "memory swapped": mean}
    ablation = {"streams": 4, "warm_up": 64, "tokens": tokens, "of_documents": False}
    ablation |= {"loss": {folder.name: 1.7}, "costs": {folder.name: costs}}
    probe = {"checkpoints": {folder.name: "000000001000"}, "memory_ablation": ablation}
    write_json(folder / "probe.json", probe)


@pytest.mark.parametrize(
    ("read", "probed", "expected"),
    [(9_000, 0, []),
     (2_048, 0, ["the whole held-out text", "the first 2,048 tokens"]),
     (9_000, 1_234, ["the whole held-out text", "1,234 tokens, read with full memories"]),
     (2_048, 1_234, ["the whole held-out text", "the first 2,048 tokens", "1,234 tokens, read with"])],
)  # fmt: skip
def test_a_report_says_why_one_model_has_several_losses(read, probed, expected, tmp_path):
    """The results are over 9,000 tokens."""
    fake_run(tmp_path / "run", "transformer-xl", 2.5, read=read)
    if probed:
        write_probe(tmp_path / "run", probed)
    markdown = markdown_of(tmp_path / "run")
    start = "**Tables and figures read different parts of the held-out text**"
    assert markdown.count(start) == bool(expected)
    sentences = markdown.partition(start)[2].partition("\n\n")[0]
    for words in expected:
        assert words in sentences
    assert ("figures and the live page" in sentences) == (read < 9_000)
    assert ("probe" in sentences) == bool(probed)


@pytest.mark.parametrize("name", ["report.md", "report.html", "results.json", "results.csv"])
def test_a_report_replaces_an_earlier_one_and_no_file_of_the_user(name, tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": [2.4]})
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=f"{re.escape(name)} that memformers didn't write"):
        write_report(tmp_path)
    assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "figures").exists()
    (tmp_path / name).unlink()
    assert markdown_of(tmp_path) == markdown_of(tmp_path)


def test_a_setting_stays_with_its_number_and_zero_has_no_minus():
    assert unbroken("M = 64, C = 64, Transformer-XL") == (
        "M\xa0=\xa064, C\xa0=\xa064, Transformer-\N{WORD JOINER}XL"
    )
    assert number(-1e-9, ".2f") == "0.00"
    assert number(-1e-9, ".2f", signed=True) == "+0.00"
    assert "C = 64" in text_table([["Compressive, C = 64, c = 4"], ["x"]], 12)
    assert number(Mean(-0.5, 0.25, 3), ".1f", " s") == "−0.5 ± 0.2 s"


def test_no_text_can_break_out_of_its_block_or_cell(tmp_path):
    assert fenced("a\n```\nb").startswith("````text\n")
    assert r"a\|b c" in markdown_table(["x"], [["a|b\nc"]])
    sections = [Section("top", [Details("a", ["x"]), Details("b", ["y"])]), Section("c", ["z"])]
    page = page_of(ReportData("title", sections=sections), tmp_path)
    assert re.findall(r"<summary>(.)</summary>\s*<p>(.)</p>\s*</details>", page) == [("a", "x"), ("b", "y")]


def test_a_name_cannot_control_a_terminal(tmp_path):
    name = "\x1b]0;title\x07"
    corpus = FACTS["corpus"] | {"name": name}
    fake_run(tmp_path / "one", "transformer", 2.5, facts=FACTS | {"corpus": corpus})
    assert write_report(tmp_path / "one").answer.startswith("No memory on \ufffd]0;title\ufffd\n")
    shown = in_terminal([Table([name], [[name]]), Bullets([name]), Code(name), Notice(name)])
    assert not {"\x1b", "\x07"} & set(shown)
    assert shown.count("\ufffd]0;title\ufffd") == 5


@pytest.mark.parametrize(
    "name",
    ["![x](figures/x.png)", "[x](javascript:1)", "a*b _d_ __e__", "<h3>&amp;</h3>", "a | b", "snake_case"],
)  # fmt: skip
def test_a_name_is_shown_as_it_is_and_reads_no_file(name, tmp_path):
    facts = FACTS | {"corpus": FACTS["corpus"] | {"name": name, "source": name}}
    fake_run(tmp_path / "run" / "one", "transformer", 2.5, facts=facts)
    page = write_report(tmp_path / "run").page.read_text()
    shown = page.count(html.escape(name, quote=False)) + page.count(html.escape(name))
    assert shown >= 3  # title, headline, corpus
    assert f"on {html.escape(name)}</title>" in page
    assert page.count("<details>") == 2


@pytest.mark.drawn
def test_odd_folder_names_and_a_stand_in_corpus_are_shown(tmp_path):
    corpus = FACTS["corpus"] | {"name": "built-in play (seed 0)", "stands_in_for_tiny_shakespeare": True}
    for name in ("$x$", "_hidden", "a_b"):
        fake_run(tmp_path / name, "transformer-xl", 2.4, facts=FACTS | {"corpus": corpus})
    markdown = markdown_of(tmp_path)
    assert re.match(r"# .* on built-in play\n+> \*\*The text is the built-in play", markdown)
    # Names tell the runs apart.
    assert "Transformer-XL" not in markdown.partition("## Samples")[0]
    assert (tmp_path / "figures" / "loss.svg").stat().st_size > 10_000


def check_rows(markdown, *rows):
    """Each of these rows is in a table."""
    for row in rows:
        assert f"| {row} |" in markdown


def test_settings_are_shown_as_used(comparison):
    resolved = {"memory_warmup": 0.125, "optim.muon_learning_rate": 0.04, "model.clamp_len": "none"}
    for model in COMPARED:
        changed(comparison / model / "run.json", resolved_settings=resolved)
        changed(comparison / model / "config.json", memory_warmup=None)
    markdown = markdown_of(comparison)
    assert "the same prompt:\n\n```text\nBANQUO:\n```" in markdown
    assert markdown.count("BANQUO:") == 1
    differing, _, shared = markdown.partition("Settings of all models:")
    check_rows(
        differing, "model.mem_len | – | 16 | 16", "model.c_mem_len | – | – | 4",
        "model.compression | – | – | conv", "memory_warmup | – | 0.125 | 0.125",
    )  # fmt: skip
    check_rows(shared, "model.d_model | 16", "model.clamp_len | none", "text.document_separator | none")
    assert "model.adaptive" not in markdown
    changed(comparison / "compressive" / "result.json", prompt="ROSSE:\n")
    markdown = markdown_of(comparison)
    assert "the same prompt" not in markdown
    assert "The prompt:\n\n```text\nROSSE:\n```" in markdown


def test_a_report_says_how_it_was_made(tmp_path):
    folder = tmp_path / "named"
    book = str(tmp_path / "my book.txt")
    fake_comparison(folder, {"transformer-xl": [2.4], "compressive": [2.3]})
    command = shlex.join(["memformers", "compare", "--data", book])
    changed(folder / "experiment.json", commands=[command, f"{command} --resume"])
    for name in ("transformer-xl", "compressive"):
        changed(folder / name / "config.json", data=book)
        changed(folder / name / "run.json", commit="0123abc-dirty", corpus=FACTS["corpus"] | {"source": book})
        changed(folder / name / "labml.json", started=1e9, ended=1e9 + 3600)
    write_json(folder / "probe.json", {"checkpoints": {"gone": "000000000100"}})
    markdown = markdown_of(folder)
    assert f"```text\n{command}\n{command} --resume\n```" in markdown
    check_rows(
        markdown, "name | named", "trained | 2001-09-09 01:46 UTC to 2001-09-09 02:46 UTC",
        "git commit | 0123abc-dirty", "data | my book.txt", "corpus | Tiny Shakespeare: my book.txt",
        "packages | torch 2.13.0",
    )  # fmt: skip
    assert "**The probe was left out**" in markdown, "it is of another run"
    assert "How much memory helps" not in markdown
