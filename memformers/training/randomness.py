"""The random states of a process, as JSON."""

import random
from typing import Any

import numpy as np
import torch

from memformers.common.errors import UserError


def random_states() -> dict[str, Any]:
    """The random states of Python, NumPy, and PyTorch on CPU and on every GPU."""
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "torch": to_hex(torch.get_rng_state()),
        "cuda": [to_hex(state) for state in torch.cuda.get_rng_state_all()] if has_gpu() else [],
    }


def seed_python_and_numpy(seed: int) -> None:
    """Seed Python's and NumPy's random numbers, which a user's module may draw, so that every run with this
    seed gets the same ones."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def set_random_states(states: dict[str, Any]) -> None:
    """Restore [`random_states`][], those of GPUs only for the GPUs that exist here.

    Raises ValueError for anything else.
    """
    try:
        python, numpy = states["python"], states["numpy"]
        random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
        key = np.array(numpy["state"]["key"], dtype=np.uint32)
        np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
        torch.set_rng_state(from_hex(states["torch"]))
        if has_gpu() and len(states["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([from_hex(state) for state in states["cuda"]])
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(f"the random states can't be used: {error!r}") from None


def check_random_states(states: dict[str, Any]) -> None:
    """Raise ValueError unless ``states`` could be restored; the states of this process don't change."""
    before = random_states()
    try:
        set_random_states(states)
    finally:
        set_random_states(before)


def has_gpu() -> bool:
    """Whether there are random states of GPUs."""
    return torch.cuda.is_available()


def to_hex(state: torch.Tensor) -> str:
    """A tensor of bytes, uint8 ``[n]``, as hexadecimal digits."""
    return bytes(state.tolist()).hex()


def from_hex(digits: str) -> torch.Tensor:
    """The tensor again, uint8 ``[n]``."""
    return torch.tensor(list(bytes.fromhex(digits)), dtype=torch.uint8)
