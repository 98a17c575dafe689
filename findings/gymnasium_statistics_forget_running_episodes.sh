#!/bin/sh
# gymnasium 1.4.0: when some environments of a vector are reset, RecordEpisodeStatistics starts the count of all of them anew.
#
# With AutoresetMode.DISABLED, one resets the finished environments oneself, by reset(options={"reset_mask": mask}); an
# agent with a memory clears it by the same mask. The others continue their episodes, but the wrapper sets the
# returns and lengths of all of them to zero. So an episode has only the steps since the last end of another one, and long
# episodes, in which much must be remembered, look short and poor. The other two modes count right.
# Guess: the statistics of an environment that isn't in the mask continue.
# Output seen: lengths of episodes of 3 and 5 steps in 14 steps: next_step 3,5,3,3,5; same_step 3,5,3,3,5,3; disabled
# 3,2,1,3,1,2
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
from gymnasium.wrappers import TimeLimit
from gymnasium.wrappers.vector import RecordEpisodeStatistics


class Endless(gym.Env):
    """Each step has a reward of 1; the time limit ends an episode."""

    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}


def recorded_lengths(mode):
    environments = [lambda: TimeLimit(Endless(), 3), lambda: TimeLimit(Endless(), 5)]
    vector = RecordEpisodeStatistics(SyncVectorEnv(environments, autoreset_mode=mode))
    vector.reset(seed=0)
    lengths = []
    for _ in range(14):
        _, _, terminated, truncated, info = vector.step(np.zeros(2, int))
        done = terminated | truncated
        if done.any():
            lengths.extend(info["episode"]["l"][done].tolist())
            if mode == AutoresetMode.DISABLED:
                vector.reset(options={"reset_mask": done})
    return lengths


lengths = {mode: recorded_lengths(mode) for mode in AutoresetMode}
seen = [f"{mode.name.lower()} {','.join(map(str, values))}" for mode, values in lengths.items()]
print(f"lengths of episodes of 3 and 5 steps in 14 steps: {'; '.join(seen)}")
assert set(lengths[AutoresetMode.NEXT_STEP]) == {3, 5}
assert set(lengths[AutoresetMode.SAME_STEP]) == {3, 5}
assert 5 not in lengths[AutoresetMode.DISABLED]
assert {1, 2} <= set(lengths[AutoresetMode.DISABLED])
PYTHON
