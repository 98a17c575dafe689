#!/bin/sh
# tianshou 2.0.1, torch 2.13.0: a Collector keeps a recurrent state across episodes if the state is a tensor.
#
# At the end of an episode, the collector sets the rows of finished environments to zero. A Batch or a NumPy array is
# changed; for a tensor it zeroes what an index array selects, a copy. So the state of a GRU, one tensor, goes on
# through the following episodes, in training and in evaluation, while the (hidden, cell) of the library's own
# Recurrent, in a Batch, starts anew. Scores in a task for memory are then of an agent that saw earlier episodes.
# Guess: each episode starts with a state of zeros, whatever holds it.
# Output seen: steps in the state before each step of 3 episodes of 3: as Batch 0 1 2 0 1 2 0 1 2;
# as array 0 1 2 0 1 2 0 1 2; as tensor 0 1 2 3 4 5 6 7 8
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 tianshou==2.0.1 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import gymnasium as gym
import numpy as np
import torch
from tianshou.algorithm.algorithm_base import Policy
from tianshou.data import Batch, Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv

N_STEPS = 3
N_EPISODES = 3


class Short(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.n_steps += 1
        return np.zeros(1, np.float32), 1.0, self.n_steps == N_STEPS, False, {}


class Counter(Policy):
    """Its state is the number of steps that it has seen."""

    def __init__(self, pack, unpack):
        super().__init__(Short.action_space, Short.observation_space)
        self.pack = pack
        self.unpack = unpack
        self.seen = []

    def forward(self, batch, state=None, **kwargs):
        n_rows = len(batch.obs)
        n_steps = torch.zeros(n_rows, 1) if state is None else torch.as_tensor(self.unpack(state))
        self.seen.append(int(n_steps[0, 0]))
        return Batch(act=np.zeros(n_rows, int), state=self.pack(n_steps + 1))


def seen(pack, unpack):
    policy = Counter(pack, unpack)
    buffer = VectorReplayBuffer(100, 1)
    collector = Collector(policy, DummyVectorEnv([Short]), buffer)
    collector.reset()
    collector.collect(n_episode=N_EPISODES)
    return policy.seen


as_batch = seen(lambda n_steps: Batch(hidden=n_steps), lambda state: state.hidden)
as_array = seen(lambda n_steps: n_steps.numpy(), lambda state: state)
as_tensor = seen(lambda n_steps: n_steps, lambda state: state)
print(
    f"steps in the state before each step of 3 episodes of 3: as Batch {' '.join(map(str, as_batch))};\n"
    f"as array {' '.join(map(str, as_array))}; as tensor {' '.join(map(str, as_tensor))}"
)
expected = N_EPISODES * list(range(N_STEPS))
assert as_batch == as_array == expected, (as_batch, as_array)
assert as_tensor == list(range(N_EPISODES * N_STEPS)), as_tensor
PYTHON
