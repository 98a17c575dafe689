"""What else a report of runs says: figures, samples, settings, and where the runs come from."""

import base64
import html
import re

import pytest

from memformers.common.files import write_json
from memformers.report.document import write_report
from memformers.report.markdown import fenced, table
from tests.builders import MODELS
from tests.report.fake_runs import FACTS, changed, fake_comparison, fake_run, markdown_of


@pytest.fixture
def comparison(tmp_path):
    fake_comparison(tmp_path, dict(zip(MODELS, ([2.5], [2.4], [2.3]), strict=True)))
    return tmp_path


@pytest.mark.drawn
def test_a_comparison_becomes_markdown_html_and_figures(comparison):
    page = write_report(comparison)
    markdown = (comparison / "report.md").read_text()
    assert markdown.startswith("# Memory compared on Tiny Shakespeare\n")
    assert all(
        row in markdown for row in ("| Transformer-XL | 1 | 2.400 |", "| 1.680 | 1.200 | 99.0 | 50.0 % |")
    )
    assert "differ in more than their memory" not in markdown
    images = re.findall(r"\]\((figures/.*?)\)", markdown)
    assert len(images) == 5
    for image in images:
        assert (comparison / image).read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert text.count("<figure><svg ") == 5
    assert not re.search(r'(src|href)="(?!#)', text)
    assert "&lt;b&gt;tags&lt;/b&gt;" in text
    assert "<b>tags" not in text


@pytest.mark.parametrize(
    ("read", "said"),
    [
        ((9_000, 9_000), "over the whole held-out text, with memory carried"),
        ((2_048, 2_048), "over the same 2,048 tokens of the held-out text"),
        ((2_048, 9_000), "unequal parts of the held-out text (Transformer, no memory: 2,048 tokens, "
         "Transformer-XL: all;"),
    ],
)  # fmt: skip
def test_curves_say_how_much_of_the_held_out_text_they_are_over(read, said, tmp_path):
    for model, tokens in zip(MODELS, read, strict=False):
        fake_run(tmp_path / model, model, 2.5, read=tokens)
    assert said in markdown_of(tmp_path)
    assert "the losses in the table are over the whole held-out text." in markdown_of(tmp_path)
    for model in MODELS[:2]:
        changed(tmp_path / model / "result.json", held_out_tokens=90_000)
    last = "9,000 of 90,000 tokens of the held-out text"
    assert markdown_of(tmp_path).count(last) == 2
    assert f"the losses in the table are over {last}." in markdown_of(tmp_path)


def test_a_stand_in_corpus_is_said_on_top(tmp_path):
    corpus = FACTS["corpus"] | {"name": "built-in play (seed 0)", "stands_in_for_tiny_shakespeare": True}
    fake_run(tmp_path / "run", "transformer", 2.4, facts=FACTS | {"corpus": corpus})
    headline, _, rest = markdown_of(tmp_path).partition("\n")
    assert headline == "# Transformer, no memory on built-in play"
    assert rest.strip().startswith("> **The text is the built-in play.**")


def test_no_text_can_break_out_of_its_block_or_cell():
    assert fenced("a\n```\nb").startswith("````text\n")
    assert r"a\|b c" in table(["x"], [["a|b\nc"]])


@pytest.mark.parametrize(
    "name",
    ["![x](../secret.png)",
     "[x](javascript:1)",
     "a*b*c _d_ __e__ `f`",
     "<b>&amp;</b>",
     "a | b",
     "snake_case"],
)  # fmt: skip
def test_a_name_is_shown_as_it_is_and_reads_no_file(name, tmp_path):
    (tmp_path / "secret.png").write_bytes(b"secret")
    facts = FACTS | {"corpus": FACTS["corpus"] | {"name": name, "source": name}}
    fake_run(tmp_path / "run" / "one", "transformer", 2.5, facts=facts)
    page = write_report(tmp_path / "run").read_text()
    shown = page.count(html.escape(name, quote=False)) + page.count(html.escape(name))
    assert shown >= 3  # title, headline, corpus
    assert f"on {html.escape(name)}</title>" in page
    assert base64.b64encode(b"secret").decode() not in page


@pytest.mark.drawn
def test_any_name_of_a_folder_can_be_drawn(tmp_path):
    for name in ("$x$", "_hidden", "a_b"):
        fake_run(tmp_path / name, "transformer-xl", 2.4)
    markdown = markdown_of(tmp_path)
    assert "Transformer-XL" not in markdown.partition("## Samples")[0]  # names tell them apart
    assert (tmp_path / "figures" / "validation_tokens.png").stat().st_size > 10_000


def test_a_probe_of_other_runs_is_left_out_and_said_to_be(comparison):
    write_json(comparison / "probe.json", {"checkpoints": {"gone": "000000000100"}})
    markdown = markdown_of(comparison)
    assert "**The probe was left out**" in markdown
    assert "What context and memory are worth" not in markdown


def test_a_prompt_that_all_share_is_shown_once_and_others_beside_their_samples(comparison):
    markdown = markdown_of(comparison)
    assert "the same prompt:\n\n```text\nBANQUO:\n```" in markdown
    assert markdown.count("BANQUO:") == 1
    changed(comparison / "compressive" / "result.json", prompt="ROSSE:\n")
    markdown = markdown_of(comparison)
    assert "the same prompt" not in markdown
    assert "The prompt:\n\n```text\nROSSE:\n```" in markdown


def test_settings_that_a_model_does_not_use_are_dashes_and_those_that_none_uses_are_left_out(comparison):
    differing, _, shared = markdown_of(comparison).partition("Settings of all arms:")
    assert "| model.mem_len | – | 16 | 16 |" in differing
    assert "| model.c_mem_len | – | – | 4 |" in differing
    assert "| model.compression | – | – | conv |" in differing
    assert "| model.d_model | 16 |" in shared
    assert "model.adaptive" not in differing + shared


def test_a_setting_that_was_left_open_is_shown_as_it_was_used(comparison):
    for model in MODELS:
        decided = {"memory_warmup": 0.125, "muon_learning_rate": 0.04, "model.clamp_len": "none"}
        changed(comparison / model / "run.json", decided=decided)
        changed(comparison / model / "config.json", memory_warmup=None)
    markdown = markdown_of(comparison)
    assert "| memory_warmup | – | 0.125 | 0.125 |" in markdown
    assert "| model.clamp_len | none |" in markdown
    assert "| document_separator | none |" in markdown


def test_a_report_names_its_run_date_command_and_commit(tmp_path):
    folder = tmp_path / "named"
    fake_comparison(folder, {"transformer-xl": [2.4], "compressive": [2.3]})
    changed(folder / "experiment.json", commands=["memformers compare --scale 0.1"])
    for name in ("transformer-xl", "compressive"):
        changed(folder / name / "run.json", commit="0123456789ab-dirty")
        changed(folder / name / "labml.json", started=1e9, ended=1e9 + 3600)
    markdown = markdown_of(folder)
    assert "| name | named |" in markdown
    assert "| trained | 2001-09-09 01:46 UTC to 2001-09-09 02:46 UTC |" in markdown
    assert "| command | memformers compare --scale 0.1 |" in markdown
    assert "| git commit | 0123456789ab-dirty |" in markdown


def test_no_place_of_this_machine_is_shown(tmp_path):
    facts = FACTS | {"corpus": FACTS["corpus"] | {"source": str(tmp_path / "book.txt")}}
    fake_run(tmp_path / "run", "transformer", 2.4, facts=facts, data=str(tmp_path / "book.txt"))
    page = write_report(tmp_path / "run")
    for text in (page.read_text(), page.with_suffix(".md").read_text()):
        assert str(tmp_path) not in text
        assert "book.txt" in text
