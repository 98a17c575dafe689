"""The T-maze: a sign at the start says where to turn at the end of a corridor (Bakker 2001; Ni et al. 2023,
arXiv 2307.03864)."""

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

FORWARD = 0
"""The action that walks on; 1 and 2 turn left and right."""


class TMaze(VectorEnv):
    """Mazes with a corridor of ``length`` steps, walked through side by side.

    What is seen are four numbers of 0 or 1: the sign for left and that for right, at the first step only; the
    junction; the corridor. A turn at the junction ends the episode; it earns 1 if it is the sign's. Any other
    step that doesn't walk on costs 1 / ``length``. After 2 · ``length`` + 8 steps the episode is cut off.
    """

    def __init__(self, num_envs: int, length: int):
        # What gymnasium asks of a vector environment.
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs = num_envs
        self.single_observation_space = Box(0, 1, (4,))
        self.single_action_space = Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        # Of each maze, [B]; a sign is 0 for left, and 1 for right.
        self.length = length
        self.position = np.zeros(num_envs, dtype=np.int64)
        self.n_steps = np.zeros(num_envs, dtype=np.int64)
        self.sign = np.zeros(num_envs, dtype=np.int64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin all mazes; what is seen ``[B, 4]``."""
        super().reset(seed=seed)
        self.has_ended = np.zeros(self.num_envs, dtype=bool)
        self.restart(~self.has_ended)
        return self.observe(), {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """One step of each: what is seen ``[B, 4]``; reward, whether it ended and was cut off, ``[B]``."""
        restarts = self.has_ended  # whatever the action is
        at_junction = self.position == self.length
        walks = actions == FORWARD

        # Rewards and ends.
        terminated = ~restarts & at_junction & ~walks
        is_right = terminated & (actions == 1 + self.sign)
        stands = ~restarts & (at_junction == walks)
        reward = is_right - stands / self.length

        # Movement, and a new episode after each end.
        self.position += walks & ~at_junction
        self.n_steps += 1
        truncated = ~restarts & ~terminated & (self.n_steps >= 2 * self.length + 8)
        self.restart(restarts)
        self.has_ended = terminated | truncated
        return self.observe(), reward, terminated, truncated, {}

    def restart(self, mazes: np.ndarray) -> None:
        """Begin an episode in the ``mazes [B]`` that are true."""
        self.position[mazes] = 0
        self.n_steps[mazes] = 0
        # The number of draws doesn't depend on what restarts, so that one maze doesn't change another's sign.
        signs = self.np_random.integers(0, 2, self.num_envs)
        self.sign[mazes] = signs[mazes]

    def observe(self) -> np.ndarray:
        is_first = self.n_steps == 0
        at_junction = self.position == self.length
        features = (is_first & (self.sign == 0), is_first & (self.sign == 1), at_junction,
                    ~is_first & ~at_junction)  # fmt: skip
        return np.stack(features, axis=1).astype(np.float32)
