"""TorchRL with our memory: steps and windows, and an agent that its own PPO teaches."""

from itertools import pairwise

import pytest
import torch
from torch import nn

pytest.importorskip("torchrl", reason="torchrl is not installed; use pip install '.[torchrl]' in a clone")

from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import Compose, EnvBase, InitTracker, TransformedEnv
from torchrl.modules import ProbabilisticActor, ValueOperator, get_primers_from_module, set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from memformers import CoreConfig, MemoryCore
from memformers.integrations.torchrl import MemoryModule

SMALL = {"d_model": 8, "heads": 2, "n_layers": 2, "d_ff": 16, "dropout": 0.0}
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
            given = steps.select("observation", "is_init", "memory")[:, window]
            assert torch.allclose(module(given.clone())["embed"], steps["embed"][:, window], atol=1e-5)
    one = module(steps[2, 30].select("observation", "is_init", "memory"))  # of an environment without a batch
    assert torch.allclose(one["next", "memory"], steps["next", "memory"][2, 30], atol=1e-5)
    for b in range(4):
        starts = [*begins[b, :, 0].nonzero()[:, 0].tolist(), 37]
        for begin, end in pairwise(starts):
            memory, read = None, []
            for segment in x[b, begin:end, None].split(module.core.config.segment_len):
                output, memory, _ = module.core(segment, memory)
                read.append(output[:, 0])
            assert torch.allclose(torch.cat(read), steps["embed"][b, begin:end], atol=1e-5)


def test_a_window_reaches_all_weights_and_compressions_learn_without_their_loss_being_added():
    module, x, begins = module_of(**CORES[2]), torch.randn(2, 24, 3), torch.zeros(2, 24, 1, dtype=torch.bool)
    steps = stepped(module, x, begins).select("observation", "is_init", "memory")
    with set_recurrent_mode(True):
        module(steps)["embed"].square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters() if p.shape != (8,))
    learned = {name: p.grad.clone() for name, p in module.core.named_parameters() if "compress" in name}
    module.zero_grad()
    memory, losses = module.core.initial(2), []
    for segment in x.transpose(0, 1).split(4):
        _, memory, loss = module.core(segment, memory)
        losses.append(loss)
    sum(losses).backward()
    for name, p in module.core.named_parameters():
        if "compress" in name:
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


class TMaze(EnvBase):
    """A sign at the first step says where to turn at the end of a corridor."""

    def __init__(self, number, length):
        super().__init__(batch_size=[number])
        self.length = length
        self.observation_spec = Composite(observation=Unbounded((number, 4)), shape=(number,))
        self.action_spec = Categorical(3, shape=(number,))
        self.reward_spec = Unbounded((number, 1))
        self.place, self.sign = torch.zeros(2, number, dtype=torch.int64)

    def _set_seed(self, seed):
        torch.manual_seed(seed)

    def seen(self):
        first, junction = self.place == 0, self.place == self.length
        seen = first & (self.sign == 0), first & (self.sign == 1), junction, ~first & ~junction
        return {"observation": torch.stack(seen, -1).float()}

    def _reset(self, given=None):
        which = torch.ones(self.batch_size, dtype=torch.bool)
        which = which if given is None else given.get("_reset", which).view(-1)
        self.place = self.place.masked_fill(which, 0)
        self.sign = torch.where(which, torch.randint(2, self.batch_size), self.sign)
        return TensorDict(self.seen(), self.batch_size)

    def _step(self, given):
        action, at_junction = given["action"], self.place == self.length
        done = at_junction & (action > 0)
        reward = (done & (action - 1 == self.sign)).float() - 0.1 * (~done & ((action > 0) | at_junction))
        self.place = self.place + (~at_junction & (action == 0))
        ends = {"reward": reward[:, None], "done": done[:, None], "terminated": done[:, None]}
        return TensorDict(self.seen() | ends, self.batch_size)


def success_after_training(windows, **settings):
    """The share of episodes that end at the sign's side, after training in at most so many windows."""
    B, T, found = 32, 16, []
    shared = {"d_input": 4, "d_model": 32, "heads": 2, "n_layers": 2, "d_ff": 64}
    memory = MemoryModule(MemoryCore(CoreConfig(**shared, **settings)))
    env = TransformedEnv(TMaze(B, 10), Compose(InitTracker(), memory.make_tensordict_primer()))
    policy = TensorDictSequential(memory, TensorDictModule(nn.Linear(32, 3), ["embed"], ["logits"]))
    categorical = {"distribution_class": torch.distributions.Categorical, "return_log_prob": True}
    actor = ProbabilisticActor(policy, in_keys=["logits"], spec=env.action_spec, **categorical)
    critic = TensorDictSequential(memory, ValueOperator(nn.Linear(32, 1), in_keys=["embed"]))
    advantages = GAE(gamma=0.99, lmbda=0.95, value_network=critic, deactivate_vmap=True)
    losses = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.05)
    optimizer = torch.optim.Adam(losses.parameters(), 3e-3)
    for data in Collector(env, actor, frames_per_batch=B * T, total_frames=windows * B * T):
        with torch.no_grad():
            advantages(data)
        for rows in [*torch.randperm(B).chunk(2)] * 4:
            found_losses = losses(data[rows])
            optimizer.zero_grad()
            sum(found_losses[f"loss_{name}"] for name in ("objective", "critic", "entropy")).backward()
            nn.utils.clip_grad_norm_(losses.parameters(), 0.5)
            optimizer.step()
        earned = data["next", "reward"][data["next", "done"]]
        found.append((earned > 0).float().mean().item() if len(earned) else 0.0)
        if min(found[-3:]) > 0.95:
            break
    return sum(found[-3:]) / 3


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"model": "transformer-xl", "mem_len": 16, "segment_len": 8},
        {"model": "compressive", "mem_len": 4, "c_mem_len": 4, "compression_rate": 2, "segment_len": 4},
    ],
    ids=lambda settings: settings["model"],
)
def test_torchrls_ppo_solves_a_t_maze_with_a_memory(settings):
    assert success_after_training(60, **settings) > 0.95


@pytest.mark.long
def test_the_maze_is_a_guess_without_a_memory():
    assert success_after_training(25, model="transformer", segment_len=8) < 0.75
