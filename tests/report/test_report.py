import base64
import html
import json
import re
from dataclasses import asdict

import pytest

from memformers.common.files import write_json
from memformers.report.document import fenced, table, write_report
from tests.builders import MODELS, small_training

FACTS = {
    "corpus": {
        "name": "Tiny Shakespeare", "source": "input.txt", "characters": 1115394, "sha256": "86c4",
        "stands_in_for_tiny_shakespeare": False,
    },
    "parameters": 12345,
    "memory": {"one_layer": 64, "all_layers": 256},
    "environment": {
        "python": "3.11", "platform": "Linux", "packages": {"torch": "2.13.0"}, "device": "a CPU",
        "cores": 2, "threads": 2,
    },
}  # fmt: skip
RECALL = {"nearest": [16, 32], "accuracy": [0.75, None], "characters": [100, 0], "chance": 0.125}


def fake_run(folder, model, bits, *, recall=None, finished=True, facts=FACTS, **changes):
    folder.mkdir(parents=True)
    config = asdict(small_training(model=model, **changes))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "run.json").write_text(json.dumps(facts))
    with open(folder / "metrics.jsonl", "w") as file:
        for i in range(1, 11):
            train = {"loss.train": 3.0 / i, "tokens_per_second": 1000.0 + i}
            if model == "compressive":
                train["reconstruction_loss.train"] = 0.1 / i
            file.write(json.dumps({"tokens": 100 * i, "seconds": i, **train}) + "\n")
            valid = {"loss.valid": 0.7 * bits, "bits_per_character.valid": bits + 1 / i}
            file.write(json.dumps({"tokens": 100 * i, "seconds": i, **valid}) + "\n")
    if finished:
        result = {"step": 10, "tokens": 1000, "seconds": 10.0, "loss": 0.7 * bits, "accuracy": 0.5}
        result |= {"bits_per_character": bits, "reconstruction_loss": None, "recall": recall}
        result |= {"peak_memory_bytes": 300 * 2**20}
        (folder / "result.json").write_text(json.dumps(result))
        (folder / "sample.txt").write_text(f"A sample of {model} with ``` and <b>tags</b>\n")


@pytest.fixture
def comparison(tmp_path):
    for model, bits in zip(MODELS, (2.5, 2.4, 2.3), strict=True):
        fake_run(tmp_path / model, model, bits, recall=RECALL)
    return tmp_path


def test_a_comparison_becomes_markdown_html_and_figures(comparison):
    page = write_report(comparison)
    markdown = (comparison / "report.md").read_text()
    assert markdown.startswith("# What memory buys: transformers compared on Tiny Shakespeare\n")
    assert "Transformer-XL is at 2.4000: its memory saves 0.1000 bits per character (4.0%)" in markdown
    assert (
        "| Transformer-XL | 12,345 | 64 / 256 | 1.6800 | 2.4000 | 50.0% | 1,006 | 10 s | 300 MiB |"
        in markdown
    )
    assert "| 16 – 31 | 75.0% | 75.0% | 75.0% |" in markdown
    assert "differ in more than their memory" not in markdown
    images = re.findall(r"\]\((figures/.*?)\)", markdown)
    assert len(images) == 5
    for image in images:
        assert (comparison / image).read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert text.count('src="data:image/png;base64,') == 5
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "&lt;b&gt;tags&lt;/b&gt;" in text
    assert "<b>tags" not in text


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
    assert re.search(r"\| Compressive Transformer \| .* \| – \| – \|", markdown)


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
    write_json(comparison / "probe.json", {"checkpoints": {"gone": "000000000100"}, "recall": {}})
    write_report(comparison)
    markdown = (comparison / "report.md").read_text()
    assert "**The probe was left out**" in markdown
    assert "What context and memory are worth" not in markdown
