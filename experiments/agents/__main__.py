"""An agent that remembers: PPO on memory transformers, at equal keys, and on nn.GRU.

Run it with ``python -m experiments.agents --out FOLDER``; ``--quick`` shows in some minutes that a T-maze is
solved with memory and not without. It needs ``pip install '.[agents]'`` in a clone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from experiments.agents.ppo import AgentRun, AgentSettings, AgentTask
from experiments.arms import ArmsCommand, Column, Parts, Tasks, Variant
from memformers.common.fields import Count, Share, replace_nested
from memformers.comparison.experiment import Experiment
from memformers.models.config import ModelConfig
from memformers.report.arms import Measure
from memformers.report.rendering import Report

NETWORK = ModelConfig(
    "compressive", d_model=32, n_heads=2, n_layers=2, d_ff=64, segment_len=16, mem_len=16, c_mem_len=16,
)  # fmt: skip
BASE = replace_nested(  # its tokens are steps of the environments
    AgentRun(model=NETWORK, batch_size=64, chunk_len=0, memory_warmup=0.0, agent=AgentSettings()),
    optimizer="adamw", learning_rate=1e-3, max_grad_norm=0.5, log_every=5, precision="float32", device="cpu",
)  # fmt: skip
XL = {"model": "transformer-xl", "mem_len": 32}
COMPRESSIVE = {"model": "compressive"}
GATED = {"gate": "gru"}
ARMS = (
    Variant("none", {"model": "transformer"}, "No memory"),
    Variant("gru", {"model": "transformer", "core": "gru"}, "nn.GRU"),
    Variant("transformer-xl", XL, "Transformer-XL"),
    Variant("transformer-xl-gated", XL | GATED, "Transformer-XL, gated"),
    Variant("compressive", COMPRESSIVE, "Compressive"),
    Variant("compressive-gated", COMPRESSIVE | GATED, "Compressive, gated"),
)
"""No memory but the window; nn.GRU; 32 keys as positions, or as 16 and 16 slots; and both with gates."""
QUICK = ("none", "gru", "transformer-xl", "compressive")
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
    known: ClassVar = ARMS
    seeds: Count = 5
    tasks: tuple[str, ...] = ("t-maze-16", "t-maze-24", "t-maze-60", "t-maze-80")
    """T-mazes by their corridors' lengths, or ids of gymnasium environments."""
    steps: Count = 400_000
    """Steps of all environments together, in each training run."""
    entropy: Share = AgentSettings.entropy
    """The weight of the policy's entropy: how much an agent is made to explore."""

    def experiments(self, folder: Path) -> dict[str, Experiment]:
        steps = self.steps
        command = self
        if self.quick:
            steps = min(steps, 100_000)
            command = replace(self, arms=self.arms or QUICK, tasks=self.tasks[:1])
        experiments = {}
        for task in command.tasks:
            agent = AgentSettings(task, entropy=self.entropy)
            base = replace(BASE, max_tokens=steps, agent=agent)
            experiments[task] = command.experiment_on(AgentTask(), base)
        return experiments

    def parts(self, tasks: Tasks) -> Parts:
        every = [result for arms in tasks.values() for arm in arms for result in arm.results.values()]
        controls = dict.fromkeys(name for result in every for name in result["controls"])
        parts = {"": SUCCESS, "Returns": RETURN}
        parts |= {f"Successes with {name}": under(name) for name in controls}
        return {
            title: [Column(f"{task}{title and ', '}{title.lower()}", m, arms) for task, arms in tasks.items()]
            for title, m in parts.items()
        }


def under(control: str) -> Measure:
    def change(result: dict[str, Any]) -> float | None:
        measured = result["controls"].get(control)
        return measured and measured["success"] - result["success"]

    return replace(SUCCESS, label=control, of=change)


write_report: Callable[[Path], Report] = Agents().report

if __name__ == "__main__":
    Agents.main()
