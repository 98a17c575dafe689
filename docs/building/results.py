"""The numbers of finished experiments, as docs/results/data has them: a folder for each experiment."""

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from memformers.common.intervals import Mean, mean_of, paired

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs/results/data"
Seeds = dict[int, float]
"""A number of each seed."""


@cache
def table_of(name: str) -> list[dict[str, str]]:
    with open(DATA / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def rows(experiment: str) -> list[dict[str, str]]:
    return table_of(f"{experiment}/results")


def experiments() -> dict[str, dict[str, str]]:
    """What ``experiments.csv`` says of each experiment, by its name."""
    return {row["name"]: row for row in table_of("experiments")}


@cache
def about(experiment: str) -> dict[str, Any]:
    return dict(json.loads((DATA / experiment / "results.json").read_text(encoding="utf-8")))


def seeds(experiment: str, arm: str, measure: str) -> Seeds:
    """What an ``arm`` came to by a ``measure``, by seed; empty if it was not measured. In a file of
    ``memformers recall``, ``correct, 192 – 384`` is the share of correct answers about values that were set
    so many tokens ago."""
    of_arm = [row for row in rows(experiment) if row["arm"] == arm]
    if not of_arm:
        return {}
    # A row is a bin in files of recall, a measure in those of experiments, and a run in others.
    if "asks" in of_arm[0]:
        low, high = map(int, measure.removeprefix("correct, ").split(" – "))
        return correct_shares(of_arm, low, high)
    has_measures = "measure" in of_arm[0]
    values = {}
    for row in of_arm:
        if not has_measures:
            values[int(row["seed"])] = float(row[measure.replace(" ", "_")])
        elif row["measure"] == measure:
            values[int(row["seed"])] = float(row["value"])
    return values


def correct_shares(of_arm: list[dict[str, str]], low: int, high: int) -> Seeds:
    """The shares of correct answers in the bins from ``low`` to ``high``, with the unchanged memory."""
    n_correct: Seeds = {}
    n_asked: dict[int, int] = {}
    for row in of_arm:
        is_inside = low <= int(row["from"]) and int(row["to"]) <= high
        if is_inside and row["control"] == "untouched" and row["accuracy"]:
            seed = int(row["seed"])
            asks = int(row["asks"])
            n_correct[seed] = n_correct.get(seed, 0.0) + asks * float(row["accuracy"])
            n_asked[seed] = n_asked.get(seed, 0) + asks
    return {seed: n_correct[seed] / n_asked[seed] for seed in n_correct}


def mean(values: Seeds) -> Mean | None:
    return mean_of([*values.values()]) if values else None


def stored(experiment: str, arm: str, measure: str, control: str = "untouched") -> Mean | None:
    """A mean of an experiment whose seeds were not kept."""
    for row in rows(experiment):
        if (row["arm"], row["measure"], row["control"]) == (arm, measure, control):
            n = row["n"].split()[0]
            return Mean(float(row["mean"]), float(row["half width"]), int(n))
    return None


def kib(size: int) -> str:
    return f"{size / 1024:,.0f} KiB" if size else "0"


def state(keys_of_all_layers: int, d_model: int) -> str:
    """The bytes that a memory keeps for each stream: its layers' inputs in float32, (M + C) · D · 4 each."""
    return kib(keys_of_all_layers * d_model * 4)


class Verdict(NamedTuple):
    """A paired difference between the Compressive Transformer and Transformer-XL at equal keys."""

    panel: str
    name: str
    gain: Mean
    """More is better for the Compressive Transformer: a share of correct answers, or bits saved."""

    @property
    def winner(self) -> str:
        """The model that is ahead; empty if the interval contains zero."""
        if not self.gain.leaves_out_zero:
            return ""
        return "compressive" if self.gain.mean > 0 else "transformer-xl"


def verdicts() -> list[Verdict]:
    """Those that ``verdicts.csv`` names, with what they are computed from."""
    read = []
    for row in table_of("verdicts"):
        experiment = row["data"]
        measure = row["measure"]
        if row["base"]:
            base = seeds(experiment, row["base"], measure)
            difference = paired(seeds(experiment, row["ours"], measure), base)
        else:
            difference = stored(experiment, row["ours"], measure)
        assert difference is not None
        # Fewer bits are better, and more correct answers.
        sign = -1 if "bits" in measure else 1
        gain = Mean(sign * difference.mean, difference.half_width, difference.n)
        read.append(Verdict(row["panel"], row["name"], gain))
    return read
