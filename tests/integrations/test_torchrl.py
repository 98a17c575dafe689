"""TorchRL with our memory: steps and windows. The guide has its PPO."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from torch import nn

pytest.importorskip("torchrl", reason="torchrl is not installed; use pip install '.[torchrl]' in a clone")

from tensordict import TensorDict
from torchrl.modules import get_primers_from_module, set_recurrent_mode

from memformers import CoreConfig, LayerMemory, MemoryCore, MemoryRule, MemorySizes
from memformers.integrations.torchrl import MemoryModule
from memformers.integrations.torchrl_memories import Ring
from tests.texts import read

SMALL = {"d_model": 8, "n_heads": 2, "n_layers": 2, "d_ff": 16, "dropout": 0.0}
CORES = [
    {"model": "transformer-xl", "mem_len": 7, "segment_len": 5},
    {"model": "transformer-xl", "mem_len": (3, 9), "segment_len": 1},
    {"model": "compressive", "mem_len": 6, "c_mem_len": 3, "compression_rate": 2, "segment_len": 4},
    {"model": "transformer", "segment_len": 6},
]


def module_of(n_steps=10_000, **settings):
    return MemoryModule(MemoryCore(CoreConfig(d_input=3, **SMALL, **settings)), n_steps=n_steps)


def stepped(module, x, begins):
    """Features ``x [B, T, F]`` step by step, as a collector keeps them, ``[B, T]``."""
    steps = []
    memory = module.make_tensordict_primer().primers["memory"].zero((len(x),))
    for features, is_init in zip(x.unbind(1), begins.unbind(1), strict=True):
        read = TensorDict({"observation": features, "is_init": is_init, "memory": memory}, [len(x)])
        steps.append(module(read))
        steps[-1]["memory"] = memory.masked_fill(is_init, 0)  # as the primer does
        memory = steps[-1]["next", "memory"]
    return torch.stack(steps, 1)


@pytest.mark.parametrize("n_steps", [10_000, None])
@pytest.mark.parametrize("settings", CORES, ids=str)
def test_steps_windows_and_episodes_give_the_same_numbers(settings, n_steps):
    module = module_of(n_steps, **settings)
    x = torch.randn(4, 37, 3)
    begins = torch.rand(4, 37, 1) < 0.1
    begins[:, 0] = True
    steps = stepped(module, x, begins)
    with set_recurrent_mode(True):
        for window in (slice(0, 37), slice(11, 29), slice(30, 31)):
            part = steps.select("observation", "is_init", "memory")[:, window]
            assert torch.allclose(module(part.clone())["embed"], steps["embed"][:, window], atol=1e-5)
    # A step of an environment without a batch.
    one = module(steps[2, 30].select("observation", "is_init", "memory"))
    if n_steps is None:
        assert torch.allclose(one["next", "memory"], steps["next", "memory"][2, 30], atol=1e-5)
    for b in range(4):
        starts = [*begins[b, :, 0].nonzero()[:, 0].tolist(), 37]
        for begin, end in pairwise(starts):
            read_alone, *_ = read(module.core, x[b, begin:end, None])
            assert torch.allclose(read_alone[:, 0], steps["embed"][b, begin:end], atol=1e-5)


@pytest.mark.parametrize("settings", CORES, ids=str)
def test_kept_memories_are_like_memories_in_the_tensordict(settings):
    module = module_of(**settings)
    in_tensordict = MemoryModule(module.core, n_steps=None)
    x = torch.randn(4, 37, 3)
    begins = torch.rand(4, 37, 1) < 0.1
    steps = stepped(module, x, begins)
    expected = stepped(in_tensordict, x, begins)
    assert torch.equal(steps["embed"], expected["embed"])
    with set_recurrent_mode(True):
        for window in (slice(0, 37), slice(11, 29), slice(30, 31)):
            keys = ("observation", "is_init", "memory")
            embed = module(steps.select(*keys)[:, window].clone())["embed"]
            assert torch.equal(embed, in_tensordict(expected.select(*keys)[:, window].clone())["embed"])


@pytest.mark.parametrize("settings", CORES[:1] + CORES[2:3], ids=str)
def test_a_step_can_be_followed_by_several(settings):
    module = module_of(**settings)
    x = torch.randn(2, 12, 3)
    begins = torch.zeros(2, 12, 1, dtype=torch.bool)
    steps = stepped(module, x, begins)
    # All of step 5 of stream 0 are followed by other features, twice, in one batch and another.
    ids = steps["next", "memory"][0, 5].expand(3, 1)
    follows = torch.randn(3, 9, 3)
    for _ in range(2):
        memory = ids.clone()
        outputs = []
        for features in follows.unbind(1):
            is_init = torch.zeros(3, 1, dtype=torch.bool)
            read = module(TensorDict({"observation": features, "is_init": is_init, "memory": memory}, [3]))
            outputs.append(read["embed"])
            memory = read["next", "memory"]
        for b in range(3):
            alone = torch.cat((x[0, :6], follows[b]))[:, None]
            expected = read_alone(module, alone)[6:]
            assert torch.allclose(torch.stack(outputs)[:, b], expected, atol=1e-5)


def read_alone(module, x):
    output, *_ = read(module.core, x)
    return output[:, 0]


def test_only_the_newest_steps_are_kept():
    module = module_of(n_steps=40, **CORES[0])  # segments of 5
    x = torch.randn(2, 60, 3)
    steps = stepped(module, x, torch.zeros(2, 60, 1, dtype=torch.bool)).select(
        "observation", "is_init", "memory"
    )
    assert len(module.memories.features.rows) == 40 + 5 * 2
    with set_recurrent_mode(True):
        expected = read_alone(module, x[1][:, None])
        # The window starts at the oldest of the newest 40 steps, in both streams.
        window = module(steps[:, 41:].clone())["embed"]
        assert torch.allclose(window[1], expected[41:], atol=1e-5)
        with pytest.raises(ValueError, match="no longer kept, only that of the newest n_steps=40"):
            module(steps[:, 20:].clone())
        with pytest.raises(ValueError, match="n_steps=None"):
            module_of(**CORES[0])(steps[:, 50:].clone())
        # A loss copies modules within a process; another process gets a copy that has acted nowhere.
        assert torch.equal(copy.deepcopy(module)(steps[:, 41:].clone())["embed"], window)
        # Safe: the bytes are of the module above. Pickling is how processes get their copies of modules.
        with pytest.raises(ValueError, match="another process"):
            pickle.loads(pickle.dumps(module))(steps[:, 50:].clone())
    with pytest.raises(ValueError, match="int64"):
        module(steps[:, -1].clone().apply(lambda x: x.float() if x.dtype == torch.int64 else x))


def test_a_step_writes_an_id_and_keeps_what_its_segment_adds():
    settings = {
        "model": "compressive",
        "mem_len": 64,
        "c_mem_len": 64,
        "compression_rate": 4,
        "segment_len": 16,
    }
    by_store = {}
    for n_steps in (10_000, None):
        module = module_of(n_steps, **settings)
        steps = stepped(module, torch.randn(4, 64, 3), torch.zeros(4, 64, 1, dtype=torch.bool))
        memories = steps["memory"], steps["next", "memory"]
        n_bytes = sum(x.numel() * x.element_size() for x in memories)
        if n_steps is not None:
            rings = (module.memories.memories, module.memories.features, module.memories.links)
            n_bytes += sum(ring.count * ring.rows[0].numel() * ring.rows.element_size() for ring in rings)
        by_store[n_steps] = n_bytes / (4 * 64)
    # n_valid, M and C of both layers, the features and their number.
    row = 1 + 2 * (64 + 64) * 8 + 15 * 3 + 1
    assert by_store[None] == 2 * 4 * row
    assert by_store[10_000] == 2 * 8 + (1 + 2 * (64 + 64) * 8) * 4 / 16 + 3 * 4 + 3 * 8


class Counting(MemoryRule):
    """A memory with a state besides keys."""

    @classmethod
    def sizes(cls, config):
        return [MemorySizes(mem_len=4)] * config.n_layers

    def update(self, past, x, context):
        count = past.state.get("count", x.new_zeros(1, x.shape[1], 1)) + len(x)
        return LayerMemory(x[-4:], x[:0], state={"count": count}), None


def test_a_memory_with_a_state_of_its_own_is_refused():
    module = module_of(model=Counting, segment_len=4)
    with pytest.raises(ValueError, match="use a memory without a state"):
        stepped(module, torch.randn(2, 6, 3), torch.zeros(2, 6, 1, dtype=torch.bool))


def test_a_window_teaches_all_weights_and_compressions_too():
    module = module_of(**CORES[2])
    x = torch.randn(2, 24, 3)
    begins = torch.zeros(2, 24, 1, dtype=torch.bool)
    steps = stepped(module, x, begins).select("observation", "is_init", "memory")
    with set_recurrent_mode(True):
        module(steps)["embed"].square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters() if p.shape != (8,))
    learned = {name: p.grad.clone() for name, p in module.core.named_parameters() if ".f_c." in name}
    module.zero_grad()
    _, losses, _ = read(module.core, x.transpose(0, 1), memory=module.core.initial(2))
    sum(losses).backward()
    for name, p in module.core.named_parameters():
        if ".f_c." in name:
            assert torch.allclose(p.grad, learned[name], atol=1e-5)


def test_what_is_missing_or_does_not_fit_is_refused_in_a_line():
    with pytest.raises(ValueError, match="multiple of compression_rate=2"):
        module_of(**CORES[2] | {"segment_len": 5})
    module = module_of(**CORES[0])
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match="make_tensordict_primer"):
        module(TensorDict({"observation": x, "is_init": torch.ones(2, 1, dtype=torch.bool)}, [2]))
    primer = module.make_tensordict_primer().primers["memory"]
    with pytest.raises(ValueError, match="InitTracker"):
        module(TensorDict({"observation": x, "memory": primer.zero((2,))}, [2]))
    assert get_primers_from_module(nn.Sequential(module)).primers["memory"].shape == primer.shape


def test_a_ring_keeps_its_newest_rows_whatever_its_size_was():
    ring = Ring()
    appended = torch.empty(0, 2)
    for n, size in ((3, 8), (4, 8), (5, 8), (1, 20), (9, 20), (20, 20), (2, 12), (7, 31), (30, 31)):
        rows = torch.randn(n, 2)
        assert ring.append(rows, size).tolist() == [*range(len(appended), len(appended) + n)]
        appended = torch.cat((appended, rows))
        assert len(appended) - ring.oldest >= min(n, size)
        kept = torch.arange(ring.oldest, len(appended))
        assert torch.equal(ring.read(kept), appended[kept])
