"""Train by every recipe for the same time, and compare the losses.

Run it on a quiet machine with ``python -m experiments.recipes --data FILE --out FOLDER``. First it measures
how many tokens per second each recipe trains, in turn; then each gets as many tokens as ``--seconds`` allow,
over ``--seeds`` seeds. What is finished is kept, so that it can be stopped and gone on with by ``--resume``.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, ClassVar

from memformers.commands.options import ExperimentCommand
from memformers.common.errors import UserError
from memformers.common.fields import Count, Range, changed
from memformers.common.files import read_json, write_json, write_text
from memformers.common.intervals import mean_of
from memformers.common.machine import keep_freed_memory
from memformers.comparison.arms import settings_of
from memformers.comparison.experiment import Experiment, run_experiment
from memformers.comparison.text import TEXT, TextTask
from memformers.data.streams import training_segments
from memformers.models.config import ModelConfig
from memformers.report.arms import Column, Measure, arms_of, arms_table
from memformers.report.plotting import BLUE, ORANGE, Series, draw_lines, legend, panels, save, style
from memformers.runs.plan import Arm
from memformers.runs.reader import Run, read_runs
from memformers.training.config import EvaluationConfig, TrainConfig
from memformers.training.data_module import check_long_enough, find_text
from memformers.training.loop import train_steps
from memformers.training.run import build_model, with_vocabulary
from memformers.training.state import TrainingState

DEFAULT = TrainConfig(model=ModelConfig(model="transformer-xl"), evaluation=EvaluationConfig(evaluations=1))
RATES = ("learning_rate", "muon_learning_rate", "beta2", "warmup", "weight_decay")
"""Settings of ``optim`` that change what is learned from a step, but not its work."""
CANDIDATES: dict[str, dict[str, Any]] = {
    "default": {},
    "first version": {
        "optimizer": "adamw", "learning_rate": 2e-3, "batch_size": 8, "chunk_len": 0, "beta2": 0.99,
        "precision": "float32", "memory_warmup": 0.0,
    },
    "full memory from the beginning": {"memory_warmup": 0.0},
    "memory grows over a quarter": {"memory_warmup": 0.25},
    "memory grows over all of it": {"memory_warmup": 1.0},
    "float32": {"precision": "float32"},
    "AdamW for everything": {"optimizer": "adamw"},
    "32 streams": {"batch_size": 32},
    "Muon 0.02, AdamW's part 2e-3": {"muon_learning_rate": 0.02, "learning_rate": 2e-3},
    "Muon 0.06, AdamW's part 6e-3": {"muon_learning_rate": 0.06, "learning_rate": 6e-3},
    "warm-up 10 %": {"warmup": 0.1},
    "β₂ 0.999": {"beta2": 0.999},
    "no weight decay": {"weight_decay": 0.0},
    "dropout 0.05": {"model.dropout": 0.05},
    "memory of 32": {"model.mem_len": 32},
    "memory of 128": {"model.mem_len": 128},
    "segments of 128": {"batch_size": 32, "model.segment_len": 128},
    "width 192": {"model.d_model": 192, "model.d_ff": 768, "model.heads": 6},
    "6 layers": {"model.n_layers": 6},
    "text from front to back": {"chunk_len": 0},
}  # fmt: skip
"""The recipes by their short names in the table."""
DRAWN = {"first version": ORANGE | {"linestyle": "--"}, "default": BLUE | {"linestyle": "-"}}
"""Recipes, each with its look."""
LOSS = Measure("validation loss (nats)", "loss", ".3f")
TIMED_STEPS, WARM_UP = 32, 3
EVALUATIONS_DRAWN = 10
"""The number of evaluations of the recipes whose loss is drawn against seconds."""


@dataclass(frozen=True)
class Recipes(ExperimentCommand):
    """Train by every recipe for the same time, and compare the losses."""

    name: ClassVar = "recipes"
    data: str = ""
    """The text, as for training."""
    recipes: tuple[str, ...] = tuple(CANDIDATES)
    """Which of the recipes."""
    seconds: Annotated[float, Range(above=0)] = 125.0
    """Seconds of training by each recipe, on all of the machine's cores."""
    seeds: Count = 1
    """The number of training runs by each recipe."""
    jobs: Count = 2
    """Training runs at a time; their length is a number of tokens."""
    threads: Count = 1
    """Threads of each."""

    def experiment(self, folder: Path) -> Path:
        """Measure, train and write the report and the table."""
        if unknown := sorted(set(self.recipes) - set(CANDIDATES)):
            raise UserError(f"recipes {', '.join(unknown)} are unknown; there are: {'; '.join(CANDIDATES)}.")
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "speeds.json"
        speeds = measured_speeds(self.recipes, self.data, read_json(file) if file.exists() else {})
        write_json(file, speeds)
        tokens = {name: max(round(speeds[name] * self.seconds), 1) for name in self.recipes}
        more = {name: {"evaluations": EVALUATIONS_DRAWN} if name in DRAWN else {} for name in self.recipes}
        arms = tuple(arm_of(name, tokens=tokens[name], **more[name]) for name in self.recipes)
        shared = replace(DEFAULT, data=self.data)
        task = TextTask(probed=False)
        experiment = Experiment(task, shared, {}, arms, self.seeds, self.jobs, self.threads)
        page = run_experiment(experiment, folder, self.dashboard, resume=self.resume)
        runs = read_runs(folder)
        write_text(folder / "table.md", recipes_table(runs) + "\n")
        drawn = {run.label: run for run in reversed(runs) if run.label in DRAWN}
        if drawn.keys() == DRAWN.keys():
            draw(drawn, speeds, folder / "time_to_quality.png")
        return page


def measured_speeds(names: tuple[str, ...], data: str, known: dict[str, float]) -> dict[str, float]:
    """Tokens a second by each recipe, beside those that are ``known``: the median of three rounds, in turn.
    Recipes whose steps have the same work are measured once, so that noise doesn't give one of them more
    tokens."""
    of_work = {work_of(name): speed for name, speed in known.items()}
    missing = {work: name for name in reversed(names) if (work := work_of(name)) not in of_work}
    rounds = [{work: speed(name, data) for work, name in missing.items()} for _ in range(3)]
    of_work |= {work: median(one[work] for one in rounds) for work in missing}
    return known | {name: of_work[work_of(name)] for name in names}


class Enough(Exception):
    """Enough steps are timed."""


def speed(recipe: str, data: str) -> float:
    """Tokens a second by this ``recipe``, over a training run of few steps, in which the memory grows as it
    does in a long one."""
    times: list[float] = []

    def look(state: TrainingState) -> None:
        times.append(time.perf_counter())
        if state.step == WARM_UP + TIMED_STEPS:
            raise Enough

    config = training_of(recipe)
    tokens = config.tokens_a_step * (WARM_UP + TIMED_STEPS + 1)  # so it stops before it evaluates, at its end
    text = find_text(replace(config, data=data))
    check_long_enough(text, config)
    config = with_vocabulary(replace(config, tokens=tokens), text.tokenizer.vocab_size)
    keep_freed_memory()
    segments = training_segments(
        text.train.tokens,
        config.batch_size,
        config.model.segment_len,
        chunk_len=config.chunk_len,
        seed=config.seed,
    )
    look_away: dict[str, Any] = dict.fromkeys(("record", "evaluate"), lambda *_: None)
    with suppress(Enough):
        train_steps(build_model(config), segments, config, maybe_checkpoint=look, **look_away)
    return config.tokens_a_step * TIMED_STEPS / (times[-1] - times[WARM_UP - 1])


def recipes_table(runs: list[Run]) -> str:
    """The recipes of the finished ``runs``, best first: the loss, and the difference to the default recipe
    seed by seed, with 95 % intervals over seeds."""
    arms = [arm for arm in arms_of(runs) if arm.results]
    base = next((arm for arm in arms if arm.label == "default"), None)
    columns: dict[str, Column] = {
        "tokens": lambda arm: f"{arm.first.config['tokens'] / 1e6:.2f} M",
        LOSS.label: lambda arm: LOSS.shown(arm.mean(LOSS.of)),
        "minus the default's": lambda arm: LOSS.shown_difference(
            arm.minus(base, LOSS.of) if base and arm is not base else None
        ),
        "seeds": lambda arm: f"{len(arm.results)}",
    }
    return arms_table(sorted(arms, key=lambda arm: fmean(arm.values(LOSS.of).values())), columns, "recipe")


def arm_of(recipe: str, **more: Any) -> Arm:
    """The ``recipe`` as an arm, with ``more`` settings."""
    number = list(CANDIDATES).index(recipe)
    return Arm(f"recipe-{number:02}", CANDIDATES[recipe] | more, recipe)


def training_of(recipe: str) -> TrainConfig:
    """A training run by the ``recipe``."""
    return TEXT.parse(settings_of(arm_of(recipe), asdict(DEFAULT)), recipe)


def work_of(recipe: str) -> TrainConfig:
    """A value that is equal for recipes whose steps have the same work: they differ in rates, or in the
    data."""
    usual = {name: getattr(DEFAULT.optim, name) for name in RATES}
    return changed(training_of(recipe), chunk_len=DEFAULT.chunk_len, **usual)


def draw(runs: Mapping[str, Run], speeds: Mapping[str, float], path: Path) -> None:
    """Draw the losses of a run by each recipe against training time; ``speeds`` is in tokens per second."""
    figure, [axes] = panels([2.9])
    for name, look in DRAWN.items():
        tokens, _, losses = runs[name].metrics.points("loss.valid")
        points = [(t / speeds[name], mean_of([x])) for t, x in zip(tokens, losses, strict=True)]
        draw_lines(axes, [Series(name, points, look)])
        end = (points[-1][0], points[-1][1].mean)
        axes.annotate(f"{end[1]:.3f}", end, (0, 8), textcoords="offset points", ha="center", fontsize=8)
    style(axes, "training time on two cores (seconds)", "validation loss (nats a character)")
    axes.set_xlim(left=0)
    legend(figure)
    save(figure, path)


if __name__ == "__main__":
    Recipes.main()
