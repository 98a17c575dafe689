"""Checks that a memory fits a model: shapes, lengths, dtypes and devices."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.models.memory import LayerMemory, Memory, check_returned, check_streams
from memformers.models.sizes import MemorySizes


def check_memory(memory: Any, x: Tensor, sizes: Sequence[MemorySizes]) -> Memory:
    """``memory``, or an empty one for None. UserError unless a model whose layers have these ``sizes`` can
    have made it from streams with inputs ``x [S, B, D]``."""
    # None becomes a memory of empty layers, so that models handle only one case.
    if memory is None or (isinstance(memory, Memory) and not memory.layers):
        n_valid = None if memory is None else memory.n_valid
        memory = Memory((LayerMemory.nothing(x),) * len(sizes), n_valid)
    if not isinstance(memory, Memory):
        raise UserError(f"expected memory to be a Memory or None, got a {type(memory).__name__}.")
    if len(memory.layers) != len(sizes):
        raise UserError(
            f"expected a memory of {len(sizes)} layers, got {len(memory.layers)}; use a memory of this model."
        )
    # Layers of one size have read the same segments, so their lengths are the same.
    first_of_size: dict[tuple[int | None, ...], tuple[int, LayerMemory]] = {}
    for i, (layer, size) in enumerate(zip(memory.layers, sizes, strict=True)):
        check_layer_memory(layer, x, size, f"of layer {i}")
        key = (size.mem_len, size.c_mem_len, size.compression_rate, size.slot_positions)
        first, alike = first_of_size.setdefault(key, (i, layer))
        if (layer.mem_len, layer.n_slots) != (alike.mem_len, alike.n_slots):
            raise UserError(
                f"layer {i} has {layer.mem_len} positions and {layer.n_slots} slots, but layer {first}, "
                f"which remembers as much, {alike.mem_len} and {alike.n_slots}; use the memory as a model "
                f"returns it."
            )
    check_streams("a memory's n_valid", memory.n_valid, torch.int64, x.shape[1:2], x.device)
    return memory


def check_layer_memory(memory: Any, x: Tensor, size: MemorySizes, whose: str) -> None:
    """UserError unless ``memory`` can be what a layer of this ``size`` remembers of ``x [S, B, D]``."""
    if not isinstance(memory, LayerMemory):
        raise UserError(f"expected a LayerMemory {whose}, got a {type(memory).__name__}.")
    # The most that each tensor may hold, including positions that wait for a whole slot.
    limits = {
        "mem": size.longest_memory,
        "slots": size.c_mem_len,
        "shift_state": int(size.has_shift_state),
        "bptt_inputs": size.bptt_len,
    }
    for name, limit in limits.items():
        tensor = getattr(memory, name)
        if tensor is None and name not in ("mem", "slots"):
            continue
        if tensor is None:
            raise UserError(f"expected {name} {whose} as a torch.Tensor, got None; use x[:0] for nothing.")
        n = len(tensor) if isinstance(tensor, Tensor) and tensor.dim() else 0
        check_streams(f"{name} {whose}", tensor, x.dtype, torch.Size((n, *x.shape[1:])), x.device)
        if n > limit:
            raise UserError(
                f"{name} {whose} has length {n}, where this model keeps at most {limit}; use it with the "
                f"model that made it."
            )
    # A key of the first position of a segment needs the input before it.
    has_past = memory.mem_len or memory.n_slots
    if size.has_shift_state and has_past and memory.shift_state is None:
        raise UserError(
            f"a model with token_shift also needs the newest input {whose}, its shift_state; use the memory "
            f"of this model."
        )
    # Only the newest slots are computed again, from whole groups of inputs.
    n_inputs = 0 if memory.bptt_inputs is None else len(memory.bptt_inputs)
    if n_inputs % size.group or n_inputs > memory.n_slots * size.group:
        raise UserError(
            f"expected bptt_inputs {whose} of some of {memory.n_slots} slots of {size.group}, got "
            f"{n_inputs}; use it as a model returns it."
        )
    # A rule's own state may have any shape; only its number of streams is known.
    if not isinstance(memory.state, Mapping):
        raise UserError(
            f"expected the state {whose} as a dict of tensors, got {type(memory.state).__name__}."
        )
    for name, tensor in memory.state.items():
        if not isinstance(tensor, Tensor) or tensor.dim() < 2 or tensor.shape[1] != x.shape[1]:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UserError(f"expected {name!r} in the state {whose} as [·, {x.shape[1]}, …], got {got}.")


def check_updated(updated: Any, x: Tensor, size: MemorySizes, rule: type) -> None:
    """UserError unless ``updated`` is what ``update`` of a ``rule`` of this ``size`` can return for inputs
    ``x [S, B, D]``: a memory and a loss."""
    method = f"{rule.__qualname__}.update"
    if not isinstance(updated, tuple) or len(updated) != 2:
        raise UserError(
            f"expected {method} to return a LayerMemory and a loss or None, got {type(updated).__name__}."
        )
    memory, loss = updated
    # The stack adds the newest input and casts slots that autocast has made.
    if isinstance(memory, LayerMemory):
        slots = memory.slots.to(x.dtype) if isinstance(memory.slots, Tensor) else memory.slots
        memory = replace(memory, slots=slots, shift_state=x[-1:] if size.has_shift_state else None)
    check_layer_memory(memory, x, size, f"from {method}")
    if loss is not None:
        check_returned(rule, "update", loss, ())
