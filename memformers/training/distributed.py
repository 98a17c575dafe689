"""The processes that train one model together, as torchrun starts them.

Each process (a rank) has streams of its own, and their memory. After each backward pass the gradients are
averaged, so all ranks take the same step, and the training is that of one process on all the streams. With
DDP every rank holds the whole model; with FSDP each holds a part of every weight and of the optimizer's
state. Memory is never a part of the model, so it is neither shared nor broadcast.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.common.fields import changed
from memformers.common.machine import multiplies_bfloat16_faster
from memformers.common.text_format import printable
from memformers.models.language_model import MemoryLM
from memformers.training.config import Parallel, TrainConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


class Distributed:
    """The processes of a training, seen from one of them; with a single process, its methods do nothing."""

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, parallel: Parallel = "single"):
        self.rank, self.size, self.local_rank, self.parallel = rank, size, local_rank, parallel
        self.first = rank == 0
        """Whether this is the rank that writes files and prints."""
        self.mesh: DeviceMesh | None = None
        """The processes as PyTorch has them, if there are several, from [`place`][Distributed.place] on."""

    def device_name(self, name: str) -> str:
        """The device for this process where ``name`` was asked for: a GPU each."""
        gpus = torch.cuda.is_available() and name in ("auto", "cuda")
        return f"cuda:{self.local_rank}" if self.size > 1 and gpus else name

    def say(self, message: str) -> None:
        """Print a line, on the first rank."""
        if self.first:
            print(printable(message))

    def place(self, model: MemoryLM, device: torch.device) -> None:
        """Bring ``model`` to this rank's ``device``, before an optimizer is built. With FSDP2 each rank keeps
        a part of every weight. They are whole from the forward pass to the end of the backward pass, since
        the reconstruction loss reads those of every layer once more."""
        model.to(device)
        if self.parallel == "single":
            return
        from torch.distributed.device_mesh import init_device_mesh  # not above: both take most of a second

        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        if self.parallel == "fsdp":
            from torch.distributed.fsdp import fully_shard

            # It warns that outputs are views; nothing here writes into one.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            # Compression functions are called by themselves.
            for module in (*model.transformer.compressions, *model.transformer.layers, model):
                fully_shard(module, mesh=self.mesh, reshard_after_forward=False)

    def own(self, streams: Tensor) -> Tensor:
        """This rank's part of ``streams [·, B, …]``."""
        return streams.chunk(self.size, dim=1)[self.rank]

    def of_all(self, own: Tensor) -> Tensor:
        """The tensor of all streams, ``[·, B, D]`` or ``[B]``, of which each rank holds its ``own``."""
        if self.mesh is None:
            return own
        from torch.distributed.tensor import DTensor, Shard

        streams = Shard(min(own.dim() - 1, 1))
        return DTensor.from_local(own.contiguous(), self.mesh, [streams], run_check=False)

    def means(self, numbers: Tensor) -> Tensor:
        """The mean of each of ``numbers``, of any shape, over the ranks."""
        if self.size == 1:
            return numbers
        total = numbers.clone()
        dist.all_reduce(total)
        return total / self.size

    def highest(self, number: int) -> int:
        """The highest of the ranks' numbers."""
        if self.size == 1:
            return number
        highest = torch.tensor(number)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        return int(highest)

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, in order."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def check_alike(self, value: object, message: str) -> None:
        """Raise ValueError with ``message`` on all ranks unless all have the same ``value``."""
        if any(other != value for other in self.all_gather(value)):
            raise UserError(message)

    def first_alone(self, do: Callable[[], object]) -> None:
        """``do`` on the first rank, while the others wait."""
        if self.first:
            do()
        self.barrier()

    def rank_zero_first(self, make: Callable[[], T]) -> T:
        """What ``make`` gives, which runs on the first rank before the others: they find what it left. They
        wait for as long as it takes, and not for the half an hour after which gloo gives up."""
        others = dist.new_group(backend="gloo", timeout=timedelta(days=2)) if self.size > 1 else None
        made = make() if self.first else None
        if others:
            dist.barrier(others)
        return make() if made is None else made

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.highest(0)


SINGLE_PROCESS = Distributed()
"""A training in a single process."""


@contextmanager
def joined(config: TrainConfig) -> Iterator[Distributed]:
    """A block in which the processes that torchrun started, if it did, train together as ``config`` says.

    Raises ValueError if ``parallel`` or ``device`` doesn't fit the way in which the program was
    started, and for a batch that can't be shared equally; OSError where another process has ended.
    """
    size, local_rank = (int(os.environ.get(*given)) for given in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    parts, gpus = (
        size * config.step.accumulate,
        torch.cuda.device_count() if config.step.device != "cpu" else 0,
    )
    if config.step.parallel == "single":
        if size > 1:
            raise UserError(f"torchrun started {size} processes, but parallel='single'; use 'ddp' or 'fsdp'.")
        yield SINGLE_PROCESS
        return
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        how = "torchrun --nproc-per-node 2 -m memformers train …"
        raise UserError(f"parallel={config.step.parallel!r} needs processes; start them with {how}")
    if config.batch_size % parts:
        how = f"{size} processes in accumulate={config.step.accumulate} parts; use a multiple of {parts}."
        raise UserError(f"batch_size={config.batch_size} streams can't be shared equally by {how}")
    if gpus and config.step.device not in ("auto", "cuda"):
        raise UserError(
            f"device={config.step.device!r} is one device; use cuda, which gives each process its own."
        )
    if 0 < gpus <= local_rank:
        raise UserError(f"there are more processes than GPUs ({gpus}); start {gpus}, or use device='cpu'.")
    if gpus:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    try:
        yield Distributed(int(os.environ["RANK"]), size, local_rank, config.step.parallel)
    except RuntimeError as error:
        of_another_rank = ("gloo", "Connection closed by peer", "Connection reset by peer")
        if size > 1 and (isinstance(error, dist.DistError) or any(x in str(error) for x in of_another_rank)):
            raise OSError(
                f"another process of this training has ended, so rank {os.environ['RANK']} can't continue; "
                f"the messages of that process say why. ({str(error).splitlines()[0]})"
            ) from None
        raise
    finally:
        dist.destroy_process_group()


def end_rank() -> None:
    """End this process with exit code 0, if torchrun started it: to be called where all is done.

    PyTorch 2.13 holds gloo's threads in caches until Python ends; Python's own end now and then aborted a
    process with such threads ("terminate called without an active exception"), so it is passed over.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@contextmanager
def summon_full_params(model: nn.Module) -> Iterator[None]:
    """A block in which every rank has all of the weights, to be read; all must enter it."""
    shards = [module for module in model.modules() if is_sharded(module)]
    for module in shards:
        module.unshard()
    try:
        yield
    finally:
        for module in shards:
            module.reshard()


def is_sharded(module: nn.Module) -> "TypeGuard[FSDPModule]":
    """Whether each rank holds a part of this module's weights."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # None: nobody has sharded, and importing it takes long
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_part(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether each rank holds a part of this tensor, of any shape."""
    parts = sys.modules.get("torch.distributed.tensor")  # None: as above
    return parts is not None and isinstance(tensor, parts.DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """A weight or a moment of any shape, whole; if each rank holds a part, all ranks must call this."""
    return tensor.full_tensor() if is_part(tensor) else tensor


def subtract_rows(parameter: Tensor, whole: Tensor, times: float) -> None:
    """Subtract ``times · whole [rows, …]`` from the rows that this rank holds of ``parameter [rows, …]``."""
    if is_part(parameter):
        # As torch.chunk cuts, with fewer parts than ranks where rows are few, FSDP2 has cut the weight.
        first = sum(map(len, whole.chunk(dist.get_world_size())[: dist.get_rank()]))
        parameter = parameter.to_local()
        whole = whole[first : first + len(parameter)]
    parameter.sub_(whole, alpha=times)


def with_precision(
    config: TrainConfig, device: torch.device, ranks: Distributed = SINGLE_PROCESS
) -> TrainConfig:
    """``config`` with bfloat16 in place of ``precision="auto"`` if ``device`` multiplies it faster, else
    float32; the first of several ``ranks`` decides."""
    if config.step.precision != "auto":
        return config
    faster = ranks.all_gather(multiplies_bfloat16_faster(device))[0]
    return changed(config, precision="bfloat16" if faster else "float32")
