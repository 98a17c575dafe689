"""What is counted on models without numbers, against what models compute, keep, hold and send that run."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from experiments.scaling.__main__ import Rates, benchmark
from experiments.scaling.counting import built, flops, full_inputs, held, kept_by, kept_bytes, over_layers
from experiments.scaling.estimate import estimate
from memformers import MemoryLM, ModelConfig
from memformers.common.fields import changed
from memformers.data.streams import Segment
from memformers.models import positions
from memformers.models.memory import Memory
from memformers.report.markdown import table
from memformers.training.config import TrainConfig
from memformers.training.distributed import Distributed
from memformers.training.optimizers import build_optimizers
from memformers.training.train_step import UnrolledSegments, backward, forward_of
from tests.builders import MODELS

ROOT = Path(__file__).parents[2]
SIZES = ModelConfig(
    vocab_size=37, d_model=24, heads=3, n_layers=2, d_ff=41, kernel="naive", segment_len=16, mem_len=20,
    c_mem_len=10, compression_rate=4,
)  # fmt: skip
EVERY_MODEL = [(model, positions) for model in MODELS for positions in ("learned", "sinusoidal")]


def training(streams=6, precision="float32", parallel="single", again=False, device="cpu", **changes):
    """A TrainConfig with changes of its model."""
    config = TrainConfig(model=replace(SIZES, **changes), batch_size=streams)
    how = {"device": device, "precision": precision, "parallel": parallel, "activation_checkpointing": again}
    return changed(config, **how)


def tokens(config, streams=None):
    return torch.randint(config.model.vocab_size, (config.model.segment_len, streams or config.batch_size))


def with_full_memories(lm, config):
    """The memory of real text with the lengths that are counted with."""
    with torch.device("meta"):
        _, full = full_inputs(built(config), config.batch_size)
    memory = Memory(())
    for _ in range(60):
        if (memory.mem_len, memory.c_mem_len) == (full.mem_len, full.c_mem_len):
            return memory
        with torch.no_grad():
            memory = lm(tokens(config), memory).memory
    raise AssertionError("such memories never came")


def test_the_parts_are_those_worked_out_by_hand():
    """A product of ``[m, k]`` and ``[k, n]`` has 2·m·k·n, and behind it one more for each that learns."""
    L, B, S, M, C, c, D, F_, V = 2, 6, 16, 20, 10, 4, 24, 41, 37
    K, n = C + M + S, 4
    square = 2 * B * D * D  # of one position
    old, new = 2 * 2 * B * S * n * c * D, 2 * 2 * B * S * n * D
    assert flops(training(model="compressive")) == {
        "projections": L * 3 * 4 * S * square,
        "memory projections": L * 2 * 2 * (C + M) * square,
        "positions": L * 2 * 2 * K * D * D,
        "scores": L * 3 * 3 * 2 * B * S * K * D,
        "feed forward": L * 3 * 2 * 2 * B * S * D * F_,
        "compression": L * 2 * n * c * square,
        # The query; keys and values of old and new, whose gradient goes to the new alone, and so the scores'.
        "reconstruction": L * ((S + 2 * n * c + 4 * n) * square + old + new + new * 3 // 2),
        "head": 3 * 2 * B * S * D * V,
    }


def test_kept_is_what_a_linear_map_and_an_attention_keep_worked_out_by_hand():
    lm, x = MemoryLM(SIZES), torch.randn(5, 24)
    assert kept_by(lm, lambda: lm.head(x)) == 5 * 24 * 4  # its input, for the gradient of its weight
    q, k, v = (torch.randn(2, 7, 3, requires_grad=True) for _ in range(3))
    scores = 2 * 7 * 7 * 4
    kept = kept_by(lm, lambda: torch.bmm(torch.bmm(q, k.mT).softmax(-1), v))
    assert kept == q.nbytes + k.nbytes + v.nbytes + scores


def test_a_gpu_keeps_of_dropout_a_byte_a_number():
    a, b = (
        kept_bytes(training(precision="bfloat16", dropout=0.1, device=device)) for device in ("cuda", "cpu")
    )
    L, B, H, S, K, D, F_ = 2, 6, 3, 16, 36, 24, 41
    attention, others = B * H * S * K, 2 * S * B * D + S * B * F_  # on CPU of 4 and of 2 bytes a number
    assert b["kept"] - a["kept"] == L * (3 * attention + others) + 3 * S * B * D


COMPRESSIVE = {"model": "compressive"}
FLOPS = [
    *({"model": model, "positions": positions} for model, positions in EVERY_MODEL),
    COMPRESSIVE | {"again": True},
    COMPRESSIVE | {"again": True, "dropout": 0.1},
    COMPRESSIVE | {"compression_rate": 3},
    COMPRESSIVE | {"compression_rate": 5, "segment_len": 3, "position_features": 10},
]


@pytest.mark.parametrize("changes", FLOPS)
def test_operations_are_those_of_a_step_that_runs(changes):
    config = training(**changes)
    lm = built(config)
    memory = with_full_memories(lm, config)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        backward(
            UnrolledSegments(lm), [Segment(tokens(config), tokens(config))], memory, config, Distributed()
        )
    assert flops(config).total() == counter.get_total_flops()


FUSED = {"streams": 2, "precision": "bfloat16", "kernel": "fused"}
"""Keeps no scores."""
KEPT = [
    *(
        {"model": model, "positions": positions, "precision": precision, "dropout": dropout}
        for model, positions in EVERY_MODEL
        for precision, dropout in (("float32", 0.0), ("bfloat16", 0.0), ("bfloat16", 0.1))
    ),
    *(
        COMPRESSIVE | {"compression_rate": rate, "segment_len": segment_len, "c_mem_len": c_mem_len}
        for rate, segment_len, c_mem_len in ((3, 16, 10), (5, 3, 10), (4, 24, 3))
    ),
    {"positions": "learned"} | FUSED,
    pytest.param({"positions": "sinusoidal"} | FUSED, marks=pytest.mark.long),
]


@pytest.mark.parametrize("changes", KEPT)
def test_activations_and_memories_are_those_of_a_step_that_runs(changes):
    """What autograd keeps of the model's own forward pass, also where layers are computed again."""
    if changes.get("kernel") == "fused":
        pytest.importorskip("triton")
    positions._TABLES.clear()  # of other tests, which are longer
    config = training(**changes)
    lm = built(config)
    memory = with_full_memories(lm, config)

    def loss():
        with torch.autocast("cpu", torch.bfloat16, enabled=config.step.precision == "bfloat16"):
            logits, _, auxiliary_loss = lm(tokens(config), memory)
            return F.cross_entropy(logits.flatten(0, 1), tokens(config).flatten()) + auxiliary_loss

    kept = kept_by(lm, loss, memory.mem + memory.c_mem)
    counted = kept_bytes(changed(config, activation_checkpointing=False))
    assert counted == {"kept": kept, "memories": held((*memory.mem, *memory.c_mem))}
    lm.transformer.recompute = True
    inputs = kept_by(lm, loss, memory.mem + memory.c_mem)
    again = kept_bytes(changed(config, activation_checkpointing=True))
    assert again["kept"] == inputs + (kept - inputs) // config.model.n_layers


@pytest.mark.parametrize("count", [flops, kept_bytes])
@pytest.mark.parametrize(
    ("model", "again"), [("compressive", False), ("compressive", True), ("transformer-xl", True)]
)
def test_all_layers_follow_from_one_and_two(count, model, again):
    config = training(model=model, n_layers=5, again=again, precision="bfloat16", dropout=0.1)
    assert over_layers(count, config).total() == count(config).total()


class Sent(TorchDispatchMode):
    """Counts what the collective operations of a rank send, in rings."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.bytes = ranks, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        part = {torch.ops.c10d._allgather_base_.default: 1, torch.ops.c10d._reduce_scatter_base_.default: 0}
        if function in part:
            self.bytes += (self.ranks - 1) * args[part[function]].nbytes  # passed on by all but one
        return function(*args, **(kwargs or {}))


def bytes_after_a_step(config, ranks, watch, hook=None):
    """A step of the first of PyTorch's fake processes: what it sends goes nowhere, but it is sent, by
    ``hook`` with DDP; returns the bytes of its weights, gradients and optimizers' state."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        lm, alone = built(config), Distributed(parallel=config.step.parallel)
        alone.place(lm, torch.device("cpu"))
        optimizers, forward = build_optimizers(lm, config), forward_of(lm, alone, compile=False)
        if hook:
            forward.register_comm_hook(None, hook)
        x = tokens(config, config.batch_size // ranks)
        with watch:
            backward(forward, [Segment(x, x)], Memory(()), config, alone)
        for optimizer in optimizers:
            optimizer.step()
    finally:
        dist.destroy_process_group()
    moments = [t for o in optimizers for state in o.state.values() for t in state.values()]
    tensors = [*lm.parameters(), *(p.grad for p in lm.parameters()), *moments]
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


@pytest.mark.parametrize("ranks", [4, 5, 7])
def test_a_rank_of_fsdp_holds_and_sends_what_is_estimated(ranks):
    config = training(4 * ranks, parallel="fsdp")
    sent, guess = Sent(ranks), estimate(config, ranks)
    assert guess.state_bytes == bytes_after_a_step(config, ranks, sent)
    assert guess.sent_bytes == sent.bytes


def test_a_rank_of_ddp_reduces_each_gradient_once():
    config, reduced = training(8, parallel="ddp"), []

    def count(_, bucket):
        reduced.append(bucket.buffer().nbytes)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    guess = estimate(config, 4)
    assert guess.state_bytes == bytes_after_a_step(config, 4, nullcontext(), count)
    assert sum(reduced) == guess.copy_bytes == 4 * guess.parameters
    assert guess.sent_bytes == 2 * 3 * guess.copy_bytes // 4


def test_one_process_sends_nothing_and_copies_nothing():
    guess = estimate(training(), 1)
    assert (guess.sent_bytes, guess.copy_bytes, guess.tokens) == (0, 0, 6 * 16)


@pytest.mark.parametrize(
    ("parallel", "ranks", "message"),
    [("single", 2, "2 ranks can't train with parallel='single'"),
     ("ddp", 0, "0 ranks can't train"),
     ("ddp", 4, "4 ranks, got batch_size=6 and accumulate=1")],
)  # fmt: skip
def test_what_cannot_be_shared_is_an_error(parallel, ranks, message):
    with pytest.raises(ValueError, match=message):
        estimate(training(parallel=parallel), ranks)


def test_the_page_has_what_a_preset_costs():
    page = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    assert table([], [benchmark("enwik8-12l", Rates())]).splitlines()[-1] in page
