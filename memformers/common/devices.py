"""The device of a model, and the precision in which it computes fastest."""

import time
from functools import cache

import torch
from torch import Tensor

from memformers.common.errors import UserError

FULL, HALF = torch.float32, torch.bfloat16
ROUNDS = 7
"""How often a product is timed in each precision, alternately; the best time counts."""
CLEARLY = 0.6
"""bfloat16 is used if its product takes at most this fraction of float32's time."""


def choose_device(name: str) -> torch.device:
    """The device called ``name``, checked by using it; ``auto`` is a GPU if there is one. Raises UserError if
    there is no such device here, or if it stores no numbers."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.zeros(1, device=name).device
    except NotImplementedError:  # how PyTorch says that it was built without it, in fifty lines
        reason = "this PyTorch doesn't have it"
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
    else:
        if device.type != "meta":
            return device
        reason = "it keeps shapes and no numbers"
    raise UserError(f"device={name!r} can't be used here: {reason}; use auto, cpu or, with a GPU, cuda.")


@cache
def multiplies_bfloat16_faster(device: torch.device) -> bool:
    """Whether ``device`` multiplies matrices much faster in bfloat16 than in float32: GPUs since Ampere, and
    processors with instructions for it (AVX512-BF16, AMX); others emulate it.

    A processor is measured, once in a process and within milliseconds: with the instructions, bfloat16 takes
    a quarter of the time, without them as long as float32 or longer.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    pairs = [(torch.ones(1024, 256, dtype=d), torch.ones(256, 256, dtype=d)) for d in (FULL, HALF)]
    times = [[seconds(x, y) for x, y in pairs] for _ in range(ROUNDS)]
    full, half = map(min, zip(*times, strict=True))
    return half < CLEARLY * full


def seconds(x: Tensor, y: Tensor) -> float:
    """How many seconds the product of ``x [rows, inner]`` and ``y [inner, columns]`` takes."""
    begin = time.perf_counter()
    torch.mm(x, y)
    return time.perf_counter() - begin
