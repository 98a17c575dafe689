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

Result = dict[str, Any]  # the measurements in results.json, or a part of them


class Spread(NamedTuple):
    median: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        return "{:{f}} ({:{f}} – {:{f}})".format(*self, f=form or ".2f")


def spread(values: Sequence[float], scale: float = 1.0) -> Spread:
    values = [scale * value for value in values]
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return Spread(median(values), low, high)


def times_as_fast(seconds: Sequence[float], reference: Sequence[float]) -> Spread:
    """The speed of something with these ``seconds`` as a multiple of the reference's, by rounds."""
    return spread([b / a for a, b in zip(seconds, reference, strict=True)])


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


def in_turns(
    sides: Mapping[str, Callable[[], object]], rounds: int, title: str = "", *,
    between: Callable[[], object] = lambda: None, clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of every side in every round, one step each in turn, with ``between`` after each."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in tqdm(range(rounds), desc=title, leave=False, disable=not title):
        for name in sides:
            start = clock()
            sides[name]()
            seconds[name].append(clock() - start)
            between()
    return seconds


def beside_products(sides: Mapping[str, Callable[[], object]], rounds: int, title: str) -> Result:
    """Seconds of every side, and the highest rate of ``torch.mm`` between: matrices are in caches."""
    size, rates = 1024, list[float]()
    a, b, out = (torch.randn(size, size) for _ in range(3))

    def multiply() -> None:
        [seconds] = timed(lambda: torch.mm(a, b, out=out), 1)
        rates.append(2 * size**3 / seconds)

    return {"seconds": in_turns(sides, rounds, title, between=multiply), "torch.mm, FLOP/s": rates}


def relative_error(came: Tensor, expected: Tensor) -> float:
    came, expected = came.detach().double(), expected.detach().double()
    return ((came - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def check_errors(errors: Mapping[str, float], tolerance: float, what: str) -> float:
    """The largest of the ``errors``; ValueError above the tolerance."""
    where = max(errors, key=errors.__getitem__)
    if not errors[where] <= tolerance:
        raise ValueError(f"{what} differs by {errors[where]:.1e} in the {where}.")
    return errors[where]


def memory_above(compute: Callable[[], object]) -> int | None:
    """The most bytes that ``compute`` needs besides what the process holds before, on Linux; else None."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    compute()
    peak = peak_memory(torch.device("cpu"))
    return None if peak is None else peak - int(lines["VmRSS"].split()[0]) * 1024


def in_child(function: Callable[..., int | None], *arguments: str | int) -> int | None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
