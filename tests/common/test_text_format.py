import sys

import pytest

from memformers.common.progress import Progress
from memformers.common.text_format import counted, fitting, printable


def test_one_is_one_and_no_character_writes_to_the_terminal_at_will():
    said = [counted(number, "document") for number in (1, 0, 2_000)]
    assert said == ["1 document", "0 documents", "2,000 documents"]
    assert printable("\x1b[31ma\nb\a") == "\ufffd[31ma\nb\ufffd"


def test_a_line_ends_where_the_terminal_does_and_some_characters_take_two_columns():
    assert [fitting("abc", 3), fitting("abc", 2), fitting("\u8bb0\u5fc6x", 3)] == ["abc", "ab", "\u8bb0"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_a_bar_in_a_terminal_and_a_line_for_each_tenth_in_a_log(is_terminal, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with Progress(total=200, desc="reading", mininterval=0) as bar:
        for _ in range(200):
            bar.update(1)
    lines = capsys.readouterr().err.splitlines()
    if is_terminal:
        assert "200/200" in lines[-1]
    else:
        assert lines == [f"reading: {n}%, {2 * n} of 200" for n in range(10, 101, 10)]
