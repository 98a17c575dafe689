"""How everything here is measured."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from memformers.common.machine import peak_memory

Result = dict[str, Any]
"""The measurements in results.json, or a part of them."""


class Spread(NamedTuple):
    """A median with quartiles."""

    median: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        form = form or ".2f"
        return f"{self.median:{form}} ({self.low:{form}} – {self.high:{form}})"


def spread(values: Sequence[float], scale: float = 1.0) -> Spread:
    scaled = [scale * value for value in values]
    if len(scaled) == 1:
        return Spread(scaled[0], scaled[0], scaled[0])
    low, _, high = quantiles(scaled, n=4, method="inclusive")
    return Spread(median(scaled), low, high)


def times_as_fast(seconds: Sequence[float], reference: Sequence[float]) -> Spread:
    """The speed of something with these ``seconds`` as a multiple of the reference's, by rounds."""
    ratios = [b / a for a, b in zip(seconds, reference, strict=True)]
    return spread(ratios)


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Seconds of each of so many ``times``, after one call that isn't counted."""
    call()
    return in_turns({"": call}, times)[""]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch use one thread, whose CPU time says what it computed on a busy machine too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def no_work() -> None:
    pass


def in_turns(
    sides: Mapping[str, Callable[[], object]],
    rounds: int,
    title: str = "",
    *,
    between: Callable[[], object] = no_work,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every side in every round, one step each in turn, with ``between`` after each."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in tqdm(range(rounds), desc=title, leave=False, disable=not title):
        for name, step in sides.items():
            start = clock()
            step()
            seconds[name].append(clock() - start)
            between()
    return seconds


def beside_products(sides: Mapping[str, Callable[[], object]], rounds: int, title: str) -> Result:
    """Seconds of every side, and the highest rate of ``torch.mm`` between: matrices are in caches."""
    # Small enough for caches, and large enough to keep all cores busy.
    size = 1024
    a, b, product = (torch.randn(size, size) for _ in range(3))
    rates: list[float] = []

    def multiply() -> None:
        [seconds] = timed(lambda: torch.mm(a, b, out=product), 1)
        rates.append(2 * size**3 / seconds)

    return {"seconds": in_turns(sides, rounds, title, between=multiply), "torch.mm, FLOP/s": rates}


def relative_error(result: Tensor, expected: Tensor) -> float:
    """The relative RMS error, in float64."""
    result = result.detach().double()
    expected = expected.detach().double()
    return ((result - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def check_errors(errors: Mapping[str, float], tolerance: float, subject: str) -> float:
    """The largest of the ``errors``; ValueError above the tolerance."""
    largest = max(errors, key=errors.__getitem__)
    # A NaN is above, too.
    if not errors[largest] <= tolerance:
        raise ValueError(f"{subject} differs by {errors[largest]:.1e} in the {largest}.")
    return errors[largest]


def memory_above(compute: Callable[[], object]) -> int | None:
    """The most bytes that ``compute`` needs besides what the process holds before, on Linux; else None."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    # A line is such as "VmRSS:   51200 kB".
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    kibibytes, *_ = lines["VmRSS"].split()
    held_before = int(kibibytes) * 1024
    compute()
    peak = peak_memory(torch.device("cpu"))
    return None if peak is None else peak - held_before


def in_child(function: Callable[..., int | None], *arguments: str | int) -> int | None:
    """What ``function`` returns in another process, whose memory holds nothing else."""
    # Not forked, since a fork holds its parent's memory.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
