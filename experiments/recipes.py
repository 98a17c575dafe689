"""Train by every recipe for the same time, and compare the losses.

Run it on a quiet machine with ``python -m experiments.recipes --data FILE --out FOLDER``. First it measures
how many tokens per second each recipe trains, in turn; then each gets the tokens that ``--seconds`` allow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar

from experiments.arms import ArmsCommand, Column, Parts, Tasks, Variant
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
ARMS = tuple(Variant(name, settings, label) for name, (label, settings) in RECIPES.items())
NO_WORK = {  # what changes what is learned from a step, but not its work
    "optim.learning_rate", "optim.muon_learning_rate", "optim.beta2", "optim.warmup_fraction",
    "optim.weight_decay",
    "chunk_len",
}  # fmt: skip
TIMED_STEPS, ROUNDS, FEW = 36, 3, 16_384
"""Steps of a run that measures a speed, runs of each recipe, and tokens that they are evaluated on."""
MEASURES = (Measure("held-out loss (nats)", "loss", ".3f"), Measure("tokens", "tokens", ",.0f", better=1))


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
    known: ClassVar = ARMS
    seeds: Count = 1
    data: str = ""
    """The text, as for training."""
    seconds: Annotated[float, Range(above=0)] = 125.0
    """Seconds of training by each recipe, on all of the machine's cores."""

    def experiments(self, folder: Path) -> dict[str, Experiment]:
        base = replace(DEFAULT, data=self.data)
        experiment = self.experiment_on(TextTask(probed=False), base)
        speeds = measured_speeds(experiment.arms, base, folder / "speeds" / TEXT.name)
        arms = []
        for arm in experiment.arms:
            tokens = max(round(speeds[arm.name] * (1.0 if self.quick else self.seconds)), 1)
            arms.append(replace(arm, config=replace(arm.config, max_tokens=tokens)))
        return {TEXT.name: replace(experiment, arms=tuple(arms))}

    def parts(self, tasks: Tasks) -> Parts:
        loss, tokens = ([Column(m.label, m, arms) for arms in tasks.values()] for m in MEASURES)
        return {"": loss, "What each recipe reads in the same time": tokens}


def measured_speeds(arms: Sequence[Arm], base: TrainConfig, folder: Path) -> dict[str, float]:
    """By several short training runs, in turn. Recipes whose steps have the same work share a speed."""
    work = {}
    for arm in arms:
        is_same_work = changed_settings(arm.config, base).keys() <= NO_WORK
        work[arm.name] = "default" if is_same_work else arm.name
    of_work = {work[arm.name]: arm for arm in reversed(arms)}
    timing = {"log_every": TIMED_STEPS // 2, "final_tokens": FEW}
    short = []
    for arm in of_work.values():
        tokens = TIMED_STEPS * arm.config.tokens_per_step
        short.append(replace(arm, config=replace_nested(arm.config, max_tokens=tokens, **timing)))
    timed = Experiment(TextTask(probed=False), replace_nested(base, **timing), tuple(short), ROUNDS)
    run_experiment(timed, folder, "off", resume=(folder / EXPERIMENT).exists())
    speeds = {
        arm.name: median(run.last("tokens_per_second") or 0.0 for run in arm.runs)
        for arm in arms_of(read_runs(folder))
    }
    return {name: speeds[of_work[same].name] for name, same in work.items()}


if __name__ == "__main__":
    Recipes.main()
