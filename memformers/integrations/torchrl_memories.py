"""The memories of a module's steps, kept where the module acts, so that a tensordict has only an id of each.
What a segment adds is kept once: the memory before it, and the features of each of its steps."""

import os
import random
from typing import Any

import torch
from torch import Tensor

from memformers.common.errors import UserError

NUMBER_BITS = 40
"""Bits of an id that count steps; those above, without the sign, say whose step it is."""
OWNER_BITS = 62 - NUMBER_BITS


class Ring:
    """The newest rows of a table ``[·, …]`` that grows up to a size. A number counts the rows before."""

    def __init__(self) -> None:
        self.count = 0
        self.oldest = 0  # the number of the oldest row that is kept
        self.rows: Tensor | None = None

    def append(self, rows: Tensor, size: int) -> Tensor:
        """The numbers ``[n]`` of new ``rows [n, …]``, of which the newest ``size`` are kept."""
        if self.rows is None:
            self.rows = rows.new_empty(0, *rows.shape[1:])
        needed = min(self.count + len(rows), size)
        if needed > len(self.rows):
            self._grow(min(max(needed, 2 * len(self.rows)), size))
        numbers = torch.arange(self.count, self.count + len(rows), device=rows.device)
        self.rows[numbers % len(self.rows)] = rows
        self.count += len(rows)
        self.oldest = max(self.oldest, self.count - len(self.rows))
        return numbers

    def _grow(self, size: int) -> None:
        """Move the rows to a table of ``size``, where each has its place by its number."""
        assert self.rows is not None
        grown = self.rows.new_empty(size, *self.rows.shape[1:])
        numbers = torch.arange(self.oldest, self.count, device=grown.device)
        grown[numbers % size] = self.rows[numbers % max(len(self.rows), 1)]
        self.rows = grown

    def read(self, numbers: Tensor) -> Tensor:
        """The rows with these ``numbers [n]``; any row for a number that is not kept."""
        assert self.rows is not None
        return self.rows[numbers % len(self.rows)]


class StepMemories:
    """What a module remembered after each of its newest ``n_steps`` steps, by an int64 id; 0 is nothing. A
    row ``[N]`` is the memory before the running segment, ``memory_size`` numbers; the features of that
    segment, ``[segment_len − 1, n_features]``; and their number. Copies share it; another process has
    nothing."""

    def __init__(self, n_steps: int, memory_size: int, n_features: int, segment_len: int):
        self.n_steps = n_steps
        self.memory_size = memory_size
        self.n_features = n_features
        self.segment_len = segment_len
        self._clear()

    def _clear(self) -> None:
        self.process = os.getpid()
        # Another process or run must not mistake these ids for its steps.
        self.owner = 1 + random.SystemRandom().randrange(2**OWNER_BITS - 1)
        self.memories = Ring()  # [memory_size] before a segment
        self.features = Ring()  # [F] of a step
        self.links = Ring()  # int64 [3] of a step: the step before, the segment's memory, its steps so far

    def __deepcopy__(self, _: object) -> "StepMemories":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return StepMemories, (self.n_steps, self.memory_size, self.n_features, self.segment_len)

    def add(self, ids: Tensor, x: Tensor, rows: Tensor) -> Tensor:
        """The ids ``[P]`` of steps with features ``x [P, F]`` that left ``rows [P, N]`` and came after the
        steps ``ids [P]``."""
        # Tensors of inference mode couldn't be changed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            P, S = len(ids), self.segment_len
            x = x.detach().float().clone()
            rows = rows.detach().clone()
            previous = self._numbers(ids.to(rows.device))

            # A segment has one memory, which its first step finds; a step that fills it leaves the next one.
            clock = rows[:, -1].long()  # [P]
            segment_memory = torch.full_like(previous, -1)
            if self.links.count:
                known = self.links.read(previous.clamp(min=0))[:, 1]
                segment_memory = known.where(previous >= 0, -1)
            is_full = clock == 0
            if is_full.any():
                # Enough to have the memory of each step that is kept.
                size = self.n_steps // S + 2 * P
                numbers = self.memories.append(rows[is_full, : self.memory_size], size)
                segment_memory = segment_memory.masked_scatter(is_full, numbers)

            # The steps of the oldest running segments are kept for those after them.
            size = self.n_steps + S * P
            self.features.append(x, size)
            numbers = self.links.append(torch.stack((previous, segment_memory, clock), dim=1), size)
            return (self.owner << NUMBER_BITS) + numbers + 1

    def read(self, ids: Tensor) -> Tensor:
        """The rows ``[P, N]`` after the steps ``ids [P]``; zeros for nothing. Raises ValueError for steps
        that are no longer kept, and for those of another process."""
        P, S = len(ids), self.segment_len
        numbers = self._numbers(ids)  # [P], -1 for nothing
        packed = ids.new_zeros(P, self.memory_size, dtype=torch.float32)
        running = ids.new_zeros(P, S - 1, self.n_features, dtype=torch.float32)
        clock = torch.zeros_like(ids)
        if not self.links.count or not (numbers >= 0).any():
            return torch.cat((packed, running.flatten(1), clock[:, None].float()), dim=1)

        # The memory before the running segment.
        is_known = numbers >= 0
        links = self._kept(self.links, numbers)
        clock = links[:, 2].where(is_known, 0)
        segment_memory = links[:, 1].where(is_known, -1)  # -1 for the first segment of an episode
        if (segment_memory >= 0).any():
            memories = self._kept(self.memories, segment_memory)
            packed = memories.where(segment_memory[:, None] >= 0, packed)

        # The features of the running segment, back from its newest step.
        streams = torch.arange(P, device=ids.device)
        for back in range(1, int(clock.max()) + 1):
            is_within = back <= clock
            links = self._kept(self.links, numbers.where(is_within, -1))
            features = self.features.read(numbers.clamp(min=0))  # [P, F]
            running[streams[is_within], clock[is_within] - back] = features[is_within]
            numbers = links[:, 0].where(is_within, -1)
        return torch.cat((packed, running.flatten(1), clock[:, None].float()), dim=1)

    def _kept(self, ring: Ring, numbers: Tensor) -> Tensor:
        """The rows of ``ring`` with these ``numbers [P]``, any row for -1."""
        if ((numbers >= 0) & (numbers < ring.oldest)).any():
            raise UserError(
                f"the memory of a step is no longer kept, only that of the newest n_steps={self.n_steps}; "
                f"use MemoryModule(…, n_steps=…) with the number of steps in your replay buffer."
            )
        return ring.read(numbers.clamp(min=0))

    def _numbers(self, ids: Tensor) -> Tensor:
        """The numbers ``[P]`` of the steps ``ids [P]``, -1 for nothing."""
        if os.getpid() != self.process:  # a fork has copied what its parent remembers
            self._clear()
        if ids.dtype != torch.int64:
            raise UserError(
                f"expected the memories of steps as int64 ids, got {ids.dtype}; leave them as they are."
            )
        numbers = (ids & (2**NUMBER_BITS - 1)) - 1
        is_ours = (ids >> NUMBER_BITS == self.owner) & (numbers < self.links.count)
        if not (is_ours | (ids == 0)).all():
            raise UserError(
                "the memory of a step is kept by the module that acted, which is another one, or in another "
                "process; use MemoryModule(…, n_steps=None), which writes it into the tensordict."
            )
        return numbers
