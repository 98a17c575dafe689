"""What a training shows while it runs: how far it is, and how long it takes with its evaluations."""

import io
import os
import sys
import time

import pytest

from memformers.common.progress import Progress
from memformers.dashboard.live import summary
from memformers.runs.folder import read_metrics
from memformers.runs.reader import Runs, totals
from memformers.training.callbacks import TimeLeft, opening
from memformers.training.state import TrainingState
from tests.builders import small_training
from tests.training.runs import train_run


def test_a_log_gets_a_line_for_each_tenth_and_a_bar_that_is_not_shown_none(capsys):
    for hidden in (False, True):
        with Progress(total=1000, disable=hidden, mininterval=0) as bar:
            for step in range(1, 101):
                bar.show("loss 2.5", 10 * step)
                bar.show("evaluating, 50%")
            bar.show("loss 2.5", 1010)
            assert bar.n <= 1000, "the last step goes beyond"
            bar.say("a line")
        *tenths, last = capsys.readouterr().err.splitlines() or [""]
        assert [line.partition("%")[0] for line in tenths] == [str(n) for n in range(10, 101, 10)] * (
            not hidden
        )
        assert last == "a line" * (not hidden)


def test_a_notebook_shows_progress_as_output_and_not_as_errors(capsys, monkeypatch):
    kind = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    monkeypatch.setattr(sys, "stderr", errors := kind())
    with Progress(total=10, mininterval=0) as bar:
        bar.show("loss 2.5", 5)
        bar.say("a line")
    assert errors.getvalue() == ""
    assert capsys.readouterr().out.splitlines()[-1] == "a line"


@pytest.mark.parametrize(
    ("tokens", "grows", "training"),
    [(0, 0.0, 10.0), (600, 0.0, 4.0), (0, 0.8, 10 * (1 + 2 * 0.6)), (500, 0.8, 5 * (1 + 2 * 0.8875) / 2.25),
     (800, 0.8, 2.0), (1_020, 0.0, 0.0)],
)  # fmt: skip
def test_the_time_left_counts_evaluations_and_steps_that_get_longer_as_the_memory_grows(
    tokens, grows, training
):
    config = small_training(tokens=1_000, evaluations=4, memory_warmup=grows)
    state = TrainingState((), tokens=tokens, evaluations=1)
    left = TimeLeft(config, evaluation=2.0, ending=5.0, growth=3.0).seconds(state, 100.0)
    assert left == pytest.approx((training, 3 * 2.0 + 5.0))


def test_a_run_that_evaluates_at_its_end_is_not_shown_at_its_end(tmp_path):
    run = train_run(small_training(evaluation_tokens=700), tmp_path / "run")
    for path in (run / "result.json", run / "labml.json"):
        path.unlink()
    evaluated = [r for r in read_metrics(run) if "loss.valid" in r]
    takes = evaluated[-1]["evaluation_seconds"] / 2 * 2_999 / 699
    now = time.time()
    for ago, expected in ((0.0, max(takes, 1.0)), (1_000 * takes, 1.0)):
        os.utime(run / "metrics.jsonl", (now - min(ago, 500),) * 2)
        share, left = totals(Runs(tmp_path).all)
        assert share == 1
        assert left == pytest.approx(expected, abs=1.0)
    assert "about 1 s left" in summary(Runs(tmp_path))


@pytest.mark.parametrize(
    ("held_out", "prompt"),
    [("?\n\nGREMIO:\nGood morrow.\n", "?\n\nGREMIO:\n"), ("the end\nand more", "the end\n"),
     ("no line break", "no line break"), ("?!\n--\n", "?!\n")],
)  # fmt: skip
def test_a_sample_goes_on_from_the_first_line_with_a_letter(held_out, prompt):
    assert opening(held_out) == prompt
