"""The formulas of scaling against what models compute, keep, hold and send."""

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from memformers.language_model import MemoryLM, ModelConfig
from memformers.memory import Memory
from memformers.training.config import TrainConfig
from memformers.training.gradients import backward
from memformers.training.lengths import full_lengths
from memformers.training.loop import build_optimizer
from memformers.training.ranks import Ranks, forward_of, shard
from memformers.training.scaling import estimate, parameter_shapes
from tests.builders import MODELS

SIZES = ModelConfig(
    vocab_size=37, d_model=24, heads=3, n_layers=2, d_ff=41, kernel="naive", segment_len=16, mem_len=20,
    c_mem_len=10, compression_rate=4,
)  # fmt: skip
RUN = ("precision", "parallel", "accumulate", "activation_checkpointing")
EVERY_MODEL = [(model, positions) for model in MODELS for positions in ("learned", "sinusoidal")]


def training(streams=6, **changes):
    """A TrainConfig on CPU, with changes of the run and of its model."""
    of_run = {name: changes.pop(name) for name in RUN if name in changes}
    return TrainConfig(model=replace(SIZES, **changes), batch_size=streams, device="cpu", **of_run)


def built(config):
    lm = MemoryLM(config.model)
    lm.transformer.recompute = config.activation_checkpointing
    return lm


def tokens(config, streams=None):
    return torch.randint(config.model.vocab_size, (config.model.segment_len, streams or config.batch_size))


def with_full_memories(lm, config):
    """The memory before a step of full ones."""
    full, memory = full_lengths(config.model), Memory(())
    for _ in range(60):
        if (memory.mem_len, memory.c_mem_len) == (full.M, full.C):
            return memory
        with torch.no_grad():
            memory = lm(tokens(config), memory).memory
    raise AssertionError(f"{full} never came")


@pytest.mark.parametrize(("model", "positions"), EVERY_MODEL)
def test_parameters_are_those_of_the_model_that_is_built(model, positions):
    config = training(model=model, positions=positions)
    parameters = list(built(config).parameters())
    assert sorted(parameter_shapes(config.model)) == sorted(tuple(p.shape) for p in parameters)
    assert estimate(config, 1).parameters == sum(p.numel() for p in parameters)


def test_fewer_position_features_are_fewer_parameters():
    config = training(position_features=10)
    assert estimate(config, 1).parameters == sum(p.numel() for p in built(config).parameters())


FLOPS = [
    *({"model": model, "positions": positions} for model, positions in EVERY_MODEL),
    {"model": "compressive", "activation_checkpointing": True},
    {"model": "compressive", "activation_checkpointing": True, "dropout": 0.1, "accumulate": 3},
    {"model": "compressive", "compression_rate": 3},
    {"model": "compressive", "compression_rate": 5, "segment_len": 3, "position_features": 10},
]


@pytest.mark.parametrize("changes", FLOPS)
def test_a_steps_products_are_those_that_pytorch_counts(changes):
    """Attention in the reconstruction loss is computed by plain products, since the counter doesn't know
    PyTorch's fast one on CPU."""
    config = training(**changes)
    lm = built(config)
    memory = with_full_memories(lm, config)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        backward(lm, tokens(config), tokens(config), memory, config, Ranks())
    assert estimate(config, 1).flops.total == counter.get_total_flops()


KEPT = [
    {"model": model, "positions": positions, "precision": precision, "dropout": dropout}
    for model, positions in EVERY_MODEL
    for precision in ("float32", "bfloat16")
    for dropout in (0.0, 0.1)
]


@pytest.mark.parametrize("changes", KEPT)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed-again"])
def test_activations_are_those_that_autograd_keeps(changes, again):
    check_activations(training(**changes, activation_checkpointing=again))


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_fused_kernel_keeps_no_scores(positions, precision):
    pytest.importorskip("triton")
    check_activations(training(2, positions=positions, precision=precision, kernel="fused"))


def check_activations(config):
    """Within half a percent: another version of PyTorch may keep a mean or a scale more. With
    PyTorch 2.13 it is the same to the byte."""
    lm = built(config)
    memory, kept = with_full_memories(lm, config), {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with ExitStack() as stack:
        for layer in lm.transformer.layers if config.activation_checkpointing else ():
            # Inputs of layers that are computed again are kept by no operation.
            hook = layer.register_forward_pre_hook(
                lambda _, args, inputs: (keep(inputs["x"]), None)[1], with_kwargs=True
            )
            stack.callback(hook.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16"):
            output = lm(tokens(config), memory)
            loss = F.cross_entropy(output.logits.flatten(0, 1), tokens(config).flatten())
            loss = loss + output.auxiliary_loss
    weights = {p.untyped_storage().data_ptr() for p in lm.parameters()}
    measured = sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in weights)
    assert estimate(config, 1).activation_bytes == pytest.approx(measured, rel=0.005)
    loss.backward()


def test_a_layer_that_is_computed_again_keeps_as_much_as_one_that_is_not():
    kept = [estimate(training(n_layers=n), 1).activation_bytes for n in (3, 4)]
    config = training(activation_checkpointing=True)
    inputs = tokens(config).numel() * config.model.d_model * 4
    assert estimate(config, 1).recomputed_bytes + inputs == kept[1] - kept[0]


def bytes_held(memory):
    return sum(t.untyped_storage().nbytes() for t in (*memory.mem, *memory.c_mem))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("rate", "segment_len", "c_mem_len"), [(4, 16, 10), (3, 16, 10), (5, 3, 10), (4, 24, 3)]
)
def test_memories_take_as_many_bytes_as_their_tensors(model, rate, segment_len, c_mem_len):
    config = training(model=model, compression_rate=rate, segment_len=segment_len, c_mem_len=c_mem_len)
    guess, memory = estimate(config, 1), with_full_memories(built(config), config)
    assert guess.memory_bytes == sum(t.nbytes for t in memory.mem)
    assert guess.c_mem_bytes == sum(t.nbytes for t in memory.c_mem)
    assert guess.memory_storage_bytes == bytes_held(memory)


@pytest.mark.parametrize("model", MODELS)
def test_memories_of_streams_in_parts_are_copies_that_hold_what_they_show(model):
    config = training(model=model, segment_len=24, c_mem_len=3, accumulate=2)
    lm = built(config)
    memory = with_full_memories(lm, config)
    after = backward(lm, tokens(config), tokens(config), memory, config, Ranks()).memory
    assert estimate(config, 1).memory_storage_bytes == bytes_held(after)


@contextmanager
def group(backend, ranks, store):
    dist.init_process_group(backend, rank=0, world_size=ranks, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Sent(TorchDispatchMode):
    """Counts what the collective operations of a rank send, in rings."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.bytes = ranks, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.c10d._allgather_base_.default:
            self.bytes += (self.ranks - 1) * args[1].nbytes  # this rank's part, passed on by all but one
        if function is torch.ops.c10d._reduce_scatter_base_.default:
            self.bytes += (self.ranks - 1) * args[0].nbytes
        return function(*args, **(kwargs or {}))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def two_steps(config, ranks, watch, prepare=lambda forward: None):
    """The model and the optimizer after two steps of the first rank, the second of them watched; the first
    compresses nothing."""
    lm = built(config)
    if config.parallel == "fsdp":
        shard(lm, torch.device("cpu"))
    optimizer, forward, memory = build_optimizer(lm, config), forward_of(lm, config), Memory(())
    streams = config.batch_size // ranks
    prepare(forward)
    for watched in (nullcontext(), watch):
        optimizer.zero_grad()
        with watched:
            memory = backward(
                forward, tokens(config, streams), tokens(config, streams), memory, config, Ranks()
            ).memory
        optimizer.step()
    return lm, optimizer


def check_held(config, ranks, lm, optimizer):
    guess = estimate(config, ranks)
    assert guess.weight_bytes == sum(local(p).nbytes for p in lm.parameters())
    assert guess.gradient_bytes == sum(local(p.grad).nbytes for p in lm.parameters())
    moments = [local(t) for state in optimizer.state.values() for t in state.values()]
    assert guess.optimizer_bytes == sum(t.nbytes for t in moments)


@pytest.mark.parametrize(("ranks", "accumulate"), [(4, 1), (5, 2), (7, 1)])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_a_rank_of_fsdp_holds_and_sends_what_is_estimated(ranks, accumulate, positions):
    """On PyTorch's fake processes: what a rank sends goes nowhere, but it is sent."""
    config = training(4 * ranks, model="compressive", positions=positions, parallel="fsdp",
                      accumulate=accumulate)  # fmt: skip
    sent = Sent(ranks)
    with group("fake", ranks, FakeStore()):
        lm, optimizer = two_steps(config, ranks, sent)
        check_held(config, ranks, lm, optimizer)
    assert estimate(config, ranks).sent_bytes == sent.bytes


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_rank_of_ddp_reduces_each_gradient_once(accumulate):
    config = training(8, model="compressive", parallel="ddp", accumulate=accumulate)
    reduced = []

    def count(_, bucket):
        reduced.append(bucket.buffer().nbytes)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    with group("gloo", 1, dist.HashStore()):
        lm, optimizer = two_steps(
            config, 1, nullcontext(), lambda forward: forward.register_comm_hook(None, count)
        )
        check_held(config, 1, lm, optimizer)
    gradient = sum(p.grad.nbytes for p in lm.parameters())
    assert sum(reduced) == 2 * gradient  # in two steps
    assert gradient == estimate(config, 1).working_bytes
    assert estimate(config, 4).sent_bytes == 2 * 3 * gradient // 4


def test_one_process_sends_nothing_and_copies_nothing():
    guess = estimate(training(), 1)
    assert (guess.sent_bytes, guess.working_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({}, 2, "2 ranks can't train with parallel='single'"),
        ({"parallel": "ddp"}, 0, "0 ranks can't train"),
        ({"parallel": "ddp"}, 4, "batch_size=6 streams can't be shared equally by 4 ranks"),
        ({"norm": "post"}, 1, "norm='post' and equal_spans=False is not estimated"),
        ({"kernel": "augmented"}, 1, "what kernel='augmented' with dropout=0.0 keeps is not estimated"),
        ({"kernel": "fused", "dropout": 0.1}, 1, "what kernel='fused' with dropout=0.1 keeps"),
    ],
)
def test_what_cannot_be_estimated_is_an_error(changes, ranks, message):
    with pytest.raises(ValueError, match=message):
        estimate(training(**changes), ranks)
