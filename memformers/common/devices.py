"""Where a model runs."""

import torch

from memformers.common.errors import UserError


def choose_device(name: str) -> torch.device:
    """The device called ``name``, checked by using it; ``auto`` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise UserError(f"device={name!r} can't be used here: {first_line}") from None
