"""Train by every recipe for the same time, and compare the losses.

Run it on a quiet machine with ``python -m experiments.recipes --data FILE --out FOLDER``. First it measures
how many tokens a second each recipe trains, in turn; then each gets as many tokens as ``--seconds`` allow,
over ``--seeds`` seeds. What is finished is kept, so that it can be stopped and gone on with by ``--resume``.
"""

import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, ClassVar

from experiments.recipes.candidates import CANDIDATES, DEFAULT, arm_of, training_of, work_of
from experiments.recipes.figure import DRAWN, draw
from memformers.commands.options import ExperimentCommand
from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.errors import UserError
from memformers.common.fields import Count, Range
from memformers.common.files import read_json, write_json, write_text
from memformers.common.intervals import mean_of, paired
from memformers.common.machine import keep_freed_memory
from memformers.comparison.experiment import Experiment, run_experiment
from memformers.comparison.text import TextTask
from memformers.data.corpora import load_corpus
from memformers.data.streams import training_segments
from memformers.report.markdown import number, table
from memformers.runs.finished import FinishedRun, read_runs
from memformers.training.loop import train
from memformers.training.run import build_model, with_vocabulary
from memformers.training.state import TrainingState
from memformers.training.text import prepare

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
    """The number of trainings by each recipe."""
    jobs: Count = 2
    """Trainings at a time; their length is a number of tokens."""
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
        tokens = {name: round(speeds[name] * self.seconds) for name in self.recipes}
        more = {name: {"evaluations": EVALUATIONS_DRAWN} if name in DRAWN else {} for name in self.recipes}
        arms = tuple(arm_of(name, tokens=tokens[name], **more[name]) for name in self.recipes)
        shared = replace(DEFAULT, data=self.data)
        task = TextTask(probed=False)
        experiment = Experiment(task, shared, {}, arms, self.seeds, self.jobs, self.threads)
        page = run_experiment(experiment, folder, self.dashboard, resume=self.resume)
        runs = read_runs(folder)
        write_text(folder / "table.md", recipes_table(runs) + "\n")
        drawn = {run.label: losses_of(run) for run in reversed(runs) if run.label in DRAWN}
        if drawn.keys() == DRAWN.keys():
            draw(drawn, speeds, folder / "time_to_quality.png")
        return page


def measured_speeds(names: tuple[str, ...], data: str, known: dict[str, float]) -> dict[str, float]:
    """Tokens a second by each recipe, beside those that are ``known``: the median of three rounds, in turn.
    Recipes whose steps have the same work are measured once, so that noise doesn't give one of them more
    tokens."""
    of_work = {work_of(name): speed for name, speed in known.items()}
    alike = defaultdict(list)
    for name in names:
        alike[work_of(name)].append(name)
    missing = {work: group[0] for work, group in alike.items() if work not in of_work}
    rounds = [{work: speed(name, data) for work, name in missing.items()} for _ in range(3)]
    of_work |= {work: median(one[work] for one in rounds) for work in missing}
    return known | {name: of_work[work_of(name)] for name in names}


class Enough(Exception):
    """Enough steps are timed."""


def speed(recipe: str, data: str) -> float:
    """Tokens a second by this ``recipe``, over a training of few steps, in which the memory grows as it does
    in a long one."""
    times: list[float] = []

    def look(state: TrainingState) -> None:
        times.append(time.perf_counter())
        if state.step == WARM_UP + TIMED_STEPS:
            raise Enough

    config = training_of(recipe)
    tokens = config.tokens_a_step * (WARM_UP + TIMED_STEPS + 1)  # so it stops before it evaluates, at its end
    text = prepare(load_corpus(data), config)
    config = with_vocabulary(replace(config, tokens=tokens), text.tokenizer.vocab_size)
    keep_freed_memory()
    segments = training_segments(
        text.train, config.batch_size, config.model.segment_len, chunk_len=config.chunk_len, seed=config.seed
    )
    model = build_model(config)
    try:
        train(
            model, segments, config, record=lambda *_: None, evaluate=lambda *_: None, maybe_checkpoint=look
        )
    except Enough:
        seconds = times[-1] - times[WARM_UP - 1]
    return config.tokens_a_step * TIMED_STEPS / seconds


def recipes_table(runs: list[FinishedRun]) -> str:
    """The recipes of the finished ``runs``, best first: the loss, and the difference to the default recipe
    seed by seed, with 95 % intervals over seeds."""
    losses: dict[str, dict[int, float]] = defaultdict(dict)
    tokens = {run.label: f"{run.config['tokens'] / 1e6:.2f} M" for run in runs}
    for run in runs:
        if run.result:
            losses[run.label][run.seed] = run.result["loss"]
    rows = []
    for name, of_name in losses.items():
        mean = mean_of(list(of_name.values()))
        difference = None if name == "default" else paired(of_name, losses.get("default", {}))
        cells = [
            name,
            tokens[name],
            number(mean, ".3f"),
            number(difference, ".3f", signed=True),
            f"{mean.n}",
        ]
        rows.append((mean.mean, cells))
    head = ["recipe", "tokens", "validation loss (nats)", "minus the default's", "seeds"]
    return table(head, [cells for _, cells in sorted(rows)])


def losses_of(run: FinishedRun) -> list[tuple[float, float]]:
    """Pairs of a number of tokens and the loss in nats after them."""
    return [(r["tokens"], r["loss.valid"]) for r in run.metrics if "loss.valid" in r]


if __name__ == "__main__":
    with plain_errors():
        parse_arguments(Recipes).run()
