"""The results of an experiment's trainings, over seeds: ``results.json`` and ``results.csv``."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memformers.common.files import read_json, replacing, write_json
from memformers.common.intervals import mean_of_known
from memformers.runs.folder import CONFIG, FACTS, RESULT, RESULTS, TABLE
from memformers.runs.plan import Arm, Plan

REFERENCE, CLAIMED = "transformer-xl", "compressive"
"""The arms that the headline compares."""
Found = dict[str, Any]
"""One training's ``result.json``."""


def write_summary(folder: Path, plan: Plan) -> dict[str, Any]:
    """Summarize the trainings of ``plan`` in ``folder`` and write both files; returns the contents of
    ``results.json``. Every mean has half the width of its 95 % interval over seeds by Student's t, or None
    for one seed."""
    found = {arm.name: results_of(folder, arm.name, plan) for arm in plan.arms}
    done = {name: by_seed for name, by_seed in found.items() if by_seed}
    setting = {**plan.settings["recall"], "train": {n: v for n, v in plan.settings.items() if n != "recall"}}
    summary = {
        "setting": setting,
        "chance": 1 / setting["stream"]["values"],
        "edges": next(iter(next(iter(done.values())).values()))["recall"]["edges"],
        "seeds": plan.seeds,
        "arms": [arm_summary(arm, done[arm.name], folder, plan) for arm in plan.arms if arm.name in done],
        "missing": [
            f"{run.arm}, seed {run.seed}" for run in plan.runs.values() if run.seed not in found[run.arm]
        ],
        "differences": differences(done),
    }
    summary["headline"] = headline(summary, done)
    write_json(folder / RESULTS, summary)
    with replacing(folder / TABLE) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows(done))
    return summary


def results_of(folder: Path, arm: str, plan: Plan) -> dict[int, Found]:
    """The results of an arm's successful trainings, by seed."""
    paths = {run.seed: folder / name / RESULT for name, run in plan.runs.items() if run.arm == arm}
    return {seed: read_json(path) for seed, path in paths.items() if path.exists()}


def arm_summary(arm: Arm, by_seed: dict[int, Found], folder: Path, plan: Plan) -> dict[str, Any]:
    """The costs of an arm, and its recall."""
    names = [name for name, run in plan.runs.items() if run.arm == arm.name and run.seed in by_seed]
    places, results = [folder / name for name in names], list(by_seed.values())
    facts, config = read_json(places[0] / FACTS), read_json(places[0] / CONFIG)
    environments = [read_json(place / FACTS)["environment"] for place in places]
    return {
        "name": arm.name,
        "title": arm.label or arm.name,
        "settings": arm.settings,
        **{n: config["model"][n] for n in ("model", "compression", "compression_rate", "compression_start")},
        "mem_len": config["model"]["mem_len"] if config["model"]["model"] != "transformer" else 0,
        "c_mem_len": config["model"]["c_mem_len"] if config["model"]["model"] == "compressive" else 0,
        "frozen": config["recall"]["frozen"],
        **{name: facts[name] for name in ("keys", "sees_back", "parameters", "attention_operations")},
        "seeds": list(by_seed),
        "seconds": mean_of([result["seconds"] for result in results]),
        "tokens_per_second": mean_of([result["tokens"] / result["seconds"] for result in results]),
        "peak_memory_bytes": max((r["peak_memory_bytes"] or 0 for r in results), default=0) or None,
        "jobs": sorted({environment.get("jobs", 1) for environment in environments}),
        "environments": distinct(environments),
        "within_reach": mean_of([result["within_reach"] for result in results]),
        "recall": over_seeds([result["recall"] for result in results]),
        "controls": {
            name: over_seeds([result["controls"][name] for result in results])
            for name in results[0]["controls"]
        },
    }


def over_seeds(recalls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy by distance and by place, over seeds."""
    bins = zip(*(recall["accuracy"] for recall in recalls), strict=True)
    places = recalls[0]["by_place"]
    return {
        "accuracy": [mean_of(values) for values in bins],
        "by_place": {place: mean_of([recall["by_place"][place] for recall in recalls]) for place in places},
    }


def mean_of(values: Sequence[float | None]) -> dict[str, float | None]:
    """The mean of the values that aren't None, and half the width of its interval."""
    found = mean_of_known(values)
    return {"mean": None, "half_width": None} if found is None else found.to_json()


def differences(done: Mapping[str, dict[int, Found]]) -> dict[str, list[dict[str, float | None]]]:
    """How much more each arm recalls than the reference in each bin, paired by seed, since both read the same
    stream."""
    if REFERENCE not in done:
        return {}
    found = {}
    for name, by_seed in done.items():
        pairs = [(by_seed[s]["recall"]["accuracy"], done[REFERENCE][s]["recall"]["accuracy"])
                 for s in by_seed if s in done[REFERENCE]]  # fmt: skip
        if name != REFERENCE and pairs:
            bins = zip(*(zip(ours, theirs, strict=True) for ours, theirs in pairs), strict=True)
            found[name] = [mean_of([a - b for a, b in bin if None not in (a, b)]) for bin in bins]
    return found


def headline(summary: dict[str, Any], done: Mapping[str, dict[int, Found]]) -> dict[str, Any] | None:
    """The effect of the slots: the recall of both arms at distances that only the arm with slots sees in one
    layer, and the paired difference; None without both arms, or without such a bin."""
    sees = {arm["name"]: arm["sees_back"] for arm in summary["arms"]}
    if not {REFERENCE, CLAIMED} <= sees.keys():
        return None
    edges = summary["edges"]
    bins = [i for i in range(len(edges) - 1) if sees[REFERENCE] <= edges[i] and edges[i + 1] <= sees[CLAIMED]]
    seeds = sorted(done[REFERENCE].keys() & done[CLAIMED].keys())
    if not bins or not seeds:
        return None
    right = {
        name: [share(done[name][seed]["recall"], bins) for seed in seeds] for name in (REFERENCE, CLAIMED)
    }
    pairs = zip(right[CLAIMED], right[REFERENCE], strict=True)
    return {
        "from": edges[bins[0]],
        "to": edges[bins[-1] + 1],
        "seeds": seeds,
        **{name: mean_of(values) for name, values in right.items()},
        "difference": mean_of([a - b for a, b in pairs if a is not None and b is not None]),
    }


def share(recall: dict[str, Any], bins: Sequence[int]) -> float | None:
    """The fraction of all questions in ``bins`` whose answer is right."""
    asks = sum(recall["asks"][i] for i in bins)
    return sum((recall["accuracy"][i] or 0.0) * recall["asks"][i] for i in bins) / asks if asks else None


def rows(done: Mapping[str, dict[int, Found]]) -> Iterator[Sequence[Any]]:
    """The table: a line for each arm, seed, control and bin."""
    yield "arm", "seed", "control", "from", "to", "asks", "accuracy"
    for name, by_seed in done.items():
        for seed, result in by_seed.items():
            for control, recall in {"untouched": result["recall"], **result["controls"]}.items():
                lows, highs = recall["edges"][:-1], recall["edges"][1:]
                for line in zip(lows, highs, recall["asks"], recall["accuracy"], strict=True):
                    yield name, seed, control, *line


def distinct(values: Sequence[Any]) -> list[Any]:
    """Each of ``values`` once, in order."""
    return [value for i, value in enumerate(values) if value not in values[:i]]
