"""``memformers generate`` ends as its user, or its reader, wants."""

import os
import signal
import subprocess

import pytest

from memformers.common.processes import StopSignals
from tests.processes import program, run, start, wait_for


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
@pytest.mark.parametrize("asked", [1, 9])
def test_a_signal_ends_it_while_it_reads_and_between_two_tokens(number, code, asked, trained, monkeypatch):
    check, times = StopSignals.check, []

    def signalled(self):
        times.append(self)
        if len(times) == asked:
            os.kill(os.getpid(), number)
        check(self)

    monkeypatch.setattr(StopSignals, "check", signalled)
    prompt = "BANQUO: well met.\n"
    ended = run("generate", "--checkpoint", trained, "--prompt", prompt, "--tokens", 10_000_000)
    assert (ended.code, ended.err) == (code, "")
    assert ended.out.startswith(prompt) == (asked > 1)
    assert len(times) == asked


def test_it_ends_when_its_reader_has_gone(trained):
    command = program("generate", "--checkpoint", trained, "--tokens", 100_000)
    with start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
        wait_for(lambda: process.poll() is not None)
    assert process.returncode == 128 + signal.SIGPIPE
