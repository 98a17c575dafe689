"""The numbers of finished experiments, as docs/results/data has them: a folder for each experiment."""

import csv
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from docs.building.source import ROOT
from memformers.common.intervals import Mean, mean_of, paired

DATA = ROOT / "docs/results/data"
Seeds = dict[int, float]
"""A number of each seed."""
FLOAT = 4
"""The bytes of a number in a memory."""


@cache
def rows(experiment: str) -> list[dict[str, str]]:
    with open(DATA / experiment / "results.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def experiments() -> dict[str, dict[str, str]]:
    """What ``experiments.csv`` says of each experiment, by its name."""
    with open(DATA / "experiments.csv", encoding="utf-8", newline="") as file:
        return {row.pop("name"): row for row in csv.DictReader(file)}


@cache
def about(experiment: str) -> dict[str, Any]:
    return dict(json.loads((DATA / experiment / "results.json").read_text(encoding="utf-8")))


def seeds(experiment: str, arm: str, measure: str) -> Seeds:
    """What an ``arm`` came to by a ``measure``, by seed; empty if it was not measured. In a file of
    ``memformers recall``, ``correct, 192 – 384`` is the share of correct answers about values that were set
    so many positions ago."""
    found = [row for row in rows(experiment) if row["arm"] == arm]
    if found and "asks" in found[0]:
        low, high = (int(edge) for edge in measure.removeprefix("correct, ").split(" – "))
        return _correct(found, low, high)
    if found and "measure" in found[0]:
        return {int(row["seed"]): float(row["value"]) for row in found if row["measure"] == measure}
    return {int(row["seed"]): float(row[measure.replace(" ", "_")]) for row in found}


def _correct(found: list[dict[str, str]], low: int, high: int) -> Seeds:
    counts: dict[int, tuple[float, int]] = {}
    for row in found:
        inside = low <= int(row["from"]) and int(row["to"]) <= high
        if inside and row["control"] == "untouched" and row["accuracy"]:
            right, asked = counts.get(int(row["seed"]), (0.0, 0))
            asks = int(row["asks"])
            counts[int(row["seed"])] = right + asks * float(row["accuracy"]), asked + asks
    return {seed: right / asked for seed, (right, asked) in counts.items()}


def mean(found: Seeds) -> Mean | None:
    return mean_of([*found.values()]) if found else None


def stored(experiment: str, arm: str, measure: str, control: str = "untouched") -> Mean:
    """A mean of an experiment whose seeds were not kept; KeyError if it has none."""
    for row in rows(experiment):
        if (row["arm"], row["measure"], row["control"]) == (arm, measure, control):
            n = row["n"].split()[0]
            return Mean(float(row["mean"]), float(row["half width"]), int(n))
    raise KeyError(f"{experiment} has no {measure} of {arm}, {control}.")


def state(keys_of_all_layers: int, d_model: int) -> str:
    """The bytes that a memory keeps for each stream: the inputs of its layers, (M + C) · D · 4 in each."""
    return kib(keys_of_all_layers * d_model * FLOAT)


def kib(size: int) -> str:
    return f"{size / 1024:,.0f} KiB" if size else "0"


@dataclass(frozen=True)
class Verdict:
    """A paired difference between the Compressive Transformer and Transformer-XL at equal keys."""

    panel: str
    name: str
    difference: float
    half_width: float
    unit: str
    """``points``, where more is better, or bits, where less is."""
    seeds: int
    data: str
    """The experiment that it is from, and below where in it."""
    ours: str
    base: str
    measure: str

    @property
    def gain(self) -> float:
        """The difference, so that more is better for the Compressive Transformer."""
        return self.difference if self.unit == "points" else -self.difference

    @property
    def winner(self) -> str:
        """The model that is ahead; empty if the interval contains zero."""
        if abs(self.difference) <= self.half_width:
            return ""
        return "compressive" if self.gain > 0 else "transformer-xl"


CONVERTERS: dict[str, Any] = dict.fromkeys(Verdict.__dataclass_fields__, str) | {
    "difference": float, "half_width": float, "seeds": int,
}  # fmt: skip


def verdicts() -> list[Verdict]:
    with open(DATA / "verdicts.csv", encoding="utf-8", newline="") as file:
        found = [*csv.DictReader(file)]
    return [Verdict(**{name: convert(row[name]) for name, convert in CONVERTERS.items()}) for row in found]


def measured(verdict: Verdict) -> Mean | None:
    """The difference of a verdict, computed from the file that it is from."""
    if verdict.data == "tiny_shakespeare":
        return stored(verdict.data, verdict.ours, verdict.measure)
    v = verdict
    ours, base = (seeds(v.data, arm, v.measure) for arm in (v.ours, v.base))
    scale = 100 if v.unit == "points" else 1
    found = paired(ours, base)
    return found and Mean(found.mean * scale, found.half_width * scale, found.n)
