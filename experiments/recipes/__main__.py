"""Train by every recipe for the same time, and compare the losses.

Run it on a quiet machine with ``python -m experiments.recipes --data FILE --out FOLDER``. First it measures
how many tokens a second each recipe trains, in turn; then each gets as many tokens as ``--seconds`` allow,
over ``--seeds`` seeds. What is finished is kept, so that it can be stopped and gone on with.
"""

from collections import defaultdict
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median

import tyro

from experiments.recipes.candidates import CANDIDATES
from experiments.recipes.figure import DRAWN, draw
from experiments.recipes.trial import result_of, speed, train_one
from memformers.common.command_line import plain_errors
from memformers.common.errors import UserError
from memformers.common.files import read_json, write_json, write_text
from memformers.common.intervals import mean_of


@dataclass(frozen=True)
class Search:
    """Which recipes to try, and how long."""

    out: Path = Path("runs/recipes")
    """Folder of the results."""
    data: str = ""
    """The text, as for training."""
    recipes: tuple[str, ...] = tuple(CANDIDATES)
    """Which of the recipes."""
    seconds: float = 125.0
    """Seconds of training by each recipe, on all of the machine's cores."""
    seeds: int = 1
    """The number of trainings by each recipe."""
    jobs: int = 2
    """Trainings at a time; their length is a number of tokens."""
    threads: int = 1
    """Threads of each."""


def main(search: Search) -> None:
    """Measure, train and write the table."""
    if unknown := sorted(set(search.recipes) - set(CANDIDATES)):
        raise UserError(f"recipes {', '.join(unknown)} are unknown; there are: {'; '.join(CANDIDATES)}.")
    search.out.mkdir(parents=True, exist_ok=True)
    speeds = read_json(search.out / "speeds.json") if (search.out / "speeds.json").exists() else {}
    known = {CANDIDATES[name].work: speed for name, speed in speeds.items()}
    alike = {name: known.get(CANDIDATES[name].work) for name in search.recipes}
    speeds |= {name: speed for name, speed in alike.items() if speed}
    if missing := [name for name in search.recipes if name not in speeds]:
        speeds |= measured_speeds(missing, search.data)
    write_json(search.out / "speeds.json", speeds)
    wanted = [(name, seed) for seed in range(search.seeds) for name in search.recipes]
    todo = [one for one in wanted if not result_of(search.out, *one).exists()]
    with get_context("spawn").Pool(search.jobs, maxtasksperchild=1) as pool:
        jobs = [
            pool.apply_async(
                train_one,
                (search.out, search.data, *one, round(speeds[one[0]] * search.seconds), search.threads),
            )
            for one in todo
        ]
        for job in jobs:
            print(job.get(), flush=True)
    write_text(search.out / "table.md", table(search, speeds))
    drawn = {name: result_of(search.out, name, 0) for name in DRAWN}
    if all(path.exists() for path in drawn.values()):
        draw(
            {n: read_json(p)["losses"] for n, p in drawn.items()}, speeds, search.out / "time_to_quality.png"
        )


def measured_speeds(names: list[str], data: str) -> dict[str, float]:
    """Tokens a second by each recipe: the median of three rounds, in turn. Recipes whose steps have the same
    work are measured once, so that noise doesn't give one of them more tokens."""
    alike = defaultdict(list)
    for name in names:
        alike[CANDIDATES[name].work].append(name)
    rounds = [{group[0]: speed(group[0], data) for group in alike.values()} for _ in range(3)]
    return {name: median(one[group[0]] for one in rounds) for group in alike.values() for name in group}


def table(search: Search, speeds: dict[str, float]) -> str:
    """The recipes, best first, as Markdown: the loss, and the difference to the default recipe seed by seed,
    with 95 % intervals over seeds."""
    losses = {name: finished(search, name) for name in search.recipes}
    default, rows = losses.get("default", {}), []
    for name, of_name in losses.items():
        paired = [loss - default[seed] for seed, loss in of_name.items() if seed in default]
        tokens = f"{speeds[name] * search.seconds / 1e6:.2f} M"
        difference = "–" if name == "default" or not paired else with_interval(paired, "+.3f")
        if of_name:
            values = list(of_name.values())
            rows.append(
                (mean(values), [name, tokens, with_interval(values, ".3f"), difference, str(len(values))])
            )
    head = ["recipe", "tokens", "validation loss (nats)", "minus the default's", "seeds"]
    lines = [head, ["---"] * len(head), *(row for _, row in sorted(rows))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def finished(search: Search, name: str) -> dict[int, float]:
    """The loss of each finished training by the recipe called ``name``, by its seed."""
    files = {seed: result_of(search.out, name, seed) for seed in range(search.seeds)}
    return {seed: read_json(file)["loss"] for seed, file in files.items() if file.exists()}


def with_interval(values: list[float], form: str) -> str:
    """The mean of ``values``, in this ``form``, and its interval if there are several."""
    interval = f" ± {mean_of(values).half_width:.3f}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{interval}".replace("-", "−")


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Search, description=__doc__))
