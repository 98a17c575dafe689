"""What a report says of where it comes from."""

import json

import pytest

from memformers.common.files import read_json, write_json
from memformers.report.document import write_report
from memformers.report.settings import in_words
from tests.report.fake_runs import FACTS, fake_comparison, fake_run


def report(folder):
    return write_report(folder).with_suffix(".md").read_text(encoding="utf-8")


def test_settings_that_a_model_does_not_use_are_dashes_and_those_that_none_uses_are_left_out(tmp_path):
    fake_comparison(tmp_path, {"transformer": [2.5], "transformer-xl": [2.4], "compressive": [2.3]})
    differing, _, shared = report(tmp_path).partition("Settings of all arms:")
    assert "| model.mem_len | – | 16 | 16 |" in differing
    assert "| model.c_mem_len | – | – | 4 |" in differing
    assert "| model.compression | – | – | conv |" in differing
    assert "| model.d_model | 16 |" in shared
    assert "model.adaptive" not in differing + shared


def test_a_report_names_its_run_date_command_and_commit(tmp_path):
    folder = tmp_path / "named"
    fake_comparison(folder, {"transformer-xl": [2.4], "compressive": [2.3]})
    plan = read_json(folder / "experiment.json")
    write_json(folder / "experiment.json", plan | {"commands": ["memformers compare --scale 0.1"]})
    for name in ("transformer-xl", "compressive"):
        (folder / name / "run.json").write_text(json.dumps(FACTS | {"commit": "0123456789ab-dirty"}))
        card = folder / name / "labml.json"
        write_json(card, read_json(card) | {"started": 1e9, "ended": 1e9 + 3600})
    markdown = report(folder)
    assert "| name | named |" in markdown
    assert "| trained | 2001-09-09 01:46 UTC to 2001-09-09 02:46 UTC |" in markdown
    assert "| command | memformers compare --scale 0.1 |" in markdown
    assert "| git commit | 0123456789ab-dirty |" in markdown


def test_a_run_of_an_older_version_has_no_command_and_no_commit(tmp_path):
    fake_run(tmp_path / "run", "transformer", 2.4)
    markdown = report(tmp_path / "run")
    assert "| command |" not in markdown
    assert "| git commit |" not in markdown


def test_no_place_of_this_machine_is_shown(tmp_path):
    facts = FACTS | {"corpus": FACTS["corpus"] | {"source": str(tmp_path / "book.txt")}}
    fake_run(tmp_path / "run", "transformer", 2.4, facts=facts, data=str(tmp_path / "book.txt"))
    page = write_report(tmp_path / "run")
    for text in (page.read_text(), page.with_suffix(".md").read_text()):
        assert str(tmp_path) not in text
        assert "book.txt" in text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("/a/b/c.txt", "c.txt"),
        ("a/b", "a/b"),
        ("\n\n", '"\\n\\n"'),
        (None, "not given"),
        ([64, 32], "64, 32"),
        (0, "0"),
    ],
)
def test_a_setting_is_shown_in_words(value, said):
    assert in_words(value) == said


def test_what_differs_beside_the_memory_itself_is_said(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": [2.4], "compressive": [2.3]})
    (tmp_path / "compressive" / "run.json").write_text(json.dumps(FACTS | {"parameters": 12345 + 1234}))
    assert (
        "The arms are not of equal size: Compressive Transformer has 1,234 more parameters than "
        "Transformer-XL (10.0%)." in report(tmp_path)
    )


def test_a_prompt_that_all_share_is_shown_once_and_others_beside_their_samples(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": [2.4], "compressive": [2.3]})
    markdown = report(tmp_path)
    assert "All arms continue the same prompt:\n\n```text\nBANQUO:\n```" in markdown
    assert markdown.count("BANQUO:") == 1
    path = tmp_path / "compressive" / "result.json"
    write_json(path, read_json(path) | {"prompt": "ROSSE:\n"})
    markdown = report(tmp_path)
    assert "the same prompt" not in markdown
    assert "The prompt:\n\n```text\nROSSE:\n```\n\nThe text that the arm wrote:" in markdown


def test_a_prompt_without_letters_shows_its_line_breaks(tmp_path):
    fake_run(tmp_path / "run", "transformer", 2.4)
    path = tmp_path / "run" / "result.json"
    write_json(path, read_json(path) | {"prompt": "?\n"})
    markdown = report(tmp_path / "run")
    assert "the same prompt, of 2 characters, where ⏎ is a line break:\n\n```text\n?⏎\n```" in markdown
