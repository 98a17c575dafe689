"""Where a model runs."""

import torch

from memformers.common.errors import UserError


def choose_device(name: str) -> torch.device:
    """The device called ``name``, checked by using it; ``auto`` is a GPU if there is one. Raises UserError
    where there is no such device here, or one that holds no numbers."""
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
