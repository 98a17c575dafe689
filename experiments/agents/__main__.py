"""An agent that remembers: PPO on memory transformers, at equal keys, and on nn.GRU.

Run it with ``python -m experiments.agents --out FOLDER``; ``--quick`` shows in some minutes that a T-maze is
solved with memory and not without. It needs ``pip install '.[agents]'`` in a clone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from experiments.agents.agent import AgentRun, AgentSettings
from experiments.agents.ppo import AgentTask
from experiments.arms import ArmsCommand, Variant
from experiments.columns import ArmsByTask, Column, ColumnsByTable
from memformers.common.fields import Count, Share, replace_nested
from memformers.comparison.experiment import Experiment
from memformers.models.config import ModelConfig
from memformers.report.arms import Measure, Result
from memformers.report.rendering import Report

NETWORK = ModelConfig(
    "compressive", d_model=32, n_heads=2, n_layers=2, d_ff=64, segment_len=16, mem_len=16, c_mem_len=16,
)  # fmt: skip
# Its tokens are steps of the environments.
BASE = replace_nested(
    AgentRun(model=NETWORK, batch_size=64, chunk_len=0, memory_warmup=0.0, agent=AgentSettings()),
    optimizer="adamw", learning_rate=1e-3, max_grad_norm=0.5, log_every=5, precision="float32", device="cpu",
)  # fmt: skip
XL = {"model": "transformer-xl", "mem_len": 32}
COMPRESSIVE = {"model": "compressive"}
GATED = {"gate": "gru"}
VARIANTS = (
    Variant("none", {"model": "transformer"}, "No memory"),
    Variant("gru", {"model": "transformer", "core": "gru"}, "nn.GRU"),
    Variant("transformer-xl", XL, "Transformer-XL"),
    Variant("transformer-xl-gated", XL | GATED, "Transformer-XL, gated"),
    Variant("compressive", COMPRESSIVE, "Compressive"),
    Variant("compressive-gated", COMPRESSIVE | GATED, "Compressive, gated"),
)
"""No memory but the window; nn.GRU; 32 keys as positions, or as 16 and 16 slots; and both with gates."""
QUICK_ARMS = ("none", "gru", "transformer-xl", "compressive")
QUICK_STEPS = 100_000
"""Enough for a T-maze that is solved with memory and not without."""
SUCCESS = Measure(**AgentTask.info.measure)
RETURN = Measure("return", "return", ".2f", better=1)


@dataclass(frozen=True)
class Agents(ArmsCommand):
    """Train an agent with each memory on each task, from several seeds."""

    name: ClassVar = "agents"
    title: ClassVar = "An agent that remembers"
    method: ClassVar = (
        "Each arm is trained by the same PPO with equal settings and steps. Success is the share "
        "of episodes that end with a reward, after the training and with the likeliest actions. Chance on a "
        "T-maze is 50 %. No gradient goes beyond a window, in any arm: nn.GRU's state is carried on, but "
        "what is written into it is learned within the window alone."
    )
    base: ClassVar = "transformer-xl"
    variants: ClassVar = VARIANTS
    seeds: Count = 5
    tasks: tuple[str, ...] = ("t-maze-16", "t-maze-24", "t-maze-60", "t-maze-80")
    """T-mazes by their corridors' lengths, or ids of gymnasium environments."""
    steps: Count = 400_000
    """Steps of all environments together, in each training run."""
    entropy: Share = AgentSettings.entropy
    """The weight of the policy's entropy: how much an agent is made to explore."""

    def plan_experiments(self, folder: Path) -> dict[str, Experiment]:
        command = self
        if self.quick:
            arms = self.arms or QUICK_ARMS
            steps = min(self.steps, QUICK_STEPS)
            command = replace(self, arms=arms, tasks=self.tasks[:1], steps=steps)
        experiments = {}
        for task in command.tasks:
            agent = AgentSettings(task, entropy=command.entropy)
            base = replace(BASE, max_tokens=command.steps, agent=agent)
            experiments[task] = command.plan_experiment(AgentTask(), base)
        return experiments

    def columns_by_table(self, arms_by_task: ArmsByTask) -> ColumnsByTable:
        measures = {"": SUCCESS, "Returns": RETURN}
        for control in list_controls(arms_by_task):
            measures[f"Successes with {control}"] = success_under(control)
        tables = {}
        for title, measure in measures.items():
            suffix = f", {title.lower()}" if title else ""
            tables[title] = [Column(f"{task}{suffix}", measure, arms) for task, arms in arms_by_task.items()]
        return tables


def list_controls(arms_by_task: ArmsByTask) -> list[str]:
    """The controls of memory that any result has."""
    controls: dict[str, None] = {}  # in order
    for arms in arms_by_task.values():
        for arm in arms:
            for result in arm.results.values():
                controls |= dict.fromkeys(result["controls"])
    return [*controls]


def success_under(control: str) -> Measure:
    """How much the share of successes changes under a ``control``."""

    def read_change(result: Result) -> float | None:
        scores = result["controls"].get(control)
        if scores is None:
            return None
        change: float = scores["success"] - result["success"]
        return change

    return replace(SUCCESS, label=control, of=read_change)


write_report: Callable[[Path], Report] = Agents().write_report

if __name__ == "__main__":
    Agents.main()
