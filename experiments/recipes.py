"""Train by every recipe for the same time, and compare the losses.

Run it on a quiet machine with ``python -m experiments.recipes --data FILE --out FOLDER``. First it measures
how many tokens per second each recipe trains, in turn; then each gets as many tokens as ``--seconds`` allow.
What is finished is kept, so that it can be stopped and gone on with by ``--resume``, also with more seeds.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar

from experiments.arms import ArmsCommand, Column, Parts, Tasks
from memformers.common.fields import Count, Range, changed
from memformers.common.files import read_json, write_json
from memformers.common.machine import keep_freed_memory
from memformers.comparison.arms import settings_of
from memformers.comparison.experiment import Experiment
from memformers.comparison.text import TEXT, TextTask
from memformers.data.streams import training_segments
from memformers.models.config import ModelConfig
from memformers.report.arms import Measure
from memformers.runs.plan import Arm
from memformers.training.config import EvaluationConfig, TrainConfig
from memformers.training.data_module import check_long_enough, find_text
from memformers.training.loop import train_steps
from memformers.training.run import build_model, with_vocabulary
from memformers.training.state import TrainingState

DEFAULT = TrainConfig(model=ModelConfig(model="transformer-xl"), evaluation=EvaluationConfig(evaluations=1))
RATES = ("learning_rate", "muon_learning_rate", "beta2", "warmup", "weight_decay")
"""Settings of ``optim`` that change what is learned from a step, but not its work."""
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "first-version": ("first version", {
        "optim.optimizer": "adamw", "optim.learning_rate": 2e-3, "optim.beta2": 0.99, "batch_size": 8,
        "chunk_len": 0, "step.precision": "float32", "memory_warmup": 0.0,
    }),
    "full-memory": ("full memory from the beginning", {"memory_warmup": 0.0}),
    "grow-quarter": ("memory grows over a quarter", {"memory_warmup": 0.25}),
    "grow-all": ("memory grows over all of it", {"memory_warmup": 1.0}),
    "float32": ("float32", {"step.precision": "float32"}),
    "adamw": ("AdamW for everything", {"optim.optimizer": "adamw"}),
    "streams-32": ("32 streams", {"batch_size": 32}),
    "slow": ("Muon 0.02, AdamW's part 2e-3", {"optim.muon_learning_rate": 0.02, "optim.learning_rate": 2e-3}),
    "fast": ("Muon 0.06, AdamW's part 6e-3", {"optim.muon_learning_rate": 0.06, "optim.learning_rate": 6e-3}),
    "warm-up": ("warm-up 10 %", {"optim.warmup": 0.1}),
    "beta2": ("β₂ 0.999", {"optim.beta2": 0.999}),
    "no-decay": ("no weight decay", {"optim.weight_decay": 0.0}),
    "dropout": ("dropout 0.05", {"model.dropout": 0.05}),
    "mem-32": ("memory of 32", {"model.mem_len": 32}),
    "mem-128": ("memory of 128", {"model.mem_len": 128}),
    "segments-128": ("segments of 128", {"batch_size": 32, "model.segment_len": 128}),
    "width-192": ("width 192", {"model.d_model": 192, "model.d_ff": 768, "model.heads": 6}),
    "layers-6": ("6 layers", {"model.n_layers": 6}),
    "in-order": ("text from front to back", {"chunk_len": 0}),
}  # fmt: skip
ARMS = tuple(Arm(name, settings, label) for name, (label, settings) in RECIPES.items())
TIMED_STEPS, WARM_UP = 32, 3
MEASURES = (Measure("validation loss (nats)", "loss", ".3f"), Measure("tokens", "tokens", ",.0f", better=1))


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
    seeds: Count = 1
    """How many times each recipe is trained. Intervals need at least 2."""
    data: str = ""
    """The text, as for training."""
    seconds: Annotated[float, Range(above=0)] = 125.0
    """Seconds of training by each recipe, on all of the machine's cores."""

    @classmethod
    def listed(cls) -> Sequence[Arm]:
        return ARMS

    def experiments(self, folder: Path) -> dict[str, Experiment]:
        """One experiment on the text, after the speeds are measured, which ``speeds.json`` keeps."""
        shared, file = replace(DEFAULT, data=self.data), folder / "speeds.json"
        chosen = self.chosen(asdict(shared))
        speeds = measured_speeds(chosen, self.data, read_json(file) if file.exists() else {})
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, speeds)
        seconds = 1.0 if self.quick else self.seconds
        arms = tuple(
            replace(arm, settings=arm.settings | {"tokens": max(round(speeds[arm.name] * seconds), 1)})
            for arm in chosen
        )
        return {TEXT.name: Experiment(TextTask(probed=False), shared, {}, arms, *self.how)}

    def parts(self, tasks: Tasks) -> Parts:
        """The loss over the whole held-out text; and what a recipe reads."""
        loss, tokens = ([Column(m.label, m, arms) for arms in tasks.values()] for m in MEASURES)
        return {"": loss, "What each recipe reads in the same time": tokens}


def measured_speeds(arms: Sequence[Arm], data: str, known: dict[str, float]) -> dict[str, float]:
    """Tokens a second by each recipe, beside those that are ``known``: the median of three rounds, in turn.
    Recipes whose steps have the same work are measured once, so that noise doesn't give one of them more
    tokens."""
    every = {arm.name: arm for arm in (*ARMS, *arms)}
    of_work = {work_of(every[name]): speed for name, speed in known.items() if name in every}
    missing = {work: arm for arm in reversed(arms) if (work := work_of(arm)) not in of_work}
    rounds = [{work: speed(arm, data) for work, arm in missing.items()} for _ in range(3)]
    of_work |= {work: median(one[work] for one in rounds) for work in missing}
    return known | {arm.name: of_work[work_of(arm)] for arm in arms}


class Enough(Exception):
    """Enough steps are timed."""


def speed(arm: Arm, data: str) -> float:
    """Tokens a second by a recipe, over a training run of few steps, in which the memory grows as it does in
    a long one."""
    times: list[float] = []

    def look(state: TrainingState) -> None:
        times.append(time.perf_counter())
        if state.step == WARM_UP + TIMED_STEPS:
            raise Enough

    config = training_of(arm)
    tokens = config.tokens_a_step * (WARM_UP + TIMED_STEPS + 1)  # so it stops before it evaluates, at its end
    text = find_text(replace(config, data=data))
    check_long_enough(text, config)
    config = with_vocabulary(replace(config, tokens=tokens), text.tokenizer.vocab_size)
    keep_freed_memory()
    B, S = config.batch_size, config.model.segment_len
    segments = training_segments(text.train.tokens, B, S, chunk_len=config.chunk_len, seed=config.seed)
    look_away: dict[str, Any] = dict.fromkeys(("record", "evaluate"), lambda *_: None)
    with suppress(Enough):
        train_steps(build_model(config), segments, config, maybe_checkpoint=look, **look_away)
    return config.tokens_a_step * TIMED_STEPS / (times[-1] - times[WARM_UP - 1])


def training_of(arm: Arm) -> TrainConfig:
    """A training run by a recipe."""
    config: TrainConfig = TEXT.parse(settings_of(arm, asdict(DEFAULT)), arm.name)
    return config


def work_of(arm: Arm) -> TrainConfig:
    """A value that is equal for recipes whose steps have the same work: they differ in rates, or in the
    data."""
    usual = {name: getattr(DEFAULT.optim, name) for name in RATES}
    return changed(training_of(arm), chunk_len=DEFAULT.chunk_len, **usual)


if __name__ == "__main__":
    Recipes.main()
