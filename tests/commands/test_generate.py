"""``memformers generate`` loses no memory, however it ends, and overwrites nothing else."""

import shlex
import shutil
import signal
import subprocess

import pytest
from safetensors.torch import load_file

from tests.processes import finish, program, run, start, wait_for

TEXT, LONG = "BANQUO: well met.\n", pytest.mark.long


@pytest.fixture
def memory(tmp_path):
    """Where a memory is to be saved."""
    return tmp_path / "memory.safetensors"


def test_a_character_that_the_model_does_not_know_is_said_and_the_memory_saved(trained, memory):
    ended = run("generate", "--checkpoint", trained, "--tokens", 3, "--interactive", "--save-memory", memory,
                input="well met.\nwell € met.\nwell met.\n")  # fmt: skip
    assert ended.code == 0
    assert "error: characters outside the vocabulary" in ended.err
    assert len(ended.out) == 2 * (3 + 1) + 1  # two answers, and the end of the line
    assert memory.is_file()


@pytest.mark.parametrize(
    ("number", "while_reading"),
    [(15, True), *(pytest.param(*each, marks=LONG) for each in ((2, False), (15, False), (2, True)))],
)  # fmt: skip
def test_a_signal_saves_what_was_read_and_written_so_far(number, while_reading, trained, memory, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text(TEXT * (20_000 if while_reading else 1))
    command = program("generate", "--checkpoint", trained, "--prompt-file", book, "--tokens", 10_000_000,
                      "--save-memory", memory)  # fmt: skip
    with start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        if while_reading:
            assert process.stderr.read(1)  # the bar
        else:
            assert process.stdout.read(5)
        process.send_signal(number)
        process.stdout.read()
    assert process.returncode == (143 if number == signal.SIGTERM else 0)
    layers = {name: len(t) for name, t in load_file(memory).items() if name.startswith("mem.")}
    assert len(set(layers.values())) == 1
    assert run("generate", "--checkpoint", trained, "--load-memory", memory, "--tokens", 2).code == 0


def test_a_reader_that_has_gone_costs_no_memory(trained, memory):
    command = program("generate", "--checkpoint", trained, "--tokens", 100_000, "--save-memory", memory)
    with start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
        wait_for(lambda: process.poll() is not None)
    assert process.returncode == 128 + signal.SIGPIPE
    assert memory.is_file()


@pytest.mark.parametrize(
    ("target", "message"),
    [("prompt.txt", "is not a saved memory"), ("model.safetensors", "is not a saved memory"),
     ("/dev/null", "is not a saved memory"), (".", "is not a saved memory"),
     ("gone/memory", "is not a folder"), ("\udcff", "is not UTF-8")],
)  # fmt: skip
def test_what_is_no_saved_memory_is_never_replaced_and_a_place_for_none_is_said_at_once(
    target, message, trained, tmp_path
):
    weights = next((trained / "checkpoints").glob("*/model.safetensors"))
    shutil.copy(weights, tmp_path)
    (tmp_path / "prompt.txt").write_text(TEXT)
    ended = run("generate", "--checkpoint", trained, "--prompt-file", tmp_path / "prompt.txt",
                "--save-memory", tmp_path / target)  # fmt: skip
    assert ended.said(message), ended.err
    assert ended.out == ""  # before anything was written
    assert (tmp_path / "prompt.txt").read_text() == TEXT
    assert (tmp_path / "model.safetensors").read_bytes() == weights.read_bytes()


def test_where_its_output_is_closed_a_command_refuses_to_begin(trained):
    ended = finish(["sh", "-c", f"{shlex.join(program('generate', '--checkpoint', trained))} >&-"])
    assert ended.returncode == 2
    assert "output is closed" in ended.stderr
