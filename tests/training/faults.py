"""Faults at named places of a training, and what a run must be in the end. ``python -m tests.training.faults
FOLDER KILLS`` kills forks that train at random places, and goes on until one finishes. KILLS may be 0: then
each of PLACES is met once, and once more by the training that goes on."""

import itertools
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from memformers.common.files import numbered, read_json
from memformers.data import sources
from memformers.models.language_model import MemoryLM
from memformers.runs.metrics import read_metrics
from memformers.training import monitor
from tests.builders import small_training
from tests.fixtures import short_play
from tests.training.runs import train_run, without_times

STATE_FILES = ("model.safetensors", "optimizer.safetensors", "memory.safetensors")
CONFIG = small_training(model="compressive", max_tokens=64 * 8, checkpoint_every=64 * 2, log_every=3,
                        keep_checkpoints=1)  # fmt: skip
# Checkpoints after steps 2, 4, 6 and 8, those of 4 and 8 with an evaluation.
CONFIG = replace(CONFIG, model=replace(CONFIG.model, dropout=0.2))
# Forward passes, and names of what appears in the folder, with how often it came.
PLACES = [
    ("config.json", 1), ("run.json", 1), ("step", 1), ("step", 4), ("evaluation", 1),
    ("model.safetensors", 1), ("state.json", 2), ("manifest.json", 2), ("000000000256", 1), ("best", 1),
    (".unfinished-000000000128", 1), ("manifest.json", 4), ("sample.txt", 1), ("result.json", 1),
]  # fmt: skip


@contextmanager
def fault_at(place: str, count: int, fault: Callable[[], object]) -> Iterator[None]:
    """A block in which ``fault`` comes before ``place`` does for the ``count``-th time; "" is any place."""
    arrivals = itertools.count(1)

    def watch(method: Any, place_of: Callable[..., str]) -> Any:
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            if place in ("", place_of(self, *arguments)) and next(arrivals) == count:
                fault()
            return method(self, *arguments, **options)

        return call

    def name_of_target(_: Path, target: object = "", **options: Any) -> str:
        return Path(str(target)).name

    def kind_of_pass(lm: MemoryLM, *_: Any) -> str:
        return "step" if lm.training else "evaluation"

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "replace", "mkdir", "touch"):
            patch.setattr(Path, name, watch(getattr(Path, name), name_of_target))
        patch.setattr(MemoryLM, "forward", watch(MemoryLM.forward, kind_of_pass))
        yield


def check_nothing_is_left(folder: Path) -> list[Path]:
    """The checkpoints of a run, beside which there is nothing but the link to the best one."""
    checkpoints = numbered(folder / "checkpoints")
    expected = {"best", *(path.name for path in checkpoints)}
    assert {path.name for path in folder.glob("checkpoints/*")} <= expected
    assert not list(folder.glob("checkpoints/.*"))
    return checkpoints


def outcome(folder: Path) -> list[Any]:
    """All that must be the same: the last checkpoint, records, result, sample; and nothing is left over."""
    newest = check_nothing_is_left(folder)[0]
    files = [(newest / name).read_bytes() for name in STATE_FILES]
    records = without_times([*read_metrics(folder), read_json(folder / "result.json")])
    return [*files, records, (folder / "sample.txt").read_bytes()]


@cache
def undisturbed() -> list[Any]:
    """What a training that nothing stops comes to."""
    with TemporaryDirectory() as folder:
        return outcome(train_run(CONFIG, Path(folder) / "run"))


def finishes(folder: Path, place: str = "", count: int = 0) -> bool:
    """Whether a training in a fork, new or resumed, comes to its end before it is killed at this place."""
    process = os.fork()
    if process == 0:
        try:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            with fault_at(place, count, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                train_run(CONFIG, folder, resume=True)
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"a training ended with exit code {code}"
    return code == 0


def main(folder: Path, kills: int) -> None:
    """Kill, resume, and compare with the undisturbed run."""
    os.environ["MEMFORMERS_DASHBOARD"] = "off"
    monitor.SAMPLE_CHARACTERS = 30
    monitor.SHORT_SAMPLE_CHARACTERS = 10
    sources.builtin_play = short_play
    undisturbed()
    counts = random.Random(0)
    random_places = [[("", counts.randint(1, 99)) for _ in range(3)] for _ in range(kills // 3)]
    for i, places in enumerate(random_places or [[place, place] for place in PLACES]):
        run = folder / str(i)
        assert not finishes(run, *places[0]), f"it was not killed at {places[0]}"
        assert any(finishes(run, *place) for place in places[1:]) or finishes(run)
        assert outcome(run) == undisturbed(), places


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
