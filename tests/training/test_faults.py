"""A run that a fault ended continues as if nothing had been, and no broken or foreign checkpoint is used."""

import errno
import os
import pickle
import re
import resource
import shutil
import signal
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load, save_file

from memformers.common import files
from memformers.common.command_line import cli_errors
from memformers.common.fields import replace_nested
from memformers.common.files import BROKEN, check_manifest, numbered, read_json, write_json
from memformers.data.streams import training_segments
from memformers.data.tokenizer import CharacterTokenizer
from memformers.runs.load import load_checkpoint as load_for_use
from memformers.training.checkpoints import (
    random_states,
    read_checkpoint,
    save_checkpoint,
)
from memformers.training.distributed import Distributed
from memformers.training.job import build_model
from memformers.training.optimizers import build_optimizers
from memformers.training.resuming import restore_newest
from memformers.training.state import TrainingState
from tests.builders import Bomb, small_training
from tests.processes import ended, finish
from tests.training.faults import CONFIG, PLACES, check_nothing_is_left, fault_at, outcome, undisturbed
from tests.training.runs import reseal, train_here, train_run

CPU = torch.device("cpu")
# A training of six steps.
CHECKPOINTED = small_training(model="compressive", batch_size=12, max_tokens=12 * 16 * 6)
LETTERS = CharacterTokenizer("".join(map(chr, range(256))))


def checkpoint_facts(**changes):
    """What a checkpoint says of itself, of no run in particular."""
    facts = {"config": {}, "environment": {}, "records": 0, "validation_loss": None}
    return facts | {"evaluated_tokens": 0, "peak_memory_bytes": 0} | changes


def limit_files(size):
    """Make the disk full for a file of more bytes than ``size``."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


# What comes, the exit code, and a word of the error.
FAULTS = {
    "SIGTERM": (lambda: signal.raise_signal(signal.SIGTERM), 143, ""),
    "SIGTERM, at once": (lambda: signal.raise_signal(signal.SIGTERM) or 1 / 0, 143, ""),
    "two of SIGINT": (lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)] and 1 / 0, 130, ""),
    "full disk": (lambda: limit_files(100), 2, "File too large"),
    "disk with 30 kB": (lambda: limit_files(30_000), 2, "File too large"),
}
# Faults that come too late to end the training.
NOT_FELT = [
    ("SIGTERM", "sample.txt"), ("SIGTERM", "result.json"), ("full disk", "result.json"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "place", "count"),
    [pytest.param(fault, *place, marks=[pytest.mark.long] * (i % 7 != first))
     for first, fault in enumerate(("SIGTERM", "full disk")) for i, place in enumerate(PLACES)]
    + [("SIGTERM, at once", "evaluation", 2), ("two of SIGINT", "step", 3), ("disk with 30 kB", "step", 3)],
)  # fmt: skip
def test_a_run_continues_after_a_fault(fault, place, count, tmp_path):
    do, code, word = FAULTS[fault]
    undisturbed()

    def train():
        with fault_at(place, count, do), cli_errors():
            train_run(CONFIG, tmp_path, resume=True)

    try:
        end = ended(train)
    finally:
        limit_files(resource.RLIM_INFINITY)
    assert end.code == (0 if (fault, place) in NOT_FELT else code), end.err
    assert "Traceback" not in end.err
    assert word in end.err or end.code == 0
    for checkpoint in check_nothing_is_left(tmp_path):
        check_manifest(checkpoint)
        assert end.code in (0, 130, 143) or str(checkpoint) in end.err.splitlines()[-1]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert outcome(train_run(CONFIG, tmp_path, resume=True)) == undisturbed()


@pytest.mark.long
@pytest.mark.parametrize("kills", [0, 60])
def test_a_killed_training_continues_as_if_nothing_had_been(kills, tmp_path):
    program = [sys.executable, "-m", "tests.training.faults", tmp_path, kills]
    # Threads of so small a model would wait for each other.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = finish(program, cwd=Path(__file__).parents[2], env=environment, timeout=900)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory):
    """A run of CHECKPOINTED with the checkpoints of steps 5 and 6."""
    folder = tmp_path_factory.mktemp("checkpointed")
    lm = build_model(CHECKPOINTED)

    def keep(state):
        state.read_pending()
        if state.step > 4:
            path = folder / "checkpoints" / f"{state.tokens:012}"
            save_checkpoint(path, lm, LETTERS, state, checkpoint_facts(config=asdict(CHECKPOINTED)))

    segments = training_segments(torch.arange(12 * 125 + 1) ** 2 % 7, 12, 16)
    train_here(lm, CHECKPOINTED, segments, at_checkpoint=keep)
    write_json(folder / "config.json", asdict(CHECKPOINTED))
    return folder


@pytest.fixture
def copy(checkpointed, tmp_path):
    """A copy of a run, to spoil."""
    return shutil.copytree(checkpointed, tmp_path / "copy", symlinks=True)


def loaded_step(folder, capsys, word=""):
    """The step at which a training would continue in ``folder``. If it isn't the newest, one line with
    ``word`` says why, and the name of what is set aside is put back."""
    lm = build_model(CHECKPOINTED)
    state = TrainingState(build_optimizers(lm, CHECKPOINTED))
    newest = numbered(folder / "checkpoints")[0]
    capsys.readouterr()
    state = restore_newest(folder, lm, state, CHECKPOINTED)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6 - state.step
    for line in lines:
        assert str(newest) in line
        assert re.search(word, line)
        assert len(line) < 1_000
    for aside in (folder / "checkpoints").glob(f"{BROKEN}*"):
        aside.rename(aside.with_name(aside.name.removeprefix(BROKEN)))
    return state.step


def test_a_damaged_checkpoint_is_skipped(copy, capsys):
    newest, older = numbered(copy / "checkpoints")
    newest_weights = load((newest / "model.safetensors").read_bytes())
    older_weights = load((older / "model.safetensors").read_bytes())
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        half = len(content) // 2
        with_other_bit = bytearray(content)
        with_other_bit[half] ^= 1
        for damaged in (bytes(with_other_bit), content[:half], None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            # Of a damaged manifest, the error may name another file.
            assert loaded_step(copy, capsys, path.name.removeprefix("manifest.json")) == 5
            model, _ = load_for_use(copy, CPU)
            assert are_equal(model, newest_weights) or are_equal(model, older_weights)
            path.write_bytes(content)
    assert loaded_step(copy, capsys) == 6


def are_equal(model, weights):
    state = model.state_dict()
    return all(torch.equal(state[name], weight) for name, weight in weights.items())


# What another training or version wrote: a file of it, its contents, and a word.
FOREIGN = [
    ("training.json", {"config": asdict(replace(CHECKPOINTED, max_tokens=9_999))}, "9,999"),
    ("config.json", asdict(replace(CHECKPOINTED.model, d_ff=17)), "another model"),
    ("config.json", {"n_heads": None}, "n_heads"),
    ("manifest.json", {"format": 2}, "format 2"),
    ("state.json", {"window": 2**70}, "window"),
]


@pytest.mark.parametrize(("name", "changes", "word"), FOREIGN)
def test_a_foreign_checkpoint_is_skipped_with_its_name(name, changes, word, copy, capsys):
    newest = numbered(copy / "checkpoints")[0]
    write_json(newest / name, read_json(newest / name) | changes)
    if name != "manifest.json":
        reseal(newest)
    assert loaded_step(copy, capsys, word) == 5


def test_a_pickle_is_never_unpickled(copy, tmp_path, capsys):
    exploded = tmp_path / "exploded"
    newest = numbered(copy / "checkpoints")[0]
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        path.write_bytes(pickle.dumps(Bomb(exploded)))
        torch.save({"weights": Bomb(exploded)}, newest / "pytorch_model.bin")
        assert loaded_step(copy, capsys) == 5
        load_for_use(copy, CPU)
        path.write_bytes(content)
    assert not exploded.exists()
    # Unsafe on purpose: these bytes were made here, and their code only makes a folder. Without this check, a
    # Bomb whose code never runs would pass the test.
    pickle.loads(pickle.dumps(Bomb(exploded)))
    assert exploded.exists()


def test_only_broken_checkpoints_are_an_error(copy):
    for folder in numbered(copy / "checkpoints"):
        for path in folder.glob("*.safetensors"):
            path.write_bytes(b"")
    paths = set(copy.rglob("*"))
    config = (copy / "config.json").read_bytes()
    with pytest.raises(ValueError, match="none can be used"):
        train_run(replace_nested(CHECKPOINTED, keep_checkpoints=3), copy, resume=True)
    with pytest.raises(ValueError, match="none can be used"):
        load_for_use(copy, CPU)
    assert paths <= set(copy.rglob("*"))
    assert (copy / "config.json").read_bytes() == config


def test_a_newer_broken_checkpoint_is_set_aside(tmp_path):
    """Else it would count as the newest for ever, and the good ones be deleted as older."""
    config = small_training(max_tokens=64 * 8, evaluations=1, checkpoint_every=64 * 2, keep_checkpoints=3)
    train_run(config, tmp_path)
    (tmp_path / "result.json").unlink()
    for broken in numbered(tmp_path / "checkpoints")[:2]:
        (broken / "model.safetensors").write_bytes(b"")
    train_run(replace_nested(config, keep_checkpoints=1), tmp_path, resume=True)
    (newest,) = numbered(tmp_path / "checkpoints")
    assert int(newest.name) == 64 * 8
    check_manifest(newest)
    aside = sorted(path.name for path in newest.parent.glob(f"{BROKEN}*"))
    assert aside == [f"{BROKEN}{64 * step:012}" for step in (6, 8)]


def test_a_read_error_ends_the_resume_with_nothing_changed(copy, monkeypatch):
    """A file system that fails for a moment, as a network's does, costs no checkpoint."""
    modified = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    monkeypatch.setattr(files, "checksum", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        train_run(CHECKPOINTED, copy, resume=True)
    assert {path: path.stat().st_mtime_ns for path in modified} == modified


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_each_rank_restores_its_random_numbers(dropout, tmp_path):
    config = small_training(model="transformer")
    lm = build_model(replace(config, model=replace(config.model, dropout=dropout)))
    state = TrainingState(build_optimizers(lm, config))
    states = [random_states()]
    torch.rand(1)
    states.append(random_states())

    class TwoRanks(Distributed):
        def all_gather(self, value):
            return states

    save_checkpoint(tmp_path / "7", lm, LETTERS, state, checkpoint_facts(), TwoRanks())
    for rank in (0, 1):
        torch.rand(1)
        read_checkpoint(tmp_path / "7", lm, state.optimizers, Distributed(rank, 2))
        assert torch.equal(random_states()["cpu"], states[rank]["cpu"])
    with pytest.raises(ValueError, match=r"2 processes.* 3;") if dropout else nullcontext():
        read_checkpoint(tmp_path / "7", lm, state.optimizers, Distributed(1, 3))
    assert torch.equal(random_states()["cpu"], states[0 if dropout == 0 else 1]["cpu"])


def test_a_checkpoint_without_random_states_is_passed_over(copy, capsys):
    newest = numbered(copy / "checkpoints")[0]
    tensors = load((newest / "optimizer.safetensors").read_bytes())
    without_random = {name: x for name, x in tensors.items() if not name.startswith("random/")}
    assert len(without_random) < len(tensors)
    save_file(without_random, newest / "optimizer.safetensors")
    reseal(newest)
    assert loaded_step(copy, capsys, "0 processes") == 5
