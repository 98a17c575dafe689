"""Environments side by side, through gymnasium, as tensors and checked."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memformers.common.errors import UserError

T_MAZE = "t-maze-"
"""The beginning of the name of a T-maze; its corridor's length follows."""


class Step(NamedTuple):
    """What a step of B environments gave."""

    seen: Tensor
    """Float32 ``[B, F]``."""
    reward: Tensor
    """Float32 ``[B]``."""
    terminated: Tensor
    """Boolean ``[B]``: where an episode ended, so that nothing more can be earned in it."""
    truncated: Tensor
    """Boolean ``[B]``: where it was cut off, as by a time limit."""


class Environments:
    """``number`` environments of a ``task``: ``t-maze-LENGTH``, or the id of any gymnasium environment that
    is observed as numbers and acted in by a choice of actions.

    After an episode's last observation, the next step begins another one, whatever its action is (gymnasium's
    ``NEXT_STEP``). Raises UserError for another kind of environment, and for one that can't be made, raises
    an error itself, or returns arrays of other shapes or observations and rewards that are not finite.
    """

    def __init__(self, task: str, number: int):
        self.task, self.number, self.steps = task, number, 0
        try:
            import gymnasium
        except ImportError as error:
            raise missing(error) from None
        try:
            self.envs = make(task, number)
        except Exception as error:  # whatever an environment of someone else raises
            raise UserError(
                f"the environment {task!r} can't be made: {' '.join(str(error).split())}"
            ) from None
        seen, actions = self.envs.single_observation_space, self.envs.single_action_space
        spaces = gymnasium.spaces
        if not isinstance(seen, spaces.Box) or not isinstance(actions, spaces.Discrete):
            raise UserError(
                f"expected {task} to be observed as numbers, with Discrete actions, got {seen} and "
                f"{actions}; wrap it."
            )
        self.features, self.actions = int(np.prod(seen.shape)), int(actions.n)
        self.first_action = int(actions.start)

    def reset(self, seed: int) -> Tensor:
        """Begin all episodes; what is seen, ``[B, F]``."""
        seen, _ = self.called("reset", seed=seed)
        return self.checked("observations", seen, (self.number, self.features), torch.float32)

    def step(self, actions: Tensor) -> Step:
        """Act in each environment: ``actions [B]``, from 0 on."""
        seen, reward, terminated, truncated, _ = self.called("step", actions.numpy() + self.first_action)
        self.steps += 1
        each = (self.number,)
        return Step(
            self.checked("observations", seen, (*each, self.features), torch.float32),
            self.checked("rewards", reward, each, torch.float32),
            self.checked("done (terminated)", terminated, each, torch.bool),
            self.checked("done (truncated)", truncated, each, torch.bool),
        )

    def called(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What a method of the environments returned; UserError for whatever it raised."""
        try:
            return getattr(self.envs, method)(*args, **kwargs)
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"{self.task} raised an error at step {self.steps}: {said}; mend it.") from error

    def checked(self, name: str, values: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """``values`` as a tensor of this ``shape``; what is observed becomes one row for each environment."""
        array = np.asarray(values)
        if array.shape[:1] != shape[:1] or array.size != np.prod(shape):
            raise UserError(
                f"expected {name} of {self.task} as {list(shape)} at step {self.steps}, got "
                f"{list(array.shape)}; return one for each environment."
            )
        if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
            raise UserError(
                f"expected finite {name} of {self.task}, got others at step {self.steps}; mend it."
            )
        return torch.tensor(array.reshape(shape), dtype=dtype)

    def close(self) -> None:
        """Let go of the environments."""
        self.envs.close()


def make(task: str, number: int) -> Any:
    """The vectorized environments of a ``task``."""
    import gymnasium
    from gymnasium.wrappers import FlattenObservation

    if task.startswith(T_MAZE):
        from experiments.agents.t_maze import TMaze

        length = task.removeprefix(T_MAZE)
        if not length.isdecimal() or int(length) < 1:
            raise UserError(f"expected a T-maze as {T_MAZE}LENGTH, such as {T_MAZE}20, got {task}.")
        return TMaze(number, int(length))
    wrappers: list[Any] = []
    if task.startswith("MiniGrid"):
        try:
            from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper  # which also registers them
        except ImportError as error:
            raise missing(error) from None
        wrappers = [OneHotPartialObsWrapper, ImgObsWrapper]
    wrappers.append(FlattenObservation)
    return gymnasium.make_vec(task, num_envs=number, vectorization_mode="sync", wrappers=wrappers)


def missing(error: ImportError) -> UserError:
    """The refusal where a package is not installed."""
    return UserError(
        f"{error.name} is not installed; use pip install '.[agents]' in a clone of the repository."
    )
