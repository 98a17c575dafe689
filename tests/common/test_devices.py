"""Where a model can run, and what is said where it can't."""

import pytest
import torch

from memformers.common.devices import choose_device
from memformers.common.errors import UserError


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("meta", "it keeps shapes and no numbers"),
        ("xla", "this PyTorch doesn't have it"),
        ("hpu", "No module named"),
        ("warp", "Expected one of cpu, cuda"),
        ("", "Device string must not be empty"),
    ],
)
def test_a_device_that_holds_no_numbers_here_is_one_line_that_says_what_to_do(name, reason):
    with pytest.raises(UserError) as error:
        choose_device(name)
    said = str(error.value)
    assert said.startswith(f"device={name!r} can't be used here: {reason}")
    assert said.endswith("; use auto, cpu or, with a GPU, cuda.")
    assert "\n" not in said


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has it")
def test_mps_where_there_is_none_is_one_line():
    with pytest.raises(UserError, match=r"^device='mps' can't be used here: .*; use auto, cpu or"):
        choose_device("mps")


def test_auto_and_cpu_are_devices():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")
