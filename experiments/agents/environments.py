"""Environments side by side, as tensors: a T-maze, or any of gymnasium with numbers to observe and a choice
of actions."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from memformers.common.errors import UserError

T_MAZE = "t-maze-"
"""The beginning of the name of a T-maze; its length follows."""


class Environments:
    """``number`` environments of a ``task`` side by side: ``t-maze-LENGTH``, or the id of any gymnasium
    environment that is observed as numbers and acted in by a choice of actions. After an episode's last
    observation, the next step begins another one, whatever its action is (gymnasium's ``NEXT_STEP``)."""

    def __init__(self, task: str, number: int):
        self.task = task
        self.number = number
        self.n_steps = 0
        try:
            self.envs = make(task, number)
        except Exception as error:  # an environment of someone else can raise anything
            message = f"the environment {task!r} can't be made: {' '.join(str(error).split())}"
            if isinstance(error, ImportError) and error.name in ("gymnasium", "minigrid"):
                message = f"{error.name} is not installed; use pip install '.[agents]' in a clone."
            raise UserError(message) from None
        observations = self.envs.single_observation_space
        actions = self.envs.single_action_space
        # By their names: gymnasium's types can be imported only where it is installed.
        if type(observations).__name__ != "Box" or type(actions).__name__ != "Discrete":
            raise UserError(
                f"expected {task} to be observed as numbers, with Discrete actions, "
                f"got {observations} and {actions}."
            )
        self.n_features = int(np.prod(observations.shape))
        self.n_actions = int(actions.n)
        self.first_action = int(actions.start)

    def reset(self, seed: int) -> Tensor:
        """Begin all episodes; returns observations, float32 ``[B, F]``."""
        observation, *_ = self.call("reset", seed=seed)
        return observation.view(self.number, self.n_features)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Act: ``actions [B]``. Returns the next observations, float32 ``[B, F]``; rewards, ends and cut-offs
        ``[B]``."""
        self.n_steps += 1
        observation, reward, terminated, truncated = self.call("step", actions.numpy() + self.first_action)
        observation = observation.view(self.number, self.n_features)
        return observation, reward, terminated.bool(), truncated.bool()

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Tensor]:
        """What a ``method`` of the environments returns but for its last value, a dict of information."""
        try:
            *answer, _ = getattr(self.envs, method)(*args, **kwargs)
        except Exception as error:
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"{self.task} raised an error at step {self.n_steps}: {problem}; fix it."
            ) from error
        tensors = [torch.tensor(np.asarray(values), dtype=torch.float32) for values in answer]
        if not all(values.isfinite().all() for values in tensors):
            raise UserError(
                f"{self.task} returned numbers that are not finite at step {self.n_steps}; fix it."
            )
        return tensors


def make(task: str, number: int) -> Any:
    import gymnasium

    if task.startswith(T_MAZE):
        from experiments.agents.t_maze import TMaze

        length = task.removeprefix(T_MAZE)
        if not length.isdecimal() or int(length) < 1:
            raise UserError(f"expected a T-maze as {T_MAZE}LENGTH, such as {T_MAZE}20, got {task}.")
        return TMaze(number, int(length))
    # Whatever is observed becomes a vector.
    wrappers = [gymnasium.wrappers.FlattenObservation]
    if task.startswith("MiniGrid"):
        from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper  # which also registers them

        wrappers = [OneHotPartialObsWrapper, ImgObsWrapper, *wrappers]
    return gymnasium.make_vec(task, num_envs=number, vectorization_mode="sync", wrappers=wrappers)
