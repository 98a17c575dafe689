"""What is counted on models without numbers, against what models compute, keep, hold and send that run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments import scaling
from experiments.scaling import OnGPU, Operations, count, full_inputs, loss, row_of, step_of, storage_bytes
from memformers import MemoryLM, ModelConfig
from memformers.common.fields import replace_nested
from memformers.data.streams import Segment
from memformers.models import sinusoids
from memformers.models.memory import Memory
from memformers.report.rendering import markdown_table as table
from memformers.training.config import TrainConfig, preset_names
from memformers.training.optimizers import build_optimizers
from memformers.training.state import TrainingState
from memformers.training.trainer import Trainer

PAGE = Path(__file__).parents[2] / "docs/scaling.md"
SIZES = ModelConfig(
    vocab_size=37, d_model=24, n_heads=3, n_layers=2, d_ff=41, kernel="naive", segment_len=16, mem_len=20,
    c_mem_len=10, compression_rate=4,
)  # fmt: skip
COMPRESSIVE = {"model": "compressive"}
XL = {"model": "transformer-xl", "positions": "learned", "dropout": 0.1}
SIZED = {"segment_len": 24, "mem_len": 24}
CASES = [
    COMPRESSIVE | {"precision": "bfloat16", "dropout": 0.1},
    pytest.param(XL, marks=pytest.mark.long),
    pytest.param(COMPRESSIVE | SIZED | {"c_mem_len": 3, "compression_rate": 3}, marks=pytest.mark.long),
]


def training(streams=6, precision="float32", parallel="single", **changes):
    """A TrainConfig with changes of its model."""
    config = TrainConfig(model=replace(SIZES, **changes), batch_size=streams)
    return replace_nested(config, device="cpu", precision=precision, parallel=parallel)


def test_operations_and_bytes_are_those_worked_out_by_hand():
    """A product of ``[m, k]`` and ``[k, n]`` has 2·m·k·n, and behind it one more for each that learns."""
    L = 2  # layers
    B, S, M, C, D = 6, 16, 20, 10, 24
    F = 41  # the width of the feed-forward network
    V = 37  # tokens
    c = 4
    n = 4  # slots that a segment adds
    K = C + M + S
    square = 2 * B * D * D  # of one position
    # The attention of the reconstruction loss over memories, and over their slots.
    old = 2 * 2 * B * S * n * c * D
    new = 2 * 2 * B * S * n * D
    counts = count(training(model="compressive"))
    assert counts["operations"] == sum((
        L * 3 * 4 * S * square,  # projections
        L * 2 * 2 * (C + M) * square,  # of memories
        L * 2 * 2 * K * D * D,  # of positions
        L * 3 * 3 * 2 * B * S * K * D,  # scores
        L * 3 * 2 * 2 * B * S * D * F,  # feed forward
        L * 2 * n * c * square,  # compression
        # Reconstruction: the query; keys and values of old and new, whose gradient goes to the new alone.
        L * ((S + 2 * n * c + 4 * n) * square + old + new + new * 3 // 2),
        3 * 2 * B * S * D * V,  # head
    ))  # fmt: skip
    assert counts["memories"] == L * (C + M) * B * D * 4


@pytest.mark.parametrize("changes", CASES)
def test_what_is_counted_is_what_a_step_that_runs_has(changes):
    """Its operations, activations and memories."""
    sinusoids._TABLES.clear()  # of other tests, which are longer
    config = training(**changes)
    lm = MemoryLM(config.model)
    tokens, full = full_inputs(lm, config.batch_size)
    memory = Memory(())
    while (memory.mem_len, memory.n_slots) != (full.mem_len, full.n_slots):
        with torch.no_grad():
            memory = lm(tokens, memory).memory

    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with OnGPU(), saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(lm, tokens, memory, config)
    with Operations() as counter, sdpa_kernel(SDPBackend.MATH):
        Trainer(lm, iter(()), config, None, TrainingState((), memory)).step(Segment(tokens, tokens))
    memories = [x for layer in memory.layers for x in (layer.mem, layer.slots)]
    counts = count(config)
    assert counts["operations"] == counter.total
    assert counts["kept"] == storage_bytes(kept, without=(*lm.parameters(), *memories))
    assert counts["memories"] == storage_bytes(memories)


@pytest.mark.long
def test_all_layers_follow_from_one_and_two():
    config = training(n_layers=3, precision="bfloat16", dropout=0.1, **COMPRESSIVE)
    estimate = step_of(config, 1)
    counted = count(config)
    assert estimate["operations"] == counted["operations"]
    assert estimate["parameters"] == counted["parameters"]
    assert estimate["bytes"] - estimate["state"] == counted["kept"] + counted["memories"]
    assert estimate["sent"] == 0


def test_a_rank_holds_its_state_and_reduces_each_gradient_once():
    """Its state are weights, gradients and moments."""
    config = training(8, parallel="ddp")
    lm = MemoryLM(config.model)
    x = torch.randint(37, (16, 2))
    optimizers = build_optimizers(lm, config)
    Trainer(lm, iter(()), config, None, TrainingState(optimizers)).step(Segment(x, x))
    moment_bytes = 0
    for optimizer in optimizers:
        for moments in optimizer.state.values():
            moment_bytes += sum(moment.nbytes for moment in moments.values())
    weight_bytes = sum(parameter.nbytes for parameter in lm.parameters())
    estimate = step_of(config, 4)
    assert estimate["state"] == 2 * weight_bytes + moment_bytes
    assert estimate["sent"] == 2 * 3 * weight_bytes / 4


@pytest.mark.long
@pytest.mark.parametrize("name", preset_names())
def test_the_page_has_what_a_preset_costs(name):
    page = PAGE.read_text(encoding="utf-8")
    assert table([], [row_of(name)]).splitlines()[-1] in page
    assert f"at {scaling.TERAFLOPS:g} TFLOP/s and sending at {scaling.GIGABYTES:g} GB/s" in page
