"""The processes that train one model together, as torchrun starts them.

Each process (a rank) holds the whole model, and reads its part of the streams with their memory. After each
backward pass DistributedDataParallel averages the gradients, so all ranks take the same step, and the
training is that of one process on all the streams. Memory is no part of the model, so it is never broadcast.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from memformers.common.console import printable
from memformers.common.errors import UserError
from memformers.common.fields import replace_nested
from memformers.common.machine import multiplies_bfloat16_faster
from memformers.data.streams import Segment
from memformers.training.config import Parallel, TrainConfig

T = TypeVar("T")
PREPARING_TIMEOUT = timedelta(days=2)
"""How long ranks wait for the first one to prepare a text; gloo's own limit is half an hour."""
ENDED_RANK_MESSAGES = ("gloo", "Connection closed by peer", "Connection reset by peer")
"""What PyTorch's errors say when another rank has ended."""


class Distributed:
    """The processes of a training, seen from one of them. With one process, no method communicates."""

    def __init__(self, rank: int = 0, size: int = 1, parallel: Parallel = "single"):
        self.rank = rank
        self.size = size
        self.parallel = parallel
        self.first = rank == 0
        """Whether this is the rank that writes files and prints."""

    def say(self, message: str) -> None:
        if self.first:
            print(printable(message))

    def shard(self, segment: Segment) -> Segment:
        """This rank's streams of a ``segment``."""
        if self.size == 1:
            return segment
        return segment.map(self.local_streams)

    def local_streams(self, streams: Tensor) -> Tensor:
        return streams.chunk(self.size, dim=1)[self.rank]

    def all_streams(self, local: Tensor) -> Tensor:
        """All streams, ``[·, B, D]`` or ``[B]``, of which each rank has its ``local`` part."""
        if self.size == 1:
            return local
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts, dim=min(local.dim() - 1, 1))

    def means(self, numbers: Tensor) -> Tensor:
        """The mean of each number over all ranks."""
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers / self.size

    def highest(self, number: int) -> int:
        """The highest ``number`` of any rank; all ranks must ask."""
        if self.size == 1:
            return number
        highest = torch.tensor(number)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        return int(highest)

    def all_gather(self, value: T) -> list[T]:
        """The ``value`` of each rank, in order."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def check_alike(self, value: object, message: str) -> None:
        """Raise UserError on all ranks unless all have the same ``value``."""
        if any(rank_value != value for rank_value in self.all_gather(value)):
            raise UserError(message)

    @contextmanager
    def rank_zero_first(self) -> Iterator[None]:
        """A block that the first rank leaves before the others enter it, so that they can use the files it
        has written. It may prepare a large text for hours, longer than gloo would let the others wait."""
        if self.size == 1:
            yield
            return
        self.barrier()  # which fails if a rank has ended; new_group would wait for it
        patient = dist.new_group(backend="gloo", timeout=PREPARING_TIMEOUT)
        if not self.first:
            dist.barrier(patient)
        yield
        if self.first:
            dist.barrier(patient)

    def barrier(self) -> None:
        """Wait until all ranks call this."""
        self.highest(0)


SINGLE_PROCESS = Distributed()


@contextmanager
def process_group(config: TrainConfig) -> Iterator[Distributed]:
    """A block in which the processes that torchrun started train together; OSError if another has ended."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if config.step.parallel == "single":
        if size > 1:
            raise UserError(f"torchrun started {size} processes, but parallel='single'; use 'ddp'.")
        yield SINGLE_PROCESS
        return

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))  # among those on its machine
    n_gpus = 0 if config.step.device == "cpu" else torch.cuda.device_count()
    check_processes(config, size, local_rank, n_gpus)
    rank = int(os.environ["RANK"])
    if n_gpus:
        torch.cuda.set_device(local_rank)  # which auto and cuda then mean in this process
    dist.init_process_group("cpu:gloo,cuda:nccl" if n_gpus else "gloo")
    try:
        yield Distributed(rank, size, config.step.parallel)
    except RuntimeError as error:
        is_ended_rank = isinstance(error, dist.DistError) or any(x in str(error) for x in ENDED_RANK_MESSAGES)
        if size > 1 and is_ended_rank:
            raise OSError(
                f"another process of this training has ended, so rank {rank} can't continue; "
                f"the messages of that process say why. ({str(error).splitlines()[0]})"
            ) from None
        raise
    finally:
        dist.destroy_process_group()


def check_processes(config: TrainConfig, size: int, local_rank: int, n_gpus: int) -> None:
    """Raise UserError unless ``size`` processes can train as ``config`` says, this one on its GPU."""
    device = config.step.device
    n_parts = size * config.step.gradient_accumulation_steps
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        command = "torchrun --nproc-per-node 2 -m memformers train …"
        raise UserError(f"parallel='ddp' needs processes; start them with {command}")
    if config.batch_size % n_parts:
        raise UserError(
            f"batch_size={config.batch_size} streams can't be shared equally by {size} processes in "
            f"gradient_accumulation_steps={config.step.gradient_accumulation_steps} parts; use a multiple "
            f"of {n_parts}."
        )
    if n_gpus and device not in ("auto", "cuda"):
        raise UserError(f"device={device!r} is one device; use cuda, which gives each process its own.")
    if 0 < n_gpus <= local_rank:
        raise UserError(
            f"there are more processes than GPUs ({n_gpus}); start {n_gpus}, or use device='cpu'."
        )


def end_rank() -> None:
    """End a process of torchrun's with exit code 0. In PyTorch 2.13, gloo's threads live until the
    interpreter shuts down, which sometimes aborts."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def with_precision(
    config: TrainConfig, device: torch.device, ranks: Distributed = SINGLE_PROCESS
) -> TrainConfig:
    """``config`` with a precision in place of "auto"; the first of several ``ranks`` decides."""
    if config.step.precision != "auto":
        return config
    faster = ranks.all_gather(multiplies_bfloat16_faster(device))[0]
    return replace_nested(config, precision="bfloat16" if faster else "float32")
