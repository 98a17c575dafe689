"""What a training shows while it runs."""

import io
import sys

import pytest

from memformers.common.text import Progress
from memformers.training.callbacks import in_one_line, opening


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
    ("held_out", "prompt"),
    [("?\n\nGREMIO:\nGood morrow.\n", "?\n\nGREMIO:\n"), ("the end\nand more", "the end\n"),
     ("no line break", "no line break"), ("?!\n--\n", "?!\n")],
)  # fmt: skip
def test_a_sample_goes_on_from_the_first_line_with_a_letter(held_out, prompt):
    assert opening(held_out) == prompt


def test_a_sample_cannot_write_to_the_terminal():
    assert in_one_line("a\nb\x1b[2J\x07\r€") == "a⏎b�[2J��€"
