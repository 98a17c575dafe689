"""TorchRL with our memory: steps and windows. The guide has its PPO."""

from itertools import pairwise

import pytest
import torch
from torch import nn

pytest.importorskip("torchrl", reason="torchrl is not installed; use pip install '.[torchrl]' in a clone")

from tensordict import TensorDict
from torchrl.modules import get_primers_from_module, set_recurrent_mode

from memformers import CoreConfig, MemoryCore
from memformers.integrations.torchrl import MemoryModule
from tests.texts import read

SMALL = {"d_model": 8, "n_heads": 2, "n_layers": 2, "d_ff": 16, "dropout": 0.0}
CORES = [
    {"model": "transformer-xl", "mem_len": 7, "segment_len": 5},
    {"model": "transformer-xl", "mem_len": (3, 9), "segment_len": 1},
    {"model": "compressive", "mem_len": 6, "c_mem_len": 3, "compression_rate": 2, "segment_len": 4},
    {"model": "transformer", "segment_len": 6},
]


def module_of(**settings):
    return MemoryModule(MemoryCore(CoreConfig(d_input=3, **SMALL, **settings)))


def stepped(module, x, begins):
    """Features ``x [B, T, F]`` step by step, as a collector keeps them, ``[B, T]``."""
    steps, memory = [], torch.zeros(len(x), *module.make_tensordict_primer().primers["memory"].shape)
    for features, is_init in zip(x.unbind(1), begins.unbind(1), strict=True):
        read = TensorDict({"observation": features, "is_init": is_init, "memory": memory}, [len(x)])
        steps.append(module(read))
        steps[-1]["memory"] = memory.masked_fill(is_init, 0)  # as the primer does
        memory = steps[-1]["next", "memory"]
    return torch.stack(steps, 1)


@pytest.mark.parametrize("settings", CORES, ids=str)
def test_single_steps_windows_from_anywhere_and_episodes_alone_give_the_same_numbers(settings):
    module, x, begins = module_of(**settings), torch.randn(4, 37, 3), torch.rand(4, 37, 1) < 0.1
    begins[:, 0] = True
    steps = stepped(module, x, begins)
    with set_recurrent_mode(True):
        for window in (slice(0, 37), slice(11, 29), slice(30, 31)):
            part = steps.select("observation", "is_init", "memory")[:, window]
            assert torch.allclose(module(part.clone())["embed"], steps["embed"][:, window], atol=1e-5)
    one = module(steps[2, 30].select("observation", "is_init", "memory"))  # of an environment without a batch
    assert torch.allclose(one["next", "memory"], steps["next", "memory"][2, 30], atol=1e-5)
    for b in range(4):
        starts = [*begins[b, :, 0].nonzero()[:, 0].tolist(), 37]
        for begin, end in pairwise(starts):
            read_alone, *_ = read(module.core, x[b, begin:end, None])
            assert torch.allclose(read_alone[:, 0], steps["embed"][b, begin:end], atol=1e-5)


def test_a_window_reaches_all_weights_and_compressions_learn_without_their_loss_being_added():
    module, x, begins = module_of(**CORES[2]), torch.randn(2, 24, 3), torch.zeros(2, 24, 1, dtype=torch.bool)
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
    module, x = module_of(**CORES[0]), torch.randn(2, 3)
    with pytest.raises(ValueError, match="make_tensordict_primer"):
        module(TensorDict({"observation": x, "is_init": torch.ones(2, 1, dtype=torch.bool)}, [2]))
    primer = module.make_tensordict_primer().primers["memory"]
    with pytest.raises(ValueError, match="InitTracker"):
        module(TensorDict({"observation": x, "memory": primer.zero((2,))}, [2]))
    assert get_primers_from_module(nn.Sequential(module)).primers["memory"].shape == primer.shape
