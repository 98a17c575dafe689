#!/bin/sh
# gymnasium 1.4.0: NormalizeReward adds the last reward of an episode, or all of them, to the return of the next one.
#
# Rewards are divided by the standard deviation of the discounted return. At a step that terminates, the wrapper drops the
# rewards before it, not those after it: an episode's last return is its last reward, which the next episode then
# continues; reset() drops nothing. A time limit doesn't end a return at all, so it grows to 1 / (1 - gamma) rewards,
# whatever the length of an episode. Tasks for memory end by time limits, or have their only reward at the end. The
# vector wrapper of the same name does this in the default mode, but not in the mode SAME_STEP.
# Guess: each episode's return starts at its first reward.
# Output seen: returns of 3 episodes of 3 rewards of 1, gamma 0.9, of which each should be 1.00,1.90,2.71:
# terminated 1.00,1.90,1.00 1.90,2.71,1.00 1.90,2.71,1.00; time limit 1.00,1.90,2.71 3.44,4.10,4.69 5.22,5.70,6.13
# vector, NEXT_STEP: the same; vector, SAME_STEP: terminated 1.00,1.90,1.00, time limit 1.00,1.90,2.71 in each episode
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile gymnasium==1.4.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import NormalizeReward, TimeLimit
from gymnasium.wrappers.vector import NormalizeReward as NormalizeRewards

GAMMA = 0.9
N_STEPS = 3


class Steady(gym.Env):
    """Each step has a reward of 1."""

    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, terminates):
        self.terminates = terminates

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.n_steps += 1
        return np.zeros(1, np.float32), 1.0, self.terminates and self.n_steps == N_STEPS, False, {}


def environment(terminates=False):
    return Steady(terminates) if terminates else TimeLimit(Steady(terminates), N_STEPS)


def returns(terminates):
    normalized = NormalizeReward(environment(terminates), gamma=GAMMA)
    values = []
    for _ in range(3):
        normalized.reset()
        for _ in range(N_STEPS):
            normalized.step(0)
            values.append(np.asarray(normalized.discounted_reward).item())
    return values


def returns_in_vector(terminates, mode):
    vector = SyncVectorEnv([lambda: environment(terminates)], autoreset_mode=mode)
    normalized = NormalizeRewards(vector, gamma=GAMMA)
    scales = []
    update = normalized.return_rms.update
    normalized.return_rms.update = lambda values: (scales.append(values.item()), update(values))
    normalized.reset()
    while len(scales) < 3 * N_STEPS:
        normalized.step(np.zeros(1, int))
    return scales


def shown(values):
    return " ".join(",".join(f"{value:.2f}" for value in values[i : i + 3]) for i in range(0, len(values), 3))


terminated, limited = returns(True), returns(False)
next_step = [returns_in_vector(terminates, AutoresetMode.NEXT_STEP) for terminates in (True, False)]
same_step = [returns_in_vector(terminates, AutoresetMode.SAME_STEP) for terminates in (True, False)]
is_same = np.allclose(next_step, [terminated, limited])
print(
    f"returns of 3 episodes of 3 rewards of 1, gamma {GAMMA}, of which each should be 1.00,1.90,2.71:\n"
    f"terminated {shown(terminated)}; time limit {shown(limited)}\n"
    f"vector, NEXT_STEP: {'the same' if is_same else 'others'}; vector, SAME_STEP: "
    f"terminated {shown(same_step[0][:3])}, time limit {shown(same_step[1][:3])} in each episode"
)
assert np.allclose(terminated, [1, 1.9, 1, 1.9, 2.71, 1, 1.9, 2.71, 1])
assert np.allclose(limited, [(1 - GAMMA**n) / (1 - GAMMA) for n in range(1, 10)])
assert is_same
assert np.allclose(same_step, [3 * [1, 1.9, 1], 3 * [1, 1.9, 2.71]])
PYTHON
