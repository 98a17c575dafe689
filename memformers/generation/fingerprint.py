"""A fingerprint of a model: it tells whether its modules or weights have changed since it was taken."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memformers.models.hooks import PLAIN_WEIGHTS
from memformers.models.stack import all_modules

SAMPLE = 37
"""The number of equal parts into which a tensor is cut. One number of each part is compared. It is prime:
otherwise the length of a part would often be a multiple of a matrix's width, and all numbers would be in one
column."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes. Numbers are compared as bits, since NaN differs from itself."""
COMPUTED_WITH = {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
BOOKKEEPING = vars(nn.Module()).keys() - COMPUTED_WITH
"""Attributes of every module in which no change matters, or whose values don't change in place."""


class Fingerprint:
    """What a model in eval mode computes with at one moment.

    [`matches`][] becomes false if a module gets into training mode; if something replaces it, or changes its
    class, its hooks or any other attribute; if something replaces a parameter or buffer, or changes it by an
    operation that PyTorch counts (``_version``); and if another operation, such as a fused optimizer's or one
    on ``.data``, changes one of the 37 numbers that are compared. All of these stay alive with it.
    """

    def __init__(self, model: nn.Module):
        # Modules, with their classes, hooks and other attributes.
        self.modules = all_modules(model)
        self.kinds = list(map(type, self.modules))
        self.attributes = [copied_attributes(module) for module in self.modules]
        # Tensors, each once: where they are, their versions, and some of their numbers.
        tensors: dict[int, Tensor] = {}
        for module in self.modules:
            tensors |= {id(x): x for x in stored_tensors(module)}
        self.tensors = list(tensors.values())
        self.counted = [x for x in self.tensors if not x.is_inference()]  # others have no version
        self.views = sampled_views(self.tensors)
        self.values = self._values()

    def _values(self) -> tuple[list[int], list[int], list[bytes]]:
        """Where the tensors are, how often PyTorch counted a change of them, and their sampled numbers."""
        addresses = list(map(Tensor.data_ptr, self.tensors))
        versions = list(map(attrgetter("_version"), self.counted))
        numbers = [joined(views) for views in self.views]
        return addresses, versions, numbers

    def matches(self) -> bool:
        """Whether the model is in eval mode and unchanged."""
        if list(map(type, self.modules)) != self.kinds:
            return False
        try:
            if list(map(vars, self.modules)) != self.attributes:
                return False
        except (RuntimeError, TypeError, ValueError):  # another tensor or array: equality isn't one bool
            return False
        return self._values() == self.values


def copied_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of ``module``, with a copy of each container, which could change in place."""
    attributes = dict(vars(module))
    for name in attributes.keys() - BOOKKEEPING:
        for container in (dict, list, set):
            if isinstance(attributes[name], container):
                attributes[name] = container(attributes[name])
    return attributes


def stored_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The plain tensors, with numbers in memory, of the parameters and buffers of ``module``. Some of these
    consist of several tensors, such as torchao's."""
    waiting = [*module._parameters.values(), *module._buffers.values()]
    while waiting:
        # A tensor subclass consists of tensors, which may be subclasses again.
        x: Any = waiting.pop()
        if hasattr(x, "__tensor_flatten__"):
            names, _ = x.__tensor_flatten__()
            waiting.extend(getattr(x, name) for name in names)
        elif x is not None and type(x) in PLAIN_WEIGHTS and has_readable_numbers(x):
            yield x


def has_readable_numbers(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_meta and not x.is_quantized


def sampled_views(tensors: list[Tensor]) -> list[list[Any]]:
    """Views of at most 37 numbers of each tensor, as integers, for each device: NumPy's for a CPU, where they
    take a fifth of the time."""
    by_device: dict[torch.device, list[Any]] = {}
    for x in tensors:
        integer = INTEGERS.get(x.element_size())
        if integer is None or not x.numel():
            continue
        flat = x.detach().view(integer)
        # A view of one dimension: of all numbers, or of a diagonal where these have no common stride.
        while flat.dim() > 1:
            flat = flat.view(-1) if flat.is_contiguous() else flat.diagonal()
        flat = flat.reshape(-1)  # a scalar's only number
        stride = -(-len(flat) // SAMPLE)  # ⌈n / 37⌉
        view = flat[::stride]
        by_device.setdefault(x.device, []).append(view.numpy() if x.device.type == "cpu" else view)
    return list(by_device.values())


def joined(views: list[Any]) -> bytes:
    if isinstance(views[0], Tensor):
        return torch.cat(views).cpu().numpy().tobytes()
    return np.concatenate(views).tobytes()
