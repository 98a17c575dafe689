import base64
import html
import re

import pytest

from memformers.common.files import write_json
from memformers.report.document import write_report
from memformers.report.markdown import fenced, table
from tests.builders import MODELS
from tests.report.fake_runs import FACTS, fake_run


@pytest.fixture
def comparison(tmp_path):
    for model, bits in zip(MODELS, (2.5, 2.4, 2.3), strict=True):
        fake_run(tmp_path / model, model, bits)
    return tmp_path


def test_a_comparison_becomes_markdown_html_and_figures(comparison):
    page = write_report(comparison)
    markdown = (comparison / "report.md").read_text()
    assert markdown.startswith("# How much memory helps: transformers compared on Tiny Shakespeare\n")
    assert "| Transformer-XL | 1 | 1.6800 | 2.4000 | 50.0% |" in markdown
    assert "| Transformer-XL | – | 64 / 256 | – | 12,345 | 1,006 | 10 s | – | 300 MiB |" in markdown
    assert "differ in more than their memory" not in markdown
    images = re.findall(r"\]\((figures/.*?)\)", markdown)
    assert len(images) == 5
    for image in images:
        assert (comparison / image).read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert text.count('src="data:image/svg+xml;base64,') == 5
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "&lt;b&gt;tags&lt;/b&gt;" in text
    assert "<b>tags" not in text


@pytest.mark.parametrize(
    ("read", "said"),
    [
        ((None, None), "Validation loss over the whole held-out text, with memory carried"),
        ((9_000, None), "Validation loss over the whole held-out text, with memory carried"),
        (
            (2_048, 2_048),
            "Validation loss over the same 2,048 tokens of the held-out text (the table's losses: all of it)",
        ),
        (
            (2_048, 9_000),
            "over unequal parts of the held-out text (Transformer, no memory: 2,048 tokens, "
            "Transformer-XL: all; the table's losses: all of it)",
        ),
    ],
)
def test_curves_say_how_much_of_the_held_out_text_they_are_over(read, said, tmp_path):
    for model, tokens in zip(MODELS, read, strict=False):
        fake_run(tmp_path / model, model, 2.5, read=tokens)
    write_report(tmp_path)
    markdown = (tmp_path / "report.md").read_text()
    assert said in markdown
    assert ("| 10 s | 12 s | 300 MiB |" in markdown) == any(read)


def test_a_stand_in_corpus_is_said_in_the_title_and_on_top(tmp_path):
    corpus = FACTS["corpus"] | {"name": "built-in play (seed 0)", "stands_in_for_tiny_shakespeare": True}
    fake_run(tmp_path / "run", "transformer", 2.4, facts=FACTS | {"corpus": corpus})
    write_report(tmp_path)
    headline, _, rest = (tmp_path / "report.md").read_text().partition("\n")
    assert "built-in play (seed 0) — NOT Tiny Shakespeare" in headline
    assert rest.strip().startswith("> **The text is the built-in play.**")


def test_a_run_that_stopped_half_way_is_reported_as_such(comparison):
    (comparison / "compressive" / "result.json").unlink()
    write_report(comparison)
    markdown = (comparison / "report.md").read_text()
    assert "**Compressive Transformer did not finish**" in markdown
    assert "| Compressive Transformer | 0 | – | – | – |" in markdown


def test_runs_that_differ_in_more_than_memory_are_called_out(comparison, tmp_path):
    fake_run(tmp_path / "other", "transformer-xl", 2.0, learning_rate=0.5)
    write_report(tmp_path)
    assert "differ in more than their memory" in (tmp_path / "report.md").read_text()


def test_no_text_can_break_out_of_its_block_or_cell():
    assert fenced("a\n```\nb").startswith("````text\n")
    assert r"a\|b c" in table(["x"], [["a|b\nc"]])


@pytest.mark.parametrize(
    "name",
    [
        "![x](../secret.png)",
        "[x](javascript:1)",
        "a*b*c _d_ __e__ `f`",
        "<b>&amp;</b>",
        "a | b",
        "snake_case",
    ],
)
def test_a_name_is_shown_as_it_is_and_reads_no_file(name, tmp_path):
    (tmp_path / "secret.png").write_bytes(b"secret")
    facts = FACTS | {"corpus": FACTS["corpus"] | {"name": name, "source": name}}
    fake_run(tmp_path / "run" / "one", "transformer", 2.5, facts=facts)
    page = write_report(tmp_path / "run").read_text()
    shown = page.count(html.escape(name, quote=False)) + page.count(html.escape(name))
    assert shown >= 3  # title, headline, corpus
    assert f"on {html.escape(name)}</title>" in page
    assert base64.b64encode(b"secret").decode() not in page


def test_a_probe_of_other_runs_is_left_out_and_said_to_be(comparison):
    write_json(comparison / "probe.json", {"checkpoints": {"gone": "000000000100"}})
    write_report(comparison)
    markdown = (comparison / "report.md").read_text()
    assert "**The probe was left out**" in markdown
    assert "What context and memory are worth" not in markdown
