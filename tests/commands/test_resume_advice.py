"""What a stopped command advises works when it is typed."""

import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memformers.comparison import experiment
from memformers.runs.folder import newest_experiment
from tests.builders import SMALL_RUN
from tests.processes import finish, run, run_module, train_here

ROOT = Path(__file__).parents[2]
TWO_ARMS = ["--models", "transformer", "transformer-xl", *SMALL_RUN]
OWN_MEMORY = ROOT / "experiments/memories/averages.py"

pytestmark = pytest.mark.usefixtures("here", "quick_runs")


def interrupt_second(commands, jobs, **options):
    """Ctrl-C after the first training."""
    yield from train_here(commands[:1], jobs, **options)
    raise KeyboardInterrupt


def interrupted(monkeypatch, program, *arguments):
    """How ``program`` ends that is stopped by Ctrl-C after one training."""
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "run_modules", interrupt_second)
        ended = program(*arguments)
    assert ended.code == 130, ended.err
    return ended


def advice(ended):
    [line] = re.findall("^to continue: (.*)$", ended.err, re.MULTILINE)
    return line


def words_of_memformers(command):
    """The arguments of ``memformers`` in a command line."""
    words = shlex.split(command)
    start = 1 + next(i for i, word in enumerate(words) if Path(word).name == "memformers")
    return words[start:]


def recipe(folder, *arguments):
    """The command that make would start in a clone."""
    lines = finish(["make", "--dry-run", "--old-file", ".venv/ready", *arguments], cwd=folder).stdout
    [line] = [line for line in lines.splitlines() if line.startswith(".venv/bin/")]
    return line


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """The current folder looks like a clone, in which make started this process."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "memformers" / "dashboard").mkdir(parents=True)
    monkeypatch.setenv("MAKELEVEL", "1")
    return tmp_path


def test_an_interrupted_make_compare_continues_as_advised(clone, monkeypatch):
    ended = interrupted(monkeypatch, run, "compare", *TWO_ARMS)
    assert "--resume" not in ended.err, "make has no such option"
    target = re.search(r"make (compare RESUME=1)$", advice(ended))
    command = recipe(clone, *target[1].split())
    ended = run(*words_of_memformers(command), *TWO_ARMS)
    assert ended.code == 0, ended.err
    [folder] = (clone / "runs").iterdir()
    assert f"2 trainings, 1 done → {folder.relative_to(clone)}" in ended.out
    assert (folder / "report.html").is_file()


@pytest.mark.parametrize("target", ["compare", "recall", "ablation"])
def test_make_resumes_only_if_it_is_asked_to(target, clone):
    assert recipe(clone, target, "RESUME=1").split()[-1] == "--resume"
    assert "--resume" not in recipe(clone, target)


def test_an_interrupted_comparison_continues_as_advised(tmp_path, monkeypatch):
    folder = tmp_path / "my runs"  # with a space
    command = advice(interrupted(monkeypatch, run, "compare", *TWO_ARMS, "--out", folder))
    # A program that runs in this process isn't called memformers, so its options are missing.
    ended = run(
        "compare", *TWO_ARMS, *words_of_memformers(f"memformers {command[command.index('--resume') :]}")
    )
    assert ended.code == 0, ended.err
    assert (folder / "report.html").is_file()


def test_an_interrupted_experiment_names_its_module(tmp_path, monkeypatch):
    arguments = ["--quick", "--only", "recall", "--arms", "max", "mean", "--out", tmp_path / "all"]
    ended = interrupted(monkeypatch, run_module, "experiments.ablation", *arguments)
    options = shlex.join(map(str, [*arguments[:-2], "--resume", *arguments[-2:]]))
    assert advice(ended) == f"python -m experiments.ablation {options}"


def test_nothing_is_advised_before_there_is_an_experiment(tmp_path, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "merge_arms", stop)
    ended = run("compare", *TWO_ARMS, "--out", tmp_path / "new")
    assert ended.code == 130
    assert "to continue" not in ended.err


@pytest.mark.parametrize("model", ["transformer-xl", f"{OWN_MEMORY}:Averages"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_training_continues_as_advised(number, model, tmp_path):
    steps = iter(range(100))

    def stop(*_):
        if next(steps) == 3:
            signal.raise_signal(number)

    handle = register_optimizer_step_pre_hook(stop)
    try:
        ended = run("train", *SMALL_RUN, "--model", model, "--out", "a run", "--optimizer", "adamw")
    finally:
        handle.remove()
    assert ended.code == 128 + number, ended.err
    assert "--resume" not in ended.err.replace(advice(ended), "")
    assert not (tmp_path / "a run" / "result.json").exists()
    ended = run(*words_of_memformers(advice(ended)))
    assert ended.code == 0, ended.err
    assert (tmp_path / "a run" / "result.json").exists()


def test_resume_takes_the_newest_experiment_of_the_same_command(tmp_path):
    plans = ["1-compare/experiment.json", "2-compare/experiment.json", "3-recall/experiment.json",
             "4-ablation/text/experiment.json", "5-compare/config.json"]  # fmt: skip
    for age, plan in enumerate(["2-compare/experiment.json", *plans]):
        path = tmp_path / "runs" / plan
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (1e9 + age, 1e9 + age))
    os.utime(tmp_path / "runs/1-compare/experiment.json", (2e9, 2e9))  # resumed last
    names = ("compare", "recall", "ablation")
    assert [newest_experiment(name).name for name in names] == ["1-compare", "3-recall", "4-ablation"]
    assert run("recall", "--show", "runs/gone").code == 2
    shutil.rmtree(tmp_path / "runs")
    assert run("recall", "--resume").says(
        "runs holds no recall to resume; name the experiment to resume as --out"
    )
