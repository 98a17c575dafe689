"""``memformers generate`` ends as its user, or its reader, wants."""

import signal
import subprocess

import pytest

from tests.processes import program, start, wait_for

TEXT, LONG = "BANQUO: well met.\n", pytest.mark.long


@pytest.mark.parametrize(
    ("number", "while_reading"),
    [(15, True), *(pytest.param(*each, marks=LONG) for each in ((2, False), (15, False), (2, True)))],
)  # fmt: skip
def test_a_signal_ends_it_between_two_tokens(number, while_reading, trained, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text(TEXT * (20_000 if while_reading else 1))
    command = program("generate", "--checkpoint", trained, "--prompt-file", book, "--tokens", 10_000_000)
    with start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        if while_reading:
            assert process.stderr.read(1)  # the bar
        else:
            assert process.stdout.read(5)
        process.send_signal(number)
        process.stdout.read()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == (143 if number == signal.SIGTERM else 0)


def test_it_ends_when_its_reader_has_gone(trained):
    command = program("generate", "--checkpoint", trained, "--tokens", 100_000)
    with start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
        wait_for(lambda: process.poll() is not None)
    assert process.returncode == 128 + signal.SIGPIPE
