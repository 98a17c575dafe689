"""The settings of a recall experiment, and those of each of its trainings."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from memformers.common.errors import UserError
from memformers.common.files import config_from_dict, read_json, write_json
from memformers.data.recall_stream import RecallStream
from memformers.evaluation.recall_by_distance import distance_edges
from memformers.recall.arms import SETTINGS, Arm, Reach, Setting
from memformers.runs.folder import CONFIG
from memformers.training.config import TrainConfig

QUICK_TOKENS, QUICK_EVALUATED = 65_536, 256
RECALL = "recall"
"""The key of a run's config for settings outside of
[`TrainConfig`][memformers.training.config.TrainConfig]."""


@dataclass(frozen=True)
class RecallConfig:
    """A recall experiment."""

    reach: Reach = "near"
    """How far back the memories reach: 384 positions (near) or more than 2,048 (far)."""
    seeds: int = 2
    """How many times each arm is trained, each time from other weights and on another stream."""
    quick: bool = False
    """Whether to only check in a minute or two that everything works, with one seed and few tokens."""
    tokens: int | None = None
    """The number of tokens of each training, in place of the default of --reach."""
    arms: tuple[str, ...] = ()
    """Which arms to train; if none is named, no-memory, transformer-xl, compressive, frozen, mean, and near
    the ceiling. Others are bptt, max, auto-encoding, most-used, dilated, conv and upper-half."""
    jobs: int = min(os.cpu_count() or 1, 2)
    """The number of trainings at a time, each with --threads threads."""
    threads: int = 1
    """The number of threads of each training. Models of this size are hardly faster with two."""
    device: str = "auto"
    """Where to train, such as cpu or cuda:1; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        """Raise UserError for settings that are out of range."""
        if self.reach not in get_args(Reach):
            raise UserError(f"reach={self.reach!r} is unknown; use near or far.")
        for name in ("seeds", "jobs", "threads", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value} is too small; use at least 1.")
        if len(set(self.arms)) < len(self.arms):
            raise UserError(f"arms={' '.join(self.arms)} must name each arm once.")
        for name in self.arms:
            self.base.arm(name)

    @property
    def base(self) -> Setting:
        """The setting of this reach, without changes by other options."""
        return SETTINGS[self.reach]

    @property
    def setting(self) -> Setting:
        """The setting that all arms share."""
        base = self.base
        tokens = self.tokens or (QUICK_TOKENS if self.quick else base.train.tokens)
        train = replace(base.train, tokens=tokens, device=self.device)
        if self.quick:
            return replace(base, train=replace(train, evaluations=1, log_every=5), evaluated=QUICK_EVALUATED)
        return replace(base, train=train)

    @property
    def chosen(self) -> tuple[Arm, ...]:
        """The arms to train, in their order."""
        return tuple(arm for arm in self.base.all_arms if arm.name in self.arms) or self.base.arms

    @property
    def n_seeds(self) -> int:
        """The number of seeds."""
        return 1 if self.quick else self.seeds


@dataclass(frozen=True)
class OfAnArm:
    """The settings of one training that are not in its TrainConfig."""

    arm: str
    title: str
    frozen: bool
    """Whether f_c keeps its initial random weights."""
    growing: float
    evaluated: int
    reach: int
    """The longest reach of all arms, in positions; it determines the distance bins."""
    jobs: int
    """Trainings that run at the same time."""
    stream: RecallStream = field(default_factory=RecallStream)

    @property
    def edges(self) -> tuple[int, ...]:
        """The edges of the distance bins, the same for all arms."""
        return distance_edges(self.reach)


@dataclass(frozen=True)
class ArmRun:
    """One arm's training from one seed."""

    train: TrainConfig
    more: OfAnArm

    def longest(self) -> Callable[[int], int] | None:
        """The longest distance of a question in a segment, as a function of the position where the segment
        begins in its stream; None if there is no limit."""
        S, top = self.train.model.segment_len, 2 * self.more.reach
        grown = self.more.growing * self.train.tokens / self.train.batch_size
        if not grown:
            return None
        return lambda start: round(S * (top / S) ** (start / grown)) if start < grown else 2**60

    def save(self, folder: Path) -> None:
        """Write it as the config of the run in ``folder``."""
        write_json(folder / CONFIG, {**asdict(self.train), RECALL: asdict(self.more)})


def run_of(setting: Setting, arm: Arm, seed: int, jobs: int) -> ArmRun:
    """The training of ``arm`` from ``seed``."""
    network = replace(arm.network(setting.train.model), vocab_size=setting.stream.vocab_size)
    more = OfAnArm(
        arm=arm.name,
        title=arm.title,
        frozen=arm.frozen,
        growing=setting.growing,
        evaluated=setting.evaluated,
        reach=setting.reach,
        jobs=jobs,
        stream=setting.stream,
    )
    return ArmRun(replace(setting.train, model=network, seed=seed), more)


def read_run(folder: Path) -> ArmRun:
    """The training that [`ArmRun.save`][] wrote into ``folder``; else ValueError."""
    path = folder / CONFIG
    data: dict[str, Any] = read_json(path)
    if not isinstance(more := data.pop(RECALL, None), dict):
        raise UserError(f"{path} is not the config of a recall experiment: it has no {RECALL!r}.")
    return ArmRun(config_from_dict(TrainConfig, data, str(path)), config_from_dict(OfAnArm, more, str(path)))
