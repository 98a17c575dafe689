"""What a model remembers between segments, as a value, and how it grows, is compressed and is cut.

Every function takes a :class:`Memory` and returns a new one; nothing here or in a model is kept on
a module. At every moment each past position is in exactly one place: in the memory, in one slot of
the compressed memory, or forgotten from the far end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """The past of B parallel streams, oldest first.

    ``mem`` holds a tensor ``[M, B, D]`` a layer: that layer's inputs. ``c_mem`` holds a tensor
    ``[C, B, D]`` a layer, where each slot stands for ``compression_rate`` inputs older than all of
    ``mem``; it is empty for a model that doesn't compress. Both carry no gradient.
    """

    mem: tuple[Tensor, ...]
    c_mem: tuple[Tensor, ...] = ()

    @property
    def mem_len(self) -> int:
        """M, in positions."""
        return len(self.mem[0]) if self.mem else 0

    @property
    def c_mem_len(self) -> int:
        """C, in slots."""
        return len(self.c_mem[0]) if self.c_mem else 0


def extend(memory: Memory | None, inputs: Sequence[Tensor]) -> Memory:
    """The memory with a segment's layer inputs, ``[S, B, D]`` a layer, appended."""
    if memory is None or not memory.mem:
        return Memory(tuple(inputs), memory.c_mem if memory else ())
    grown = tuple(torch.cat((mem, x)) for mem, x in zip(memory.mem, inputs, strict=True))
    return Memory(grown, memory.c_mem)


def keep_newest(memory: Memory, mem_len: int) -> Memory:
    """The memory cut to its newest ``mem_len`` positions: Transformer-XL forgets (section 3.2)."""
    return Memory(tuple(newest(mem, mem_len) for mem in memory.mem), memory.c_mem)


def slots_to_compress(length: int, mem_len: int, compression_rate: int) -> int:
    """n = ⌈(length − mem_len) / c⌉ slots bring a memory of ``length`` back to ``mem_len``; but a
    slot stands for c whole positions, so n ≤ ⌊length / c⌋, and up to c − 1 positions may remain."""
    overflow = max(length - mem_len, 0)
    return min(-(-overflow // compression_rate), length // compression_rate)


def split_oldest(memory: Memory, positions: int) -> tuple[tuple[Tensor, ...], Memory]:
    """The oldest ``positions`` of each layer, ``[positions, B, D]``, and the memory without them."""
    oldest = tuple(mem[:positions] for mem in memory.mem)
    return oldest, Memory(tuple(mem[positions:] for mem in memory.mem), memory.c_mem)


def append_compressed(memory: Memory, compressed: Sequence[Tensor], c_mem_len: int) -> Memory:
    """The memory with new slots, ``[n, B, D]`` a layer, after its compressed ones, of which the
    newest ``c_mem_len`` are kept; the slots are detached, since f_c learns from its own loss."""
    slots = tuple(c.detach() for c in compressed)
    if memory.c_mem:
        slots = tuple(torch.cat(pair) for pair in zip(memory.c_mem, slots, strict=True))
    return Memory(memory.mem, tuple(newest(c_mem, c_mem_len) for c_mem in slots))


@dataclass(frozen=True)
class Compressed:
    """What one compression took and made: ``old [n·c, B, D]`` and ``new [n, B, D]``, a layer each;
    ``new`` still carries the gradient to f_c."""

    old: tuple[Tensor, ...]
    new: tuple[Tensor, ...]


def compress_oldest(
    memory: Memory,
    compress: Sequence[Callable[[Tensor], Tensor]],
    *,
    mem_len: int,
    c_mem_len: int,
    compression_rate: int,
) -> tuple[Memory, Compressed | None]:
    """Turn what overflows ``mem_len`` into compressed slots, by each layer's own f_c, ``[n·c, B, D]`` to
    ``[n, B, D]``.

    Returns the new memory and what was compressed, or None where nothing overflowed. Source:
    Compressive Transformer (Rae et al. 2020, arXiv 1911.05507), section 3.1 and algorithm 1.
    """
    n = slots_to_compress(memory.mem_len, mem_len, compression_rate)
    if n == 0:
        return memory, None
    old, memory = split_oldest(memory, n * compression_rate)
    # In the memory's dtype, whatever autocast made of it.
    new = tuple(f_c(mem).to(mem.dtype) for f_c, mem in zip(compress, old, strict=True))
    return append_compressed(memory, new, c_mem_len), Compressed(old, new)


def newest(mem: Tensor, length: int) -> Tensor:
    """The last ``length`` positions of ``[M, B, D]``, or all where there are fewer."""
    return mem[max(len(mem) - length, 0) :]


def check_memory(name: str, mem: Sequence[Tensor], x: Tensor, n_layers: int) -> None:
    """Raise ValueError unless ``mem``, empty or one tensor a layer, fits the input ``x [S, B, D]``."""
    if not mem:
        return
    if len(mem) != n_layers:
        raise ValueError(
            f"{name} of {n_layers} layers was expected, one tensor each; this one has {len(mem)}. "
            f"Is it another model's?"
        )
    for layer, tensor in enumerate(mem):
        expected, came = ["·", *x.shape[1:]], list(tensor.shape)
        if came[1:] != expected[1:] or len(came) != 3:
            raise ValueError(
                f"{name} of layer {layer} was expected as [length, batch, d_model] = "
                f"[·, {x.shape[1]}, {x.shape[2]}]; it is {came}. Start from no memory for another "
                f"batch, and use a memory with the model that made it."
            )
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise ValueError(
                f"{name} of layer {layer} is {tensor.dtype} on {tensor.device}, but the model works "
                f"in {x.dtype} on {x.device}; move it there, or start from no memory."
            )
        if len(tensor) != len(mem[0]):
            raise ValueError(
                f"{name} has {len(mem[0])} positions in layer 0 and {len(tensor)} in layer {layer}; "
                f"every layer remembers the same positions."
            )
