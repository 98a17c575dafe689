import sys

from memformers.common.progress import Progress
from memformers.common.text_format import counted, fitting, printable


def test_one_is_one_no_character_controls_the_terminal_and_some_take_two_columns():
    said = [counted(number, "document") for number in (1, 0, 2_000)]
    assert said == ["1 document", "0 documents", "2,000 documents"]
    assert printable("\x1b[31ma\nb\a") == "\ufffd[31ma\nb\ufffd"
    assert [fitting("abc", 3), fitting("abc", 2), fitting("\u8bb0\uff21x", 4)] == [
        "abc",
        "ab",
        "\u8bb0\uff21",
    ]


def test_progress_is_a_bar_in_a_terminal_and_a_line_for_each_tenth_in_a_log(capsys, monkeypatch):
    lines = []
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_one=is_terminal: is_one)
        with Progress(total=200, desc="reading", mininterval=0) as bar:
            for _ in range(200):
                bar.update(1)
        lines.append(capsys.readouterr().err.splitlines())
    assert "200/200" in lines[0][-1]
    assert lines[1] == [f"reading: {n}%, {2 * n} of 200" for n in range(10, 101, 10)]
