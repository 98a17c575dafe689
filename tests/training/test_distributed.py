"""Several processes against one: the same losses and weights, and how they end."""

import json
import os
import signal
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memformers import AdaptiveConfig
from memformers.common.fields import replace_nested
from memformers.common.files import UNFINISHED
from memformers.common.processes import Stopped, StopSignals
from memformers.runs.metrics import read_metrics
from memformers.training.distributed import Distributed
from memformers.training.resuming import restore_newest
from memformers.training.state import TrainingState
from tests.builders import small_training
from tests.processes import run, wait_for
from tests.training.ranks_program import train_in_double
from tests.training.runs import launch, train_run, without_times

TEXT = "".join(chr(97 + i * i % 23) for i in range(30_000))
LONG = pytest.mark.long
# Sixteen steps; the first compresses nothing, since the memory has still room. In float32, so that other
# numbers of processes agree on any machine.
ARGUMENTS = [
    "--model", "compressive", "--max-tokens", "2048", "--batch-size", "8", "--evaluations", "2",
    "--log-every", "4", "--d-model", "16", "--n-heads", "2", "--d-ff", "16", "--n-layers", "2",
    "--segment-len", "16",
    "--mem-len", "24", "--c-mem-len", "8", "--precision", "float32", "--checkpoint-every", "640",
    "--final-tokens", "500", "--dashboard", "off",
]  # fmt: skip


def start(folder: Path, *arguments: object, processes: int = 1) -> "subprocess.Popen[str]":
    parallel = "ddp" if processes > 1 else "single"
    options = (*ARGUMENTS, "--out", folder, "--parallel", parallel, *arguments)
    return launch("memformers", "train", *options, processes=processes)


def worker(torchrun: int, rank: int) -> int:
    """The process of a rank, of a torchrun whose process is given, on Linux."""
    for task in Path(f"/proc/{torchrun}/task").glob("*/children"):
        for pid in task.read_text().split():
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return int(pid)
    raise LookupError(f"torchrun has no process of rank {rank}")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    (path.parent / "documents").mkdir()
    for i in range(0, len(TEXT), 300):
        (path.parent / "documents" / f"{i:05}.txt").write_text(TEXT[i : i + 300])
    return path


def case(model, shared, network, **changes):
    """A training of eight steps with these settings of its network, by one process; and by two, as they share
    it."""
    config = small_training(
        model=model, **{"batch_size": 4, "max_tokens": 4 * 16 * 8, "log_every": 1, **changes}
    )
    config = replace(config, model=replace(config.model, **network))
    return config, replace_nested(config, parallel="ddp", **shared)


HALVES = {"gradient_accumulation_steps": 2}
IN_PARTS = HALVES | {"activation_checkpointing": True}
SLOTS = {"bptt": 2, "compression_rate": 4, "c_mem_len": 8}
# A slot is made every other segment, so that some steps leave the compressions idle.
IDLE = {"compression_rate": 32, "mem_len": 32}
# With targets of a cluster on none or one of the ranks.
CLUSTERS = [{"embedding": "adaptive", "adaptive": AdaptiveConfig((1, 3, 4, 100), 2, 16, tied, tied)}
            for tied in (False, True)]  # fmt: skip
CASES = [
    case("transformer-xl", {}, {}),
    case("compressive", IN_PARTS, {}),
    *(case("transformer-xl", IN_PARTS, clusters) for clusters in CLUSTERS),
    case("compressive", HALVES, SLOTS | {"compression_loss": "none"}),
    case("compressive", HALVES, IDLE),
    # Each rank has other predictions.
    case("transformer-xl", HALVES, {}, max_tokens=4 * 16 * 20, document_separator="any"),
]


@pytest.fixture(scope="module")
def ranks_of_cases(tmp_path_factory):
    """What each of two ranks has in the end, of all cases, in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    configs = json.dumps([asdict(shared) for _, shared in CASES])
    process = launch("tests.training.ranks_program", folder, configs, processes=1)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return folder


@pytest.mark.parametrize("number", range(len(CASES)))
def test_two_ranks_train_like_one_process(number, ranks_of_cases, tmp_path):
    """In float64: in float32, Adam turns the rounding errors of gradients that should be 0 into steps."""
    train_in_double(tmp_path / "one", CASES[number][0], Distributed())
    one = load_file(tmp_path / "one")
    ranks = [load_file(ranks_of_cases / f"{number}.{rank}") for rank in range(2)]
    assert one.keys() == ranks[0].keys() == ranks[1].keys()
    for name, tensor in one.items():
        torch.testing.assert_close(ranks[0][name], tensor, rtol=0, atol=1e-10)
        assert torch.equal(ranks[0][name], ranks[1][name])


@pytest.mark.parametrize(
    ("before", "after", "data", "number"),
    [(2, 1, "text.txt", signal.SIGTERM),
     pytest.param(1, 2, "text.txt", signal.SIGTERM, marks=LONG),
     pytest.param(2, 2, "documents", signal.SIGKILL, marks=LONG)],
)  # fmt: skip
def test_a_signal_to_any_rank_ends_all(before, after, data, number, text, tmp_path):
    """SIGKILL comes while the first process saves."""
    source = ("--data", text.with_name(data))
    # The auxiliary loss of documents depends on how many streams each process has.
    if data == "documents":
        assert start(tmp_path / "alone", *source, processes=before).wait(120) == 0
    else:
        assert run("train", *ARGUMENTS, *source, "--out", tmp_path / "alone").code == 0
    folder = tmp_path / "run"
    first = start(folder, *source, processes=before)
    wait_for(lambda: (folder / "checkpoints" / "000000000640").exists())
    if number == signal.SIGKILL:
        wait_for(lambda: list(folder.glob(f"checkpoints/{UNFINISHED}*/*")))
    os.kill(worker(first.pid, rank=1) if before > 1 else first.pid, number)
    output, _ = first.communicate(timeout=120)
    assert first.returncode != 0
    assert ("stopped by SIGTERM at token" in output) == (number == signal.SIGTERM)
    if after == 1:
        resumed = ("--resume", "--out", folder, "--parallel", "single")
        output = run("train", *ARGUMENTS, *source, *resumed).out
    else:
        output, _ = start(folder, *source, "--resume", processes=after).communicate()
    assert "continues at token" in output
    records = zip(*(without_times(read_metrics(run)) for run in (tmp_path / "alone", folder)), strict=True)
    for a, b in records:
        for name in a:  # of near ties, rounding may choose the other
            tolerance = 0.01 if name.startswith("accuracy") else 2e-6
            assert b[name] == pytest.approx(a[name], abs=tolerance, rel=tolerance)


def test_ranks_stop_at_the_same_step():
    """Else the one rank would stop, and the others wait for it for ever."""

    class SignalledWhileTheyVote(Distributed):
        def highest(self, number):
            signal.raise_signal(signal.SIGTERM)
            return number

    ranks = SignalledWhileTheyVote(rank=1, size=2)
    with StopSignals(alone=False) as signals, signals.at_once():
        signals.check(ranks.highest)
        with pytest.raises(Stopped, match="SIGTERM"):
            signals.check(ranks.highest)


def test_what_one_rank_alone_has_otherwise_is_an_error_on_all(tmp_path):
    class Two(Distributed):
        def all_gather(self, value):
            return [value, "another"]

        def highest(self, number):
            return number

    with pytest.raises(ValueError, match="texts differ"):
        Two(0, 2).check_alike("one", "texts differ")
    with pytest.raises(ValueError, match="different ones"):
        restore_newest(tmp_path, None, TrainingState(()), None, Two(1, 2))
    Distributed().check_alike("one", "texts differ")


@LONG
def test_a_rank_whose_other_has_gone_says_so_in_one_line(text, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}")
    process = start(tmp_path, "--data", text, processes=2)
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert f"error: {tmp_path} already holds a run" in output
    assert "error: another process of this training has ended" in output
    assert output.count("Traceback") == 1, "torchrun's own"


@pytest.mark.parametrize(
    ("processes", "by_torchrun", "changes", "message"),
    [(1, False, {"parallel": "ddp"}, "'ddp' needs processes"), (2, True, {}, "2 processes, but .*'single'"),
     (3, True, {"parallel": "ddp"}, "batch_size=4 .* 3 processes")],
)  # fmt: skip
def test_the_way_it_is_started_and_the_config_must_fit(
    processes, by_torchrun, changes, message, tmp_path, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    with pytest.raises(ValueError, match=message):
        train_run(small_training(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
