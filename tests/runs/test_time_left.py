"""The time left of an experiment whose costs are known: each of three runs starts for 20 s, learns from 1,000
tokens in 10 s, evaluates 500 tokens twice in 2 s each, and at the end all 9,000 in 36 s."""

import json
from contextlib import ExitStack

import pytest

from memformers.common.files import write_json
from memformers.runs.card import RunCard, note_launch, open_card, read_card
from memformers.runs.folder import CARD, CONFIG, FACTS, METRICS, RESULT, alone_in
from memformers.runs.plan import Plan, PlannedArm, runs_of
from memformers.runs.reader import Run, Runs
from memformers.runs.time_left import seconds_left, share_trained

STARTUP = 20.0
TRAINING = 10.0
EVALUATION = 2.0
FINAL = 36.0
RUN = STARTUP + TRAINING + 2 * EVALUATION + FINAL
CONFIG_OF_RUN = {
    "model": {"model": "transformer-xl"}, "max_tokens": 1_000, "seed": 0, "data": "",
    "evaluation": {"evaluations": 2, "evaluation_tokens": 500, "final_tokens": 0},
}  # fmt: skip


@pytest.fixture
def alive(tmp_path):
    """The lock of the experiment's process."""
    with ExitStack() as lock:
        lock.enter_context(alone_in(tmp_path))
        yield lock


@pytest.fixture
def experiment(tmp_path, alive):
    """The folder of three planned runs, whose experiment is alive."""
    planned = runs_of(["a", "b", "c"], [0])
    write_json(
        tmp_path / "experiment.json", Plan("text", {}, tuple(PlannedArm(n, {}) for n in planned), planned)
    )
    for name in planned:
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / CONFIG, CONFIG_OF_RUN)
        write_json(tmp_path / name / CARD, RunCard("comparison", name=name))
    return tmp_path


@pytest.fixture
def running(experiment):
    """Makes runs be trained."""
    with ExitStack() as locks:
        yield lambda name: locks.enter_context(alone_in(experiment / name))


def start(folder):
    """A run whose process started 20 s before its first step."""
    write_json(folder / CARD, RunCard("comparison", launched=1_000.0, started=1_000.0 + STARTUP))
    write_json(folder / FACTS, {"corpus": {"held_out_tokens": 9_000}})


def record(folder, tokens, evaluations):
    with open(folder / METRICS, "a") as file:
        times = {"seconds": tokens / 1_000 * TRAINING}
        if evaluations:
            times |= {"evaluated_tokens": 500, "evaluation_seconds": evaluations * EVALUATION}
        file.write(json.dumps({"tokens": tokens, **times}) + "\n")


def finish(folder):
    start(folder)
    record(folder, 500, 1)
    record(folder, 1_000, 2)
    result = {"tokens": 1_000, "seconds": TRAINING, "evaluation_seconds": 2 * EVALUATION + FINAL}
    write_json(folder / RESULT, result)
    card = RunCard("comparison", launched=1_000.0, started=1_000.0 + STARTUP, status="completed")
    write_json(folder / CARD, card)


def left(folder):
    return seconds_left(Runs(folder))


def test_nothing_is_estimated_before_the_first_record(experiment, running):
    assert left(experiment) is None
    start(experiment / "a")
    running("a")
    assert left(experiment) is None


def test_start_up_and_evaluations_of_all_runs_are_counted(experiment, running):
    start(experiment / "a")
    running("a")
    record(experiment / "a", 500, 1)
    assert left(experiment) == pytest.approx(TRAINING / 2 + EVALUATION + FINAL + 2 * RUN)
    record(experiment / "a", 1_000, 2)
    assert left(experiment) == pytest.approx(FINAL + 2 * RUN)


def test_evaluations_are_expected_to_be_as_slow_as_training(experiment, running):
    start(experiment / "a")
    running("a")
    record(experiment / "a", 250, 0)
    evaluated = (2 * 500 + 9_000) / 1_000 * TRAINING
    assert left(experiment) == pytest.approx(
        0.75 * TRAINING + evaluated + 2 * (STARTUP + TRAINING + evaluated)
    )


def test_between_two_runs_the_estimate_stays(experiment, alive):
    """The experiment lives, though no run is trained at this moment."""
    finish(experiment / "a")
    assert left(experiment) == pytest.approx(2 * RUN)
    assert share_trained(Runs(experiment).all) == pytest.approx(1 / 3)
    alive.close()
    assert left(experiment) is None, "nothing is trained any more"


def test_runs_that_are_trained_at_the_same_time_share_the_rest(experiment, running):
    for name in ("a", "b"):
        start(experiment / name)
        running(name)
        record(experiment / name, 500, 1)
    rest = TRAINING / 2 + EVALUATION + FINAL
    assert left(experiment) == pytest.approx((2 * rest + RUN) / 2)


def test_each_run_is_as_slow_as_it_has_been(experiment, running):
    """The second run takes three times as long for a token; the third one is expected to be average."""
    finish(experiment / "a")
    start(experiment / "b")
    running("b")
    line = {
        "tokens": 500,
        "seconds": 1.5 * TRAINING,
        "evaluated_tokens": 500,
        "evaluation_seconds": EVALUATION,
    }
    (experiment / "b" / METRICS).write_text(json.dumps(line) + "\n")
    average = (TRAINING + 1.5 * TRAINING) / 1_500 * 1_000
    evaluations = 2 * EVALUATION + FINAL
    expected = 1.5 * TRAINING + evaluations - EVALUATION + STARTUP + average + evaluations
    assert left(experiment) == pytest.approx(expected)


def test_the_last_evaluation_may_read_less_or_nothing_new(experiment, running):
    start(experiment / "a")
    running("a")
    for final, expected in ((500, 0.0), (2_000, 8.0)):
        config = CONFIG_OF_RUN | {"evaluation": CONFIG_OF_RUN["evaluation"] | {"final_tokens": final}}
        write_json(experiment / "a" / CONFIG, config)
        (experiment / "a" / METRICS).unlink(missing_ok=True)
        record(experiment / "a", 500, 1)
        rest = TRAINING / 2 + EVALUATION + expected
        whole = STARTUP + TRAINING + 2 * EVALUATION + expected
        assert left(experiment) == pytest.approx(rest + 2 * whole)


def test_a_task_without_a_text_evaluates_on_as_it_has_done(experiment, running):
    start(experiment / "a")
    running("a")
    write_json(experiment / "a" / FACTS, {"corpus": {"name": "recall stream"}})
    line = {"tokens": 500, "seconds": TRAINING / 2, "evaluation_seconds": 3.0}
    (experiment / "a" / METRICS).write_text(json.dumps(line) + "\n")
    assert left(experiment) == pytest.approx(TRAINING / 2 + 3.0 + 2 * (STARTUP + TRAINING + 6.0))


def test_a_start_up_is_noted_once(tmp_path):
    write_json(tmp_path / CARD, RunCard("comparison"))
    assert Run(tmp_path).startup_seconds is None
    note_launch(tmp_path)
    launched = read_card(tmp_path).launched
    assert launched > 0
    open_card(tmp_path, "run", {})
    seconds = Run(tmp_path).startup_seconds
    assert 0 <= seconds < 60
    note_launch(tmp_path)  # when it is resumed
    open_card(tmp_path, "run", {})
    assert Run(tmp_path).startup_seconds == seconds
