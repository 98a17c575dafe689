"""Train by every recipe for the same time, and compare the losses.

Run it on a quiet machine with ``python -m experiments.recipes --data FILE --out FOLDER``. First it measures
how many tokens per second each recipe trains, in turn; then each gets the tokens that ``--seconds`` allow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar

from experiments.arms import ArmsCommand, Variant
from experiments.columns import ArmsByTask, Column, ColumnsByTable
from memformers.common.fields import Count, Range, replace_nested
from memformers.comparison.arms import Arm, changed_settings
from memformers.comparison.experiment import Experiment, run_experiment
from memformers.comparison.text import TEXT, TextTask
from memformers.models.config import ModelConfig
from memformers.report.arms import Measure, arms_of
from memformers.runs.folder import EXPERIMENT
from memformers.runs.reader import read_runs
from memformers.training.config import EvaluationConfig, TrainConfig

DEFAULT = TrainConfig(model=ModelConfig(model="transformer-xl"), evaluation=EvaluationConfig(evaluations=1))
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "first-version": ("first version", {
        "optimizer": "adamw", "learning_rate": 2e-3, "beta2": 0.99, "batch_size": 8,
        "chunk_len": 0, "precision": "float32", "memory_warmup": 0.0,
    }),
    "full-memory": ("full memory from the start", {"memory_warmup": 0.0}),
    "grow-quarter": ("memory grows over a quarter", {"memory_warmup": 0.25}),
    "grow-all": ("memory grows over all of it", {"memory_warmup": 1.0}),
    "float32": ("float32", {"precision": "float32"}),
    "adamw": ("AdamW for everything", {"optimizer": "adamw"}),
    "streams-32": ("32 streams", {"batch_size": 32}),
    "slow": ("Muon 0.02, AdamW 2e-3", {"muon_learning_rate": 0.02, "learning_rate": 2e-3}),
    "fast": ("Muon 0.06, AdamW 6e-3", {"muon_learning_rate": 0.06, "learning_rate": 6e-3}),
    "warm-up": ("warm-up 10 %", {"warmup_fraction": 0.1}),
    "beta2": ("β₂ 0.999", {"beta2": 0.999}),
    "no-decay": ("no weight decay", {"weight_decay": 0.0}),
    "dropout": ("dropout 0.05", {"dropout": 0.05}),
    "mem-32": ("memory of 32", {"mem_len": 32}),
    "mem-128": ("memory of 128", {"mem_len": 128}),
    "segments-128": ("segments of 128", {"batch_size": 32, "segment_len": 128}),
    "width-192": ("width 192", {"d_model": 192, "d_ff": 768, "n_heads": 6}),
    "layers-6": ("6 layers", {"n_layers": 6}),
    "in-order": ("text from front to back", {"chunk_len": 0}),
}  # fmt: skip
VARIANTS = tuple(Variant(name, settings, label) for name, (label, settings) in RECIPES.items())
NO_WORK = {
    "optim.learning_rate", "optim.muon_learning_rate", "optim.beta2", "optim.warmup_fraction",
    "optim.weight_decay",
    "chunk_len",
}  # fmt: skip
"""Settings that change what is learned from a step, but not its work."""
LOSS = Measure("held-out loss (nats)", "loss", ".3f")
TOKENS = Measure("tokens", "tokens", ",.0f", better=1)

# The measurement of speeds.
TIMED_STEPS = 36
"""Steps of a run that measures a speed."""
ROUNDS = 3
"""Runs of each recipe."""
FINAL_TOKENS = 16_384
"""Tokens that these runs are evaluated on, since their losses don't matter."""


@dataclass(frozen=True)
class Recipes(ArmsCommand):
    """Train by every recipe for the same time, and compare the losses."""

    name: ClassVar = "recipes"
    title: ClassVar = "Recipes at equal time"
    method: ClassVar = (
        "The name of a recipe says how it differs from the default one. Each has the number of tokens that "
        "it trains in the same time, by its speed in a short training run."
    )
    base: ClassVar = "default"
    variants: ClassVar = VARIANTS
    seeds: Count = 1
    data: str = ""
    """The text, as for training."""
    seconds: Annotated[float, Range(above=0)] = 125.0
    """Seconds of training by each recipe, on all of the machine's cores."""

    def plan_experiments(self, folder: Path) -> dict[str, Experiment]:
        base = replace(DEFAULT, data=self.data)
        experiment = self.plan_experiment(TextTask(probed=False), base)
        speeds = measure_speeds(experiment.arms, base, folder / "speeds" / TEXT.name)
        seconds = 1.0 if self.quick else self.seconds
        arms = []
        for arm in experiment.arms:
            tokens = max(round(speeds[arm.name] * seconds), 1)
            arms.append(replace(arm, config=replace(arm.config, max_tokens=tokens)))
        return {TEXT.name: replace(experiment, arms=tuple(arms))}

    def columns_by_table(self, arms_by_task: ArmsByTask) -> ColumnsByTable:
        tables = {}
        for title, measure in (("", LOSS), ("What each recipe reads in the same time", TOKENS)):
            tables[title] = [Column(measure.label, measure, arms) for arms in arms_by_task.values()]
        return tables


def measure_speeds(arms: Sequence[Arm], base: TrainConfig, folder: Path) -> dict[str, float]:
    """The tokens per second of each arm, by several short training runs, in turn. Recipes whose steps have
    the same work share a speed."""
    # The arm that is timed for each arm: the default one for those with its work.
    timed_names = {}
    for arm in arms:
        is_same_work = changed_settings(arm.config, base).keys() <= NO_WORK
        timed_names[arm.name] = "default" if is_same_work else arm.name
    # Of arms with the same work, the first one, which comes last.
    timed_arms: dict[str, Arm] = {}
    for arm in reversed(arms):
        timed_arms[timed_names[arm.name]] = arm

    # Short runs of these arms.
    timing = {"log_every": TIMED_STEPS // 2, "final_tokens": FINAL_TOKENS}
    short_arms = []
    for arm in timed_arms.values():
        tokens = TIMED_STEPS * arm.config.tokens_per_step
        short_arms.append(replace(arm, config=replace_nested(arm.config, max_tokens=tokens, **timing)))
    short_base = replace_nested(base, **timing)
    experiment = Experiment(TextTask(probed=False), short_base, tuple(short_arms), ROUNDS)
    run_experiment(experiment, folder, "off", resume=(folder / EXPERIMENT).exists())

    # The median over rounds.
    speeds = {}
    for timed_arm in arms_of(read_runs(folder)):
        speeds[timed_arm.name] = median(run.last("tokens_per_second") or 0.0 for run in timed_arm.runs)
    return {name: speeds[timed_arms[timed].name] for name, timed in timed_names.items()}


if __name__ == "__main__":
    Recipes.main()
