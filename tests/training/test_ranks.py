"""Several processes against one: the same losses, the same weights, and the same manners."""

import os
import re
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from memformers.evaluation import evaluate
from memformers.files import write_json
from memformers.memory import Memory
from memformers.tracking import read_metrics
from memformers.training.checkpoints import own_randomness
from memformers.training.config import TrainConfig
from memformers.training.loop import train
from memformers.training.ranks import Ranks
from memformers.training.signals import Stopped, StopSignals
from tests.builders import small_lm, small_training
from tests.training.launches import launch, program, start, worker
from tests.training.runs import segments_of, without_times

TEXT = "".join(chr(97 + i * i % 23) for i in range(30_000))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory, text):
    """Runs of one process, by model."""
    runs = {}
    for model in ("transformer-xl", "compressive"):
        runs[model] = tmp_path_factory.mktemp("alone") / model
        result = launch(runs[model], "--model", model, "--data", text)
        assert result.returncode == 0, result.stderr
    return runs


def check_same_run(folder, reference):
    """Losses to 1e-6, relative."""
    wanted, got = (without_times(read_metrics(f)) for f in (reference, folder))
    assert len(wanted) == len(got)
    for a, b in zip(wanted, got, strict=True):
        for name in a:  # of near ties, rounding may choose the other
            tolerance = 0.01 if name.startswith("accuracy") else 2e-6
            assert b[name] == pytest.approx(a[name], abs=tolerance, rel=tolerance)


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_end_with_one_processs_weights_memory_and_losses(model, parallel, tmp_path):
    """In float64: in float32, Adam turns the rounding errors of gradients that should be 0 into steps."""
    config = small_training(model=model, batch_size=4, tokens=4 * 16 * 10, log_every=1)
    for processes, how in ((1, "single"), (2, parallel)):
        program(tmp_path, replace(config, parallel=how), processes)
    one = load_file(tmp_path / "single.0.safetensors")
    ranks = [load_file(tmp_path / f"{parallel}.{rank}.safetensors") for rank in range(2)]
    for name, tensor in one.items():
        torch.testing.assert_close(ranks[0][name], tensor, rtol=0, atol=1e-10)
        assert torch.equal(ranks[0][name], ranks[1][name])


@pytest.mark.parametrize(
    ("parallel", "model", "others"),
    [
        ("ddp", "compressive", []),
        ("ddp", "transformer-xl", ["--accumulate", "2", "--activation-checkpointing"]),
        ("fsdp", "compressive", ["--accumulate", "2", "--activation-checkpointing"]),
        ("fsdp", "transformer-xl", []),
    ],
)
def test_two_processes_train_as_one_does(alone, text, tmp_path, parallel, model, others):
    result = launch(tmp_path / "run", "--model", model, "--data", text, "--parallel", parallel, *others,
                    processes=2)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("run: ") == 1
    check_same_run(tmp_path / "run", alone[model])


@pytest.mark.parametrize("processes", [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_processes(alone, text, tmp_path, processes):
    folder, (before, after) = tmp_path / "run", processes
    options = ["--model", "compressive", "--data", text, "--checkpoint-every", "640"]
    parallel = {1: "single", 2: "fsdp"}
    first = start(folder, *options, "--parallel", parallel[before], processes=before)
    wait_for(lambda: (folder / "checkpoints" / "000000000640").exists())
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=120)
    result = launch(folder, *options, "--parallel", parallel[after], "--resume", processes=after)
    assert result.returncode == 0, result.stderr
    assert re.search("goes on at token|is finished", result.stdout)
    check_same_run(folder, alone["compressive"])


@pytest.fixture
def two(text, tmp_path):
    """A training of two ranks in ``run``, which records already."""
    if sys.platform != "linux":
        pytest.skip("a rank's process is found in /proc")
    folder = tmp_path / "run"
    process = start(folder, "--data", text, "--tokens", "10000000", "--parallel", "ddp", processes=2)
    wait_for(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 0)
    yield process
    process.kill()


def test_a_signal_to_any_rank_stops_all_with_a_checkpoint(two, tmp_path):
    os.kill(worker(two.pid, rank=1), signal.SIGTERM)
    output, _ = two.communicate(timeout=120)
    assert two.returncode != 0
    assert "stopped by SIGTERM at token" in output
    assert list((tmp_path / "run" / "checkpoints").glob("0*"))


def test_a_process_that_dies_ends_the_others_within_30_seconds(two):
    os.kill(worker(two.pid, rank=1), signal.SIGKILL)
    output, _ = two.communicate(timeout=30)
    assert two.returncode != 0
    assert "SIGKILL" in output  # torchrun says which one, and of what


def test_a_signal_that_comes_while_the_ranks_tell_each_other_waits_for_the_next_step():
    """Else the one rank would stop, and the others wait for it for ever."""

    class SignalledWhileTheyVote(Ranks):
        def highest(self, number):
            os.kill(os.getpid(), signal.SIGTERM)
            return number

    ranks = SignalledWhileTheyVote(rank=1, size=2)
    with StopSignals(alone=False) as signals:
        signals.check(ranks)
        with pytest.raises(Stopped, match="SIGTERM"):
            signals.check(ranks)


def test_a_signal_ends_the_evaluation_of_several_ranks_between_two_segments():
    lm, read = small_lm("transformer-xl"), []
    with StopSignals(alone=False) as signals:

        def between_segments():
            signals.check(Ranks())
            read.append(1)
            if len(read) == 2:
                signal.raise_signal(signal.SIGTERM)

        with pytest.raises(Stopped), signals.at_once():
            evaluate(lm, torch.randint(0, 11, (100,)), 2, between_segments)
    assert len(read) == 2
    assert lm.training, "it is left in the mode it came in"


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_one_rank_alone_has_otherwise_is_an_error_on_all():
    class Two(Ranks):
        def everyones(self, value):
            return [value, "another"]

    with pytest.raises(ValueError, match="texts differ"):
        Two(0, 2).check_alike("one", "texts differ")
    Ranks().check_alike("one", "texts differ")


def test_a_rank_whose_other_has_gone_says_so_in_one_line(text, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}")
    result = launch(tmp_path, "--data", text, "--parallel", "ddp", processes=2)
    assert result.returncode != 0
    assert f"error: {tmp_path} already holds a run" in result.stderr
    assert "error: another process of this training has ended, so process 1 can't go on" in result.stderr
    assert result.stderr.count("Traceback") == 1, "torchrun's own"


def test_the_way_it_is_started_and_the_config_must_fit(text, tmp_path):
    result = launch(tmp_path / "run", "--data", text, "--parallel", "ddp")
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert "error: parallel='ddp' needs processes; start them with torchrun" in result.stderr
    result = launch(tmp_path / "run", "--data", text, processes=2)
    assert "error: torchrun started 2 processes, but parallel='single'" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": "many"}, "parallel='many' is unknown"),
        ({"parallel": "fsdp", "compile": True}, "compile=True can't be used with parallel='fsdp'"),
        ({"accumulate": 0}, "accumulate=0 is too small"),
        ({"accumulate": 3}, "batch_size=8 streams can't be cut into accumulate=3 equal parts"),
    ],
)
def test_a_config_that_cannot_be_shared_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes)


@pytest.mark.parametrize("model", ["transformer", "transformer-xl", "compressive"])
def test_parts_and_recomputed_layers_change_nothing_but_rounding(model):
    """In float64, where rounding leaves ten digits."""
    weights = []
    for accumulate, recompute in ((1, False), (2, False), (4, True)):
        torch.manual_seed(0)
        config = small_training(model=model, batch_size=4, tokens=4 * 16 * 7)
        lm = small_lm(model, segment_len=16, mem_len=16).double()
        lm.transformer.recompute = recompute
        train(lm, segments_of(config), replace(config, accumulate=accumulate), record=lambda *_: None,
              evaluate=lambda _: None)  # fmt: skip
        weights.append(lm.state_dict())
    for others in weights[1:]:
        for name, tensor in weights[0].items():
            torch.testing.assert_close(others[name], tensor, rtol=0, atol=1e-9)


def test_recomputed_layers_drop_out_the_same():
    lm = small_lm("compressive", dropout=0.3)
    tokens, grads = torch.randint(11, (7, 2)), []
    for recompute in (False, True):
        lm.transformer.recompute = recompute
        torch.manual_seed(1)
        lm.zero_grad()
        lm(tokens).logits.square().sum().backward()
        grads.append([p.grad for p in lm.parameters() if p.grad is not None])
    assert all(map(torch.equal, *grads))


def test_each_rank_has_its_own_streams_and_their_memory():
    streams = torch.arange(12).view(2, 6)
    parts = [Ranks(rank, 3).own(streams) for rank in range(3)]
    assert torch.equal(torch.cat(parts, dim=1), streams)
    memory = Memory((torch.rand(4, 6, 2),), (torch.rand(3, 6, 2),))
    own = Ranks(1, 3).own_memory(memory)
    assert torch.equal(own.mem[0], memory.mem[0][:, 2:4])
    assert torch.equal(own.c_mem[0], memory.c_mem[0][:, 2:4])


def test_with_dropout_only_as_many_processes_go_on(tmp_path):
    write_json(path := tmp_path / "random.json", {"ranks": [{"torch": 0}, {"torch": 1}]})
    assert own_randomness(path, Ranks(1, 2), 0.1) == {"torch": 1}
    assert own_randomness(path, Ranks(2, 3), 0.0) == {"torch": 0}
    with pytest.raises(ValueError, match=r"made by 2 processes, and there are 3 now; with dropout=0\.1"):
        own_randomness(path, Ranks(2, 3), 0.1)
