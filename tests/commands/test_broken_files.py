"""Broken or missing files of a run or an experiment: a line that names the file, and nothing is lost."""

import shutil

import pytest

from memformers.common.files import read_json
from memformers.comparison.experiment import plan_runs
from memformers.runs.plan import Planned
from tests.processes import check_plain, run
from tests.report.fake_runs import fake_comparison


@pytest.fixture
def comparison(tmp_path):
    """A comparison whose runs were never trained."""
    fake_comparison(tmp_path / "c", {"transformer": [2.5], "transformer-xl": [2.4]})
    return tmp_path / "c"


@pytest.mark.parametrize("content", ["[]", '{"a', "[" * 100_000, '{"corpus": 3, "model": {}}'])
@pytest.mark.parametrize(
    "file",
    [*(f"transformer/{name}.json" for name in ("run", "config", "result")), "probe.json", "experiment.json"],
)
def test_a_broken_file_of_a_run_is_one_line_of_its_report(file, content, comparison):
    (comparison / file).write_text(content)
    ended = run("report", comparison)
    check_plain(ended)
    assert ended.says(f"{comparison / file}"), ended.err


@pytest.mark.parametrize("line", ["5", "{}", '{"tokens": 3, "x": "y"}', "\x00"])
def test_a_broken_line_of_metrics_is_named_by_its_number(line, comparison):
    with open(comparison / "transformer" / "metrics.jsonl", "a") as file:
        file.write(f"{line}\n")
    for command in ("report", "probe"):
        assert run(command, comparison).says("metrics.jsonl, line 21: expected a record")


def test_a_run_without_facts_has_not_failed(comparison):
    (comparison / "transformer" / "run.json").unlink()
    assert run("report", comparison).code == 0
    assert "**transformer**: run.json is lost, so missing here." in (comparison / "report.md").read_text()


@pytest.mark.filterwarnings("default:.*labml.json")
def test_a_broken_card_costs_a_run_only_its_place_in_dashboards(trained, comparison, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    (folder / "result.json").unlink()
    (folder / "run.json").unlink()  # it is written again
    for card in (folder / "labml.json", comparison / "transformer" / "labml.json"):
        card.write_text("{")
    for ended in (run("train", "--resume", folder, "--dashboard", "off"), run("report", comparison)):
        assert ended.code == 0, ended.err
        assert "labml.json can't be read" in ended.err
    before, now = (read_json(place / "run.json") for place in (trained, folder))
    assert now == before | {"command": now["command"]}
    plan_runs({"transformer": Planned("transformer", 0)}, comparison)
    assert read_json(comparison / "transformer" / "labml.json")["run"]
    (folder / "result.json").unlink()
    (folder / "run.json").write_text("{}")
    assert run("train", "--resume", folder).says("run.json is broken: expected corpus to be")
