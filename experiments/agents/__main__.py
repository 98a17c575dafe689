"""An agent that remembers: PPO on memory transformers, at equal keys, and on nn.GRU.

Run it with ``python -m experiments.agents --out FOLDER``; ``--quick`` shows in some minutes that a T-maze is
solved with memory and not without, ``--help`` lists every setting. Each task is an experiment of its own, in
``FOLDER/TASK``. Finished training runs are kept, and ``--resume`` goes on with those that were stopped, and
adds tasks, arms and seeds. It needs ``pip install '.[agents]'`` in a clone.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from experiments.agents.environments import Environments
from experiments.agents.ppo import AgentRun, AgentSettings
from experiments.agents.report import write_report
from memformers.commands.options import ExperimentCommand
from memformers.common.errors import UserError
from memformers.common.fields import Count, Share, changed, check_fields
from memformers.comparison.arms import read_arms
from memformers.comparison.experiment import Experiment, Settings, Task
from memformers.comparison.several import run_experiments
from memformers.models.config import ModelConfig
from memformers.training.config import TrainConfig

NETWORK = ModelConfig(
    "compressive", d_model=32, heads=2, n_layers=2, d_ff=64, segment_len=16, mem_len=16, c_mem_len=16,
)  # fmt: skip
BASE = changed(
    TrainConfig(model=NETWORK, batch_size=64, chunk_len=0, memory_warmup=0.0),
    optimizer="adamw", learning_rate=1e-3, max_grad_norm=0.5, log_every=5, checkpoint_minutes=1.0,
    precision="float32", device="cpu",
)  # fmt: skip
"""The training of all arms; its tokens are steps of the environments."""
XL = "model=transformer-xl mem_len=32"
ARMS = {
    "No memory": "none: model=transformer",
    "nn.GRU": "gru: model=transformer core=gru",
    "Transformer-XL": f"transformer-xl: {XL}",
    "Transformer-XL, gated": f"transformer-xl-gated: {XL} gate=gru",
    "Compressive": "compressive: model=compressive",
    "Compressive, gated": "compressive-gated: model=compressive gate=gru",
}
"""No memory but the window; nn.GRU; 32 keys as positions, and as 16 positions and 16 slots; and both with
gates in place of sums."""
QUICK = ("none", "gru", "transformer-xl", "compressive")


@dataclass(frozen=True)
class AgentTask(Task):
    """Training runs that act in environments, which measure the share of episodes that end in success."""

    name = "agent"
    module = "experiments.agents.run"
    reporter = "experiments.agents.report"

    def parse(self, settings: Settings, source: str) -> AgentRun:
        """The run's TrainConfig, and what belongs to the agent."""
        return AgentRun.of(settings, source)

    def read(self, runs: Mapping[str, Settings], folder: Path) -> Callable[[], Settings]:
        """Nothing but whether there are such environments."""
        for task in {settings["agent"]["task"] for settings in runs.values()}:
            Environments(task, 1).close()
        return dict


@dataclass(frozen=True)
class Agents(ExperimentCommand):
    """Train an agent with each memory on each task, from several seeds."""

    name: ClassVar = "agents"
    tasks: tuple[str, ...] = ("t-maze-16", "t-maze-24", "t-maze-60", "t-maze-80")
    """T-mazes by their corridors' lengths, or ids of gymnasium environments."""
    steps: Count = 400_000
    """Steps of all environments together, in each training run."""
    entropy: Share = AgentSettings.entropy
    """The weight of the policy's entropy: how much an agent is made to explore."""
    seeds: Count = 5
    """How many times each arm is trained. Intervals need at least 2."""
    arms: tuple[str, ...] = ()
    """Which arms, by their names; all of them if none is named."""
    jobs: Count = 2
    """Training runs at a time, of one thread each."""
    quick: bool = False
    """Whether to show in some minutes that memories solve what is guessed without: one T-maze, whose sign is
    just out of the window, one seed, and no gates."""

    def __post_init__(self) -> None:
        """Raise UserError for settings that are out of range."""
        check_fields(self)
        known = [arm.partition(":")[0] for arm in ARMS.values()]
        if unknown := [name for name in self.arms if name not in known]:
            raise UserError(f"expected arms among {', '.join(known)}, got {' '.join(unknown)}.")

    def experiments(self) -> dict[str, Experiment]:
        """The experiment of each task."""
        train = replace(BASE, tokens=min(self.steps, 100_000) if self.quick else self.steps)
        chosen = self.arms or (QUICK if self.quick else ())
        found = {}
        for task in self.tasks[:1] if self.quick else self.tasks:
            more = {AgentTask.name: asdict(AgentSettings(task, entropy=self.entropy))}
            described = read_arms([*ARMS.values()], asdict(train) | more)
            labelled = [replace(arm, label=label) for arm, label in zip(described, ARMS, strict=True)]
            arms = [arm for arm in labelled if not chosen or arm.name in chosen]
            seeds = 1 if self.quick else self.seeds
            found[task] = Experiment(AgentTask(), train, more, tuple(arms), seeds, self.jobs, 1)
        return found

    def experiment(self, folder: Path) -> Path:
        """Train what ``folder`` doesn't have yet, and write the report of all tasks."""
        return run_experiments(self.experiments(), folder, write_report, self.dashboard, resume=self.resume)


if __name__ == "__main__":
    Agents.main()
