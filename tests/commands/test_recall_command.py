"""``memformers recall``, and ``memformers report`` of what it left."""

import shutil

import pytest

from memformers.common.files import read_json
from tests.processes import run


@pytest.fixture(autouse=True)
def _tiny(tmp_path, monkeypatch, quick_runs):
    """Settings of a moment, in a folder of its own."""
    monkeypatch.chdir(tmp_path)


def test_recall_trains_reports_and_is_reported_again(tmp_path):
    ended = run("recall", "--quick", "--arms", "compressive", "--tokens", "1e2", "--out", "r")
    assert ended.code == 0, ended.err
    assert "report: r/report.html" in ended.out
    assert "Recall by distance" in ended.out
    assert read_json(tmp_path / "r" / "experiment.json")["settings"]["tokens"] == 100
    shutil.rmtree(tmp_path / "r" / "figures")
    assert run("report", "r").code == 0
    assert (tmp_path / "r" / "figures" / "recall_accuracy.png").is_file()
    assert run("report", "r/compressive").said("name the folder of that, which has experiment.json")


def test_without_a_name_it_goes_to_a_folder_of_its_own(tmp_path):
    assert run("recall", "--quick", "--arms", "no-memory", "--tokens", 100).code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-recall")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--arms compresive", "arm 'compresive' is unknown; this reach has no-memory, transformer-xl, "),
     ("--seeds 0", "seeds=0"),
     ("--resume", "name the experiment to resume as --out."),
     ("--device warp", "device='warp' can't be used here"),
     ("--dashboard nowhere", "an address with http:// or https://")],
)  # fmt: skip
def test_a_mistake_gets_a_clear_answer_before_anything_is_written(arguments, message, tmp_path):
    ended = run("recall", *arguments.split())
    assert ended.said(message), ended.err
    assert len(ended.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
