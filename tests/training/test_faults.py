"""Whatever ends a training (a signal, a kill, a full disk, a number that is none), it goes on unharmed."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memformers.common.atomic_dir import check_manifest, numbered
from memformers.common.command_line import plain_errors
from memformers.common.files import read_json
from memformers.evaluation.evaluate import Evaluation
from memformers.runs.folder import read_metrics
from memformers.training import run as run_module
from memformers.training.callbacks import Callbacks
from memformers.training.data_module import Validation
from memformers.training.loop import train_steps
from memformers.training.run import build_model
from tests.builders import MODELS, SMALL_RUN, small_training
from tests.processes import finish, program, start, wait_for
from tests.training.runs import poisoned, segments_of, tensors_of, train_here, train_run, without_times


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.long)])
def test_a_training_killed_at_random_moments_ends_with_the_weights_of_the_undisturbed_one(kills, tmp_path):
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # threads of so small a model would wait for each other
    command = [sys.executable, "-m", "tests.training.kills", tmp_path, kills]
    result = finish(command, cwd=Path(__file__).parents[2], env=alone, timeout=900)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["kills"] >= kills


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_a_signal_ends_the_command_with_a_checkpoint_and_the_conventional_code(number, code, tmp_path):
    command = program("train", "--out", tmp_path, *SMALL_RUN, "--tokens", 10_000_000)
    process = start(command, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: read_metrics(tmp_path))
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code
    assert "Traceback" not in errors
    assert f"stopped by {number.name} at token" in errors
    (checkpoint,) = numbered(tmp_path / "checkpoints")
    check_manifest(checkpoint)
    assert read_json(checkpoint / "training.json")["records"] == len(read_metrics(tmp_path))
    log = next((tmp_path / "labml").glob("*/*/run_log.jsonl")).read_text()
    assert json.loads(log)["status"] == "crashed"


def test_a_signal_in_an_evaluation_ends_it_at_once_and_it_is_made_again(tmp_path, monkeypatch):
    config = small_training(log_every=4)
    whole = train_run(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Callbacks, "_evaluation", lambda *_, **__: signal.raise_signal(signal.SIGTERM) or 1 / 0)
        with pytest.raises(SystemExit) as end:
            train_run(config, tmp_path / "run")
    assert end.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert numbered(tmp_path / "run" / "checkpoints")[0].name == f"{1024:012}"
    folder = train_run(config, tmp_path / "run", resume=True)
    assert without_times(read_metrics(folder)) == without_times(read_metrics(whole))


def test_a_second_ctrl_c_does_not_wait_for_the_step(tmp_path, monkeypatch):
    config = small_training()

    def impatient(model, *_, **__):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the step went on")

    monkeypatch.setattr(run_module.MemoryLM, "forward", impatient)
    with pytest.raises(KeyboardInterrupt):
        train_run(config, tmp_path)
    assert not numbered(tmp_path / "checkpoints")


@pytest.fixture
def small_files():
    """Sets how large a file may become, in bytes; the limit ends with the test."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [100, 5_000, 30_000])  # of config.json, the weights, the optimizer
def test_a_disk_that_is_full_is_one_line_and_the_earlier_checkpoint_is_whole(
    size, small_files, tmp_path, monkeypatch, capsys
):
    config = small_training()
    save = Callbacks.save

    def fill(self, state):
        if numbered(self.folder / "checkpoints"):
            small_files(size)
        try:
            save(self, state)
        finally:
            small_files(resource.RLIM_INFINITY)

    with monkeypatch.context() as patch:
        patch.setattr(Callbacks, "save", fill)
        with pytest.raises(SystemExit) as end, plain_errors():
            train_run(config, tmp_path / "run")
    assert end.value.code == 2
    (checkpoint,) = numbered(tmp_path / "run" / "checkpoints")
    check_manifest(checkpoint)
    assert not list(checkpoint.parent.glob(".*"))
    error = capsys.readouterr().err.splitlines()[-1]
    assert "can't be written: " in error
    assert "File too large" in error
    assert f"The checkpoint of token 1,024 is kept: {checkpoint}" in error
    assert read_json(train_run(config, tmp_path / "run", resume=True) / "result.json")["step"] == 32


def test_a_disk_too_full_for_a_record_is_one_line_too(tmp_path, monkeypatch, capsys):
    record = Callbacks.record

    def fill(self, state, metrics):
        if state.step > 20:
            self.write.__self__._file = open("/dev/full", "w")  # noqa: SIM115
        record(self, state, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(Callbacks, "record", fill)
        with pytest.raises(SystemExit), plain_errors():
            train_run(small_training(), tmp_path)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "No space left on device. The checkpoint of token 1,024 is kept" in error
    assert train_run(small_training(), tmp_path, resume=True)


@pytest.mark.parametrize("place", ["", "checkpoints"])
def test_a_folder_that_cannot_be_written_is_one_line(place, tmp_path, capsys):
    blocked = tmp_path / "run" / place
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("a file, where a folder is needed")
    with pytest.raises(SystemExit) as end, plain_errors():
        train_run(small_training(), tmp_path / "run")
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_only_the_newest_and_the_best_checkpoints_are_kept(tmp_path, monkeypatch):
    losses = iter([3.0, 1.0, 2.0, 2.5])
    read = Validation.evaluate

    def changed(*arguments):
        found = read(*arguments)
        found.__class__ = type("Fixed", (Evaluation,), {"loss": next(losses)})
        return found

    monkeypatch.setattr(Validation, "evaluate", changed)
    config = small_training(tokens=64 * 32, evaluations=4, checkpoint_every=64 * 3, keep_checkpoints=3)
    folder = train_run(config, tmp_path) / "checkpoints"
    assert [int(path.name) // 64 for path in numbered(folder)] == [32, 30, 27, 16]
    assert (folder / "best").resolve() == folder / f"{64 * 16:012}"
    assert read_json(folder / "best" / "training.json")["validation_loss"] == 1.0


@pytest.mark.parametrize("model", MODELS)
def test_a_skipped_step_changes_neither_weights_nor_memory(model):
    config = small_training(model=model, tokens=64 * 6, log_every=1, skip_bad_steps=1)
    seen = []

    def look(state):
        kept = [*state.memory.mem, *state.memory.c_mem]
        assert all(tensor.isfinite().all() for tensor in kept)
        seen.append((tensors_of(lm), kept, state.skipped))

    records = []
    hooks = {"record": lambda state, _: records.append(state.step), "evaluate": lambda _: None}
    lm = poisoned(build_model(config), "head", {3})
    with pytest.warns(
        RuntimeWarning, match=r"the loss is nan at token 192 \(step 3\); .* skipped \(1 of 1\)"
    ):
        end = train_steps(lm, segments_of(config), config, **hooks, maybe_checkpoint=look)
    before, after = seen[3], seen[4]
    assert (before[2], after[2], end.step) == (0, 1, 6)
    assert all(torch.equal(tensor, after[0][name]) for name, tensor in before[0].items())
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    assert not all(torch.equal(tensor, seen[5][0][name]) for name, tensor in before[0].items())
    assert records == [1, 2, 3, 5, 6]


def test_a_poisoned_memory_is_left_out_with_its_segment():
    config = small_training(tokens=64 * 6, skip_bad_steps=1)
    lm = poisoned(build_model(config), "embed", {2})
    with pytest.warns(RuntimeWarning, match="step is skipped"):
        train_here(lm, config)  # the next step would be bad, and one too many
    assert all(p.isfinite().all() for p in lm.parameters())
