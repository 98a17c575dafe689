"""The T-maze: a sign at the start says where to turn at the end of a corridor (Bakker 2001; Ni et al. 2023,
arXiv 2307.03864)."""

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

FORWARD = 0  # the action that walks on; 1 and 2 turn left and right


class TMaze(VectorEnv):
    """Mazes with a corridor of ``length`` steps, walked through side by side.

    What is seen are four numbers of 0 or 1: the sign for left and that for right, at the first step only; the
    junction; the corridor. A turn at the junction ends the episode; it earns 1 if it is the sign's. Any other
    step that doesn't walk on costs 1 / ``length``. After 2 · ``length`` + 8 steps the episode is cut off.
    """

    def __init__(self, num_envs: int, length: int):
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs, self.length = num_envs, length
        self.single_observation_space, self.single_action_space = Box(0, 1, (4,)), Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.place, self.steps, self.sign = np.zeros((3, num_envs), dtype=np.int64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin all mazes; what is seen ``[B, 4]``."""
        super().reset(seed=seed)
        self.ended = np.zeros(self.num_envs, dtype=bool)
        self.begin(~self.ended)
        return self.seen(), {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """One step of each: what is seen ``[B, 4]``; reward, whether it ended and was cut off, ``[B]``."""
        begins, at_junction, walks = self.ended, self.place == self.length, actions == FORWARD
        terminated = ~begins & at_junction & ~walks
        reward = (terminated & (actions == 1 + self.sign)) - (~begins & (at_junction == walks)) / self.length
        self.place += walks & ~at_junction
        self.steps += 1
        truncated = ~begins & ~terminated & (self.steps >= 2 * self.length + 8)
        self.begin(begins)
        self.ended = terminated | truncated
        return self.seen(), reward, terminated, truncated, {}

    def begin(self, which: np.ndarray) -> None:
        self.place[which] = self.steps[which] = 0
        self.sign[which] = self.np_random.integers(0, 2, self.num_envs)[which]

    def seen(self) -> np.ndarray:
        first, junction = self.steps == 0, self.place == self.length
        seen = (first & (self.sign == 0), first & (self.sign == 1), junction, ~first & ~junction)
        return np.stack(seen, axis=1).astype(np.float32)
