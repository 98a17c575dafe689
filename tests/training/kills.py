"""``python -m tests.training.kills FOLDER KILLS``: train, kill at random moments, resume, and compare.

Each training is a fork that a SIGKILL ends after a random part of the time that an undisturbed one takes,
every other one in the next save from then on; the next goes on in the same folder, until one finishes. It
must have the weights, the optimizer and the records of the undisturbed run. Prints what happened as JSON.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch.distributed.checkpoint.hf_storage  # noqa: F401 - once, and not in each fork that resumes

from memformers.common.atomic_dir import LEFTOVER, numbered
from memformers.runs.folder import read_metrics
from memformers.tracking import relay
from memformers.training import callbacks
from memformers.training import run as run_module
from tests.builders import MODELS, small_training
from tests.training.runs import find_short_text, train_run, without_times

SEED = 0
SAVE_SECONDS = 0.02
"""About what a save takes."""
SAME = ("model.safetensors", "optimizer.safetensors", "memory.safetensors", "random.json")


def main(folder: Path, kills: int) -> None:
    """Kill ``kills`` trainings, of the three models in turn."""
    moments = random.Random(SEED)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    undisturbed, seconds, killed = {}, {}, 0
    resumed = 0
    while killed < kills:
        model = MODELS[resumed % len(MODELS)]
        if model not in undisturbed:
            start = time.monotonic()
            assert finishes(model, folder / model)
            seconds[model] = time.monotonic() - start
            undisturbed[model] = outcome(folder / model)
        run = folder / f"{resumed}-{model}"
        while killed < kills or not finishes(model, run):
            after = moments.uniform(0, seconds[model])
            in_save = moments.uniform(0, SAVE_SECONDS) if killed % 2 else None
            if finishes(model, run, after, in_save):
                break
            killed += 1
        assert outcome(run) == undisturbed[model], run
        resumed += 1
    print(json.dumps({"kills": killed, "same": resumed}))


def finishes(model: str, folder: Path, after: float | None = None, in_save: float | None = None) -> bool:
    """Whether a training in a fork, new or resumed, comes to its end before it is killed: ``after`` some
    seconds, and then ``in_save`` seconds after the beginning of the next save."""
    before = leftovers(folder)
    process = os.fork()
    if process == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        train(model, folder)
    alive = after is None or not ended_within(after)
    while in_save is not None and alive and leftovers(folder) <= before:
        alive = not ended_within(0)
    if after is not None and alive and not ended_within(in_save or 0):
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    ended_within(0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"a training ended with exit code {code}"
    return code == 0


def ended_within(seconds: float) -> bool:
    """Whether the fork ends in that time."""
    return signal.sigtimedwait({signal.SIGCHLD}, seconds) is not None


def leftovers(folder: Path) -> set[str]:
    """What is being written or deleted beside the checkpoints, or was when a process died."""
    return {path.name for path in (folder / "checkpoints").glob(f"{LEFTOVER}*")}


def train(model: str, folder: Path) -> None:
    """Train with dropout and a checkpoint at every other step; never returns."""
    try:
        # labml has nothing to do with it, and thirty of it would take longer than all the rest.
        relay.module_command = lambda *_: ["cat"]  # type: ignore[assignment]
        callbacks.SAMPLE_CHARACTERS, callbacks.GLIMPSE_CHARACTERS = 30, 10
        run_module.find_text = find_short_text  # type: ignore[attr-defined]
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        config = small_training(model=model, tokens=64 * 24, checkpoint_every=128, log_every=3)
        config = replace(config, model=replace(config.model, dropout=0.2))
        train_run(config, folder, resume=True)
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(1)


def outcome(folder: Path) -> list:
    """All that must be the same: the last checkpoint, the records, the sample."""
    newest = numbered(folder / "checkpoints")[0]
    files = [(newest / name).read_bytes() for name in SAME]
    return [*files, without_times(read_metrics(folder)), (folder / "sample.txt").read_bytes()]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
