"""Progress bars, as a terminal shows them."""

import io
import re
import signal
import sys
import threading
import time

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memformers.common.console import Progress
from memformers.common.processes import Stopped, StopSignals
from tests.builders import small_training
from tests.training.runs import train_run


class Terminal(io.StringIO):
    """Keeps what is drawn."""

    def isatty(self):
        return True


def open_terminal(monkeypatch):
    """A terminal in place of standard error. A test calls it, since pytest replaces what fixtures set."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def clocks(terminal):
    """The elapsed times that were shown, without repetitions."""
    times = re.findall(r"\d\d:\d\d(?=<|,| )", terminal.getvalue())
    return list(dict.fromkeys(times))


def test_a_bar_moves_every_second_without_progress(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with Progress(total=100, desc="a slow step"):
        time.sleep(3.3)
    assert {"00:01", "00:02", "00:03"} <= {*clocks(terminal)}


def test_a_bar_without_a_total_moves_too(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with Progress(desc="how long this takes isn't known"):
        time.sleep(2.2)
    assert {"00:01", "00:02"} <= {*clocks(terminal)}


def test_nothing_is_drawn_after_a_bar_is_closed(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with Progress(total=10) as bar:
        bar.show("done", 10)
    drawn = terminal.getvalue()
    time.sleep(1.2)
    assert terminal.getvalue() == drawn
    assert bar.clock not in threading.enumerate()


def test_a_signal_while_a_bar_is_drawn_does_not_hang(monkeypatch):
    """tqdm's lock stays locked then."""
    open_terminal(monkeypatch)

    def interrupted(self, *arguments, **options):
        signal.raise_signal(signal.SIGTERM)

    began = time.monotonic()
    bar = Progress(total=10, mininterval=0)
    with StopSignals() as signals, bar, monkeypatch.context() as patch:
        patch.setattr(Progress, "display", interrupted)
        with pytest.raises(Stopped), signals.at_once():
            bar.move_to(5)
    assert time.monotonic() - began < 10


@pytest.mark.usefixtures("quick_runs")
def test_the_bar_of_a_training_moves_after_each_step(monkeypatch, tmp_path):
    """With steps that are slow enough to be drawn, and no record until the last one."""
    terminal = open_terminal(monkeypatch)
    handle = register_optimizer_step_pre_hook(lambda *_: time.sleep(0.15))
    try:
        config = small_training(max_tokens=10 * 64, optimizer="adamw", log_every=1_000, evaluations=1)
        train_run(config, tmp_path / "run")
    finally:
        handle.remove()
    shown = {float(count) for count in re.findall(r"([\d.]+)/640 ", terminal.getvalue())}
    assert {*range(64, 641, 64)} <= shown


def test_an_exception_in_a_bar_does_not_block_other_bars(monkeypatch):
    """Ctrl-C comes at any moment, also while a bar holds the lock that all bars share."""
    open_terminal(monkeypatch)

    def stopped(*_, **__):
        raise KeyboardInterrupt

    bar = Progress(total=10)
    with monkeypatch.context() as drawing:
        drawing.setattr(bar, "display", stopped)
        with pytest.raises(KeyboardInterrupt):
            bar.refresh()
    bar.close()
    finished = threading.Event()

    def use_another_bar():
        with Progress(total=10) as other:
            other.show("done", 10)
        finished.set()

    threading.Thread(target=use_another_bar, daemon=True).start()
    assert finished.wait(10)


@pytest.mark.usefixtures("quick_runs")
def test_a_training_without_metrics_leaves_no_moving_bar(monkeypatch, tmp_path):
    terminal = open_terminal(monkeypatch)
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "missing" / "metrics.jsonl")
    with pytest.raises(OSError, match="metrics"):
        train_run(small_training(), tmp_path)
    drawn = terminal.getvalue()
    time.sleep(1.2)
    assert terminal.getvalue() == drawn
