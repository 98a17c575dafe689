import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from memformers.common.fields import replace_nested
from memformers.common.files import numbered, read_json, write_json
from memformers.comparison import experiment
from memformers.comparison.experiment import print_unequal_keys, run_experiment
from memformers.comparison.recall.setup import RecallConfig
from memformers.comparison.text import CompareConfig, TextTask, compare, resolve_data
from memformers.data import sources
from memformers.runs.metrics import read_metrics
from memformers.runs.reader import Run
from memformers.training.text import find_text
from tests.builders import COMPARED, SMALL_RUN, small_training
from tests.processes import program, start, wait_for

# Runs that are pretended have no checkpoints to probe.
pytestmark = pytest.mark.filterwarnings("default:not probed")


@pytest.fixture
def small(compared):
    """Makes a comparison like ``compared``, with changes."""
    data = read_json(compared / "experiment.json")["settings"]["data"]

    def make(train=None, **changes):
        settings = {"model": "compressive", "max_tokens": 1_024, "data": data, **(train or {})}
        return CompareConfig(train=small_training(**settings), **changes)

    return make


@pytest.fixture
def pretended(compared, monkeypatch):
    """The names of runs in the order in which comparisons of this test begin them: each leaves what one of
    ``compared`` has left, at once, but for those whose names are added to ``failing``."""
    begun = []
    failing = set()

    def pretend(commands, jobs, **options):
        for number, (_, folder) in enumerate(commands):
            run = Path(folder)
            begun.append(run.name)
            if run.name not in failing:
                model = read_json(run / "config.json")["model"]["model"]
                for name in ("run.json", "metrics.jsonl", "result.json", "sample.txt"):
                    shutil.copy(compared / model / name, run)
            yield number, int(run.name in failing)

    monkeypatch.setattr(experiment, "run_modules", pretend)
    return begun, failing


def test_a_comparison_trains_each_model_once_and_reports(compared, small):
    for model in COMPARED:
        assert read_json(compared / model / "result.json")["tokens"] == 1_024
    assert "| Compressive Transformer | 1 |" in (compared / "report.md").read_text()
    assert (compared / "report.html").is_file()
    with pytest.raises(ValueError, match="already holds an experiment"):
        compare(small(), compared)


def test_the_start_up_of_a_process_is_noted(compared):
    """The first run is trained in one, which imports PyTorch."""
    assert 0.1 < Run(compared / "transformer").startup_seconds < 600


def test_arms_have_equal_keys_and_only_the_memory_differs(compared):
    """S 16, M 16 and C 4, c 3: Transformer-XL remembers M + C, and sees back less far than M + c · C."""
    keys_and_reach = []
    configs = []
    steps = []
    for model in COMPARED:
        facts = read_json(compared / model / "run.json")
        keys_and_reach.append((facts["keys"], facts["memory"]["one_layer"]))
        config = read_json(compared / model / "config.json")
        del config["model"]["model"]
        del config["model"]["mem_len"]
        configs.append(config)
        steps.append([record["tokens"] for record in read_metrics(compared / model)])
    assert keys_and_reach == [(0, 0), (20, 20), (20, 28)]
    assert configs[0] == configs[1] == configs[2]
    assert steps[0] == steps[1] == steps[2]


def test_unequal_keys_are_named_before_training_and_in_the_report(
    pretended, small, compared, tmp_path, capsys
):
    """Groups of c = 3 leave after segments of 16: 16, 15 or 14 positions stay, beside 4 slots."""
    compare(small(), tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    before_training = printed.partition("Memory compared")[0]
    sentence = "M + C = 20 keys a layer, but full memories hold 20 ({}); 19, at most 20 ({})."
    assert sentence.format("transformer-xl", "compressive") in before_training
    markdown = (compared / "report.md").read_text()
    assert "> **The numbers of keys differ**" in markdown
    assert sentence.format("Transformer-XL", "Compressive Transformer") in markdown
    assert "| Compressive Transformer | 19, at most 20 |" in markdown


@pytest.mark.parametrize(
    "changes",
    [{"models": ("transformer", "transformer-xl")}, {"equal_keys": False},
     {"train": {"compression_rate": 4}}, {"models": ("transformer-xl", "selective")},
     {"models": ("transformer",), "arms": ("c2: compression_rate=2",)}],
)  # fmt: skip
def test_equal_or_chosen_keys_are_not_mentioned(changes, small, tmp_path, capsys):
    experiment = small(**changes).experiment()
    print_unequal_keys(experiment.task, experiment.arms)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("changes", "mem_len"),
    [({}, 20), ({"equal_keys": False}, 16), ({"models": ("transformer", "transformer-xl")}, 16),
     ({"models": ("transformer-xl",), "arms": ("c2: model=compressive",)}, 20)],
)  # fmt: skip
def test_keys_are_equal_only_beside_a_compressive_model(changes, mem_len, small):
    experiment = small(scale=0.25, **changes).experiment()
    config = {arm.name: arm.config for arm in experiment.arms}["transformer-xl"]
    assert (config.model.mem_len, config.max_tokens) == (mem_len, 256)


def test_a_run_that_fails_does_not_take_the_others_down(pretended, small, tmp_path):
    _, failing = pretended
    failing.add("transformer-xl-seed1")
    config = small(models=("transformer-xl", "compressive"), seeds=2)
    with pytest.raises(ValueError, match="training of transformer-xl-seed1 failed; the others are in"):
        compare(config, tmp_path)
    markdown = (tmp_path / "report.md").read_text()
    assert "**transformer-xl-seed1**: no step was made" in markdown
    assert "| Compressive Transformer | 2 |" in markdown
    failing.clear()
    compare(config, tmp_path, resume=True)
    assert "| Transformer-XL | 2 |" in (tmp_path / "report.md").read_text()


def test_seeds_and_arms_are_added_to_a_comparison(pretended, small, tmp_path):
    begun, _ = pretended
    xl = {"models": ("transformer-xl",), "train": {"seed": 3}}
    compare(small(**xl, arms=("long: model=transformer-xl mem_len=32",)), tmp_path)
    assert begun == ["transformer-xl", "long"]
    compare(small(**xl, seeds=3), tmp_path, resume=True)
    assert begun[2:] == ["transformer-xl-seed4", "long-seed4", "transformer-xl-seed5", "long-seed5"]
    compare(small(models=("transformer",), train={"seed": 3}), tmp_path, resume=True)
    assert begun[6:] == ["transformer", "transformer-seed4", "transformer-seed5"]
    config = read_json(tmp_path / "long-seed4" / "config.json")
    assert (config["model"]["mem_len"], config["seed"]) == (32, 4)
    arms = {arm["name"]: arm["seeds"] for arm in read_json(tmp_path / "results.json")["arms"]}
    assert arms == {name: [3, 4, 5] for name in ("transformer-xl", "long", "transformer")}
    cards = {name: read_json(tmp_path / name / "labml.json") for name in begun}
    assert {card["comment"] for card in cards.values()} == {f"comparison {tmp_path.name}"}
    assert {card["name"] for card in cards.values()} == set(begun)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"train": {"seed": 1}}, "seed 0 → 1"), ({"scale": 2.0}, "tokens 1024 → 2048"),
     ({"equal_keys": False}, "arm transformer-xl .* model.mem_len 20 → 16"),
     ({"arms": ("long: model=transformer-xl mem_len=99",)}, "arm long .* model.mem_len")],
)  # fmt: skip
def test_a_comparison_of_other_settings_is_refused(changes, message, compared, small, tmp_path):
    folder = shutil.copytree(compared, tmp_path / "again", symlinks=True)
    plan = read_json(folder / "experiment.json")
    long = {"name": "long", "settings": {"model.model": "transformer-xl", "model.mem_len": 32}}
    write_json(folder / "experiment.json", plan | {"arms": [*plan["arms"], long]})
    modified = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(ValueError, match=message):
        compare(small(**changes), folder, resume=True)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == modified


@pytest.mark.usefixtures("quick_runs")
def test_a_comparison_continues_where_a_training_of_it_stopped(compared, small, tmp_path):
    folder = shutil.copytree(compared, tmp_path / "again", symlinks=True)
    (folder / "compressive" / "result.json").unlink()
    (folder / "report.html").unlink()
    finished = (folder / "transformer" / "result.json").stat().st_mtime_ns
    card = (folder / "transformer" / "labml.json").read_text()
    assert compare(small(), folder, resume=True).page.exists()
    loss = read_json(folder / "compressive" / "result.json")["loss"]
    assert loss == read_json(compared / "compressive" / "result.json")["loss"]
    assert (folder / "transformer" / "result.json").stat().st_mtime_ns == finished
    assert (folder / "transformer" / "labml.json").read_text() == card


@pytest.mark.usefixtures("quick_runs")
def test_an_arm_with_another_document_separator_is_resumed(small, tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be\n\nthat is the question\n\n" * 300)
    config = small(
        {"data": str(tmp_path / "a.txt"), "max_tokens": 64, "evaluations": 1}, models=("transformer",),
        arms=("docs: model=transformer document_separator='\n\n'",),
    )  # fmt: skip
    compare(config, tmp_path / "run")
    (tmp_path / "run/docs/result.json").unlink()
    compare(config, tmp_path / "run", resume=True)
    assert read_json(tmp_path / "run/docs/run.json")["corpus"]["documents"] > 1
    assert (tmp_path / "run/docs/result.json").exists()


def test_a_folder_of_another_task_is_left_alone(compared, tmp_path):
    with pytest.raises(ValueError, match="is an experiment on text, not on recall"):
        run_experiment(RecallConfig().experiment(), compared, resume=True)
    (tmp_path / "mean").mkdir()
    with pytest.raises(ValueError, match="has a mean that memformers didn't write"):
        run_experiment(RecallConfig().experiment(), tmp_path)
    write_json(tmp_path / "experiment.json", {"mine": 1})
    with pytest.raises(ValueError, match=r"experiment\.json: unknown key 'mine'"):
        run_experiment(RecallConfig().experiment(), tmp_path, resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["experiment.json", "mean"]


@pytest.mark.usefixtures("quick_runs")
def test_the_folder_of_a_comparison_may_hold_facts_of_something_else(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    settings = TextTask().find_data({"a": small_training(data="builtin")}, tmp_path)
    assert settings == {"data": "builtin"}


@pytest.mark.filterwarnings("default:Tiny Shakespeare was neither found")
def test_all_models_get_the_very_same_corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEMFORMERS_DATA", raising=False)
    monkeypatch.setattr(sources.platformdirs, "user_cache_dir", lambda name: "/dev/null")
    monkeypatch.setattr(sources, "get", lambda *_: os.stat(tmp_path / "no network"))
    names = {"data": "texts/a.txt", "validation": "texts/b.txt", "test": "texts/c.txt"}
    (tmp_path / "texts").mkdir()
    for name in names.values():
        (tmp_path / name).write_text(f"This is {name}.\n")
    paths = {split: str(tmp_path / name) for split, name in names.items()}
    for data_settings, resolved in (
        ({"data": "builtin"}, {"data": "builtin"}),
        ({"data": ""}, {"data": "stand-in"}),  # neither found nor downloadable
        ({"data": "texts"}, {"data": str(tmp_path / "texts")}),
        (names, paths),
    ):
        train = small_training(**data_settings)
        corpus = find_text(train).info
        settings = resolve_data(train, corpus)
        assert settings == resolved
        resolved_corpus = find_text(replace_nested(train, **settings)).info
        assert resolved_corpus.sha256 == corpus.sha256
        assert resolved_corpus.is_stand_in == corpus.is_stand_in


@pytest.mark.long
@pytest.mark.parametrize(
    ("send", "number", "code"),
    [(os.kill, signal.SIGKILL, -9), (os.kill, signal.SIGTERM, 143), (os.kill, signal.SIGINT, 130),
     (os.killpg, signal.SIGINT, 130)],
)  # fmt: skip
def test_a_signal_ends_a_comparison_with_a_checkpoint(send, number, code, tmp_path):
    """To it alone, or as a terminal sends Ctrl-C, to its training too."""
    command = program("compare", *SMALL_RUN, "--max-tokens", 10_000_000, "--out", tmp_path)
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        wait_for(lambda: read_metrics(tmp_path / "transformer"))
        send(process.pid, number)
        _, errors = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert "at token" in errors
    assert numbered(tmp_path / "transformer" / "checkpoints")
    if send is os.killpg:
        assert read_json(tmp_path / "transformer" / "labml.json")["status"].startswith("crashed")
