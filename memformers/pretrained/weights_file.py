"""Weights from files of other programs, which are read as tensors and never run as code."""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from memformers.common.errors import UserError


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a state dict from a file that another program wrote.

    A pickle can run any code while it is loaded. Only tensors and plain containers are read from it, by
    PyTorch's weights-only reader.

    Args:
        path: A file of safetensors, or what ``torch.save`` wrote of a plain state dict.

    Returns:
        The tensors, by name.

    Raises:
        ValueError: For any other pickle, and for a file that is missing or broken or contains something else.

    Examples:
        >>> import torch
        >>> from memformers import load_weights
        >>> torch.save({"weight": torch.ones(2, 3)}, "weights.pt")
        >>> load_weights("weights.pt")["weight"].shape
        torch.Size([2, 3])
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"expected {path} to be a file of weights, but it is missing.")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} can't be read as safetensors: {' '.join(str(error).split())}") from None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a broken or hostile pickle may end in
        raise UserError(why_refused(path, error)) from None
    if not isinstance(state, dict) or not state:
        raise UserError(f"expected {path} to hold a state dict of tensors, got a {type(state).__name__}.")
    named = {name: isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()}
    others = [str(name) for name, is_tensor in named.items() if not is_tensor]
    if others:
        raise UserError(f"{path} holds more than tensors: {few(others)}; save only the model's state_dict().")
    return dict(state)


def why_refused(path: Path, error: Exception) -> str:
    """The error message for a file that PyTorch's weights-only reader refused."""
    calls = re.search(r"GLOBAL (\S+)", str(error))
    if calls:
        return (
            f"{path} is refused: loading it would run code ({calls[1]}). Ask for safetensors, or if you "
            f"trust it, load it elsewhere and save only its state_dict()."
        )
    return f"{path} can't be read as weights that torch.save wrote; it is broken or in another format."


def few(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = len(names) - 4
    return ", ".join(names[:4]) + (f" and {more} more" if more > 0 else "")
