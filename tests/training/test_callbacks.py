import sys
import time
from contextlib import closing

from memformers.training.callbacks import Bar
from tests.builders import small_training


def test_the_clock_and_the_speed_of_the_bar_count_training_alone():
    with closing(Bar(small_training(tokens=100_000))) as bar:
        for step in range(1, 4):
            time.sleep(0.15)
            bar.show(1_000 * step, 2.5)
            with bar.standing() as show:
                time.sleep(0.4)
                show("evaluating, 50%")
        said = bar.tqdm.format_dict
        assert 0.45 <= said["elapsed"] < 0.8
        assert 1_000 / 0.25 < said["rate"] < 1_000 / 0.14


def test_a_log_gets_a_line_for_each_tenth_and_no_other(capsys):
    with closing(Bar(small_training(tokens=1000))) as bar:
        for step in range(1, 101):
            bar.tqdm.mininterval = 0
            bar.show(10 * step, 2.5)
            with bar.standing() as show:
                show("evaluating, 50%")
        bar.say("a line")
    *tenths, last = capsys.readouterr().err.splitlines()
    assert [line.partition("%")[0].split()[-1] for line in tenths] == [str(n) for n in range(10, 101, 10)]
    assert all("loss 2.500 nats" in line for line in tenths)
    assert last == "a line"


def test_the_bar_shows_how_far_an_evaluation_is_and_then_the_loss_again(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with closing(Bar(small_training(tokens=400))) as bar:
        bar.show(500, 2.5)
        assert bar.tqdm.n == 400, "the last step goes beyond"
        with bar.standing() as show:
            show("evaluating, 0%")
            show("evaluating, 1%")  # at once, so it isn't drawn
            time.sleep(bar.tqdm.mininterval)
            show("evaluating, 70%")
            said = capsys.readouterr().err
            assert "evaluating, 0%" in said
            assert "evaluating, 1%" not in said
            assert said.rstrip().endswith("evaluating, 70%]")
        bar.tqdm.refresh()
        assert capsys.readouterr().err.rstrip().endswith("loss 2.500 nats]")


def test_a_bar_that_is_not_shown_says_nothing(capsys):
    with closing(Bar(small_training(), shown=False)) as bar:
        bar.show(500, 2.5)
        bar.say("a line")
        with bar.standing() as show:
            show("evaluating, 0%")
    assert capsys.readouterr().err == ""
