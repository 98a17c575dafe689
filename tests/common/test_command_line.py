"""What ends a program, and what it says."""

import io

import pytest

from memformers.common.command_line import plain_errors
from memformers.common.errors import UserError
from tests.processes import ended


def failing(error):
    def program():
        with plain_errors():
            raise error

    return ended(program)


@pytest.mark.parametrize("error", [UserError("d_model=1 is odd"), OSError("the disk is full")])
def test_what_the_user_can_mend_is_one_line(error):
    assert failing(error).err == f"error: {error}\n"
    assert failing(error).code == 2


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("y"), KeyError("z"), AssertionError()])
def test_a_mistake_of_ours_shows_its_traceback_and_asks_to_be_reported(error):
    said = failing(error)
    assert said.code == 1
    assert "Traceback" in said.err
    assert said.err.endswith("please report it with the lines above.\n")


def test_memory_that_is_used_up_is_one_line():
    said = failing(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"))
    assert (said.code, said.err.count("\n")) == (2, 1)


def test_a_stream_that_cannot_show_a_character_shows_another(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with plain_errors():
        print("a → b", flush=True)
    assert raw.getvalue() == b"a ? b\n"
