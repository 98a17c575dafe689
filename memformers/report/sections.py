"""Parts of every report of arms: tables of results and costs, which tokens losses are over, and what a probe
found about memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from memformers.common.files import csv_text, write_json, write_text
from memformers.common.intervals import MIN_FOR_A_CLAIM, Mean
from memformers.report.arms import BITS, ArmRuns, Column, Measure, arms_table, labels_of, most_seeds
from memformers.report.data import Block, Bullets, Cell, Chart, Point, Prose, Table, Text, prose
from memformers.report.keys import keys_text
from memformers.report.numbers import number
from memformers.report.plotting import CONTROL_LINES, bits, styles_of
from memformers.runs.folder import RESULTS, TABLE
from memformers.runs.reader import finite_number

HELD_OUT_TEXT = "the whole held-out text"
MIN_SPAN = 0.1
"""The narrowest axis of a chart: 0.1 bits per character or ten points. Rounding alone changes losses by 0.03,
which must not look large."""
MARGIN = 0.06
"""The share of a chart's width that is free on both sides."""


# Results


def results_table(
    arms: Sequence[ArmRuns],
    base: ArmRuns,
    measures: Sequence[Measure],
    extra: Mapping[str, Column] | None = None,
) -> Table:
    """Finished seeds, the mean of each measure, of several seeds the paired difference to ``base``."""
    columns: dict[str, Column] = {"seeds": lambda arm: f"{len(arm.results)}"}
    for measure in measures:
        columns[measure.label] = mean_column(measure)
        differences = {arm.name: arm.minus(base, measure.of) for arm in arms if arm is not base}
        if most_seeds(differences.values()) > 1:
            head = f"minus {base.label}"
            if len(measures) > 1:
                head = f"{measure.label}, {head}"
            columns[head] = difference_column(measure, differences)
    return arms_table(arms, columns | dict(extra or {}))


def mean_column(measure: Measure) -> Column:
    return lambda arm: measure.shown(arm.mean(measure.of))


def difference_column(measure: Measure, differences: Mapping[str, Mean | None]) -> Column:
    return lambda arm: measure.cell(differences.get(arm.name))


@dataclass(frozen=True)
class Interval:
    """A row of a chart, in the unit of its measure."""

    arm: ArmRuns
    mean: float
    half_width: float
    shown: str


def chart_of(arms: Sequence[ArmRuns], base: ArmRuns, measure: Measure) -> Chart | None:
    """From three seeds on, paired differences to ``base``, which the intervals of means would hide; otherwise
    means. None for fewer than two arms."""
    means = mean_intervals(arms, measure)
    if len(means) < 2:
        return None
    differences = difference_intervals(arms, base, measure)
    if not differences:
        start, end = axis_of(means, MIN_SPAN)
        title = prose("chart_of_means", measure=measure)
        return chart(title, means, start, end, measure.shown)
    start, end = axis_of(differences)
    title = prose("chart_of_differences", measure=measure, base=base.label)
    return chart(title, differences, start, end, measure.shown_difference, zero=-start / (end - start))


def mean_intervals(arms: Sequence[ArmRuns], measure: Measure) -> list[Interval]:
    """Means without intervals, which are for differences."""
    rows = []
    for arm in arms:
        mean = arm.mean(measure.of)
        if mean and math.isfinite(mean.mean):
            rows.append(Interval(arm, mean.mean, 0.0, measure.shown(mean)))
    return rows


def difference_intervals(arms: Sequence[ArmRuns], base: ArmRuns, measure: Measure) -> list[Interval]:
    """Differences to ``base``, which is zero; none if one of them is of too few seeds for an interval."""
    rows = []
    for arm in arms:
        if arm is base:
            rows.append(Interval(arm, 0.0, 0.0, "baseline"))
            continue
        difference = arm.minus(base, measure.of)
        if difference is None or difference.n < MIN_FOR_A_CLAIM or not math.isfinite(difference.half_width):
            return []
        shown = measure.shown_difference(difference)
        rows.append(Interval(arm, difference.mean, difference.half_width, shown))
    return rows


def axis_of(rows: Sequence[Interval], min_span: float = 0.0) -> tuple[float, float]:
    """The ends of an axis for these intervals, which is no shorter than ``min_span``."""
    low = min(row.mean - row.half_width for row in rows)
    high = max(row.mean + row.half_width for row in rows)
    middle = (low + high) / 2
    span = max(high - low, min_span) or MIN_SPAN
    half_length = span / (2 - 4 * MARGIN)
    return middle - half_length, middle + half_length


def chart(
    title: Text,
    rows: Sequence[Interval],
    start: float,
    end: float,
    show: Callable[[float], str],
    zero: float | None = None,
) -> Chart:
    lines = styles_of([row.arm for row in rows])

    def share(value: float) -> float:
        return (value - start) / (end - start)

    points = []
    for row in rows:
        low = share(row.mean - row.half_width)
        high = share(row.mean + row.half_width)
        color = lines[row.arm.name]["color"]
        points.append(Point(row.arm.label, color, row.shown, share(row.mean), low, high))
    return Chart(title, points, show(start), show(end), zero)


# Which tokens losses are over


def tokens_of_results(arms: Sequence[ArmRuns]) -> str:
    """Which part of the held-out text the losses in ``result.json`` are over."""
    parts: set[tuple[int, int]] = set()
    for arm in arms:
        for result in arm.results.values():
            n_read = int(finite_number(result.get("evaluated_tokens")) or 0)
            n_tokens = int(finite_number(result.get("held_out_tokens")) or 0)
            if n_read < n_tokens:
                parts.add((n_read, n_tokens))
    if not parts:
        return HELD_OUT_TEXT
    shown = []
    for n_read, n_tokens in sorted(parts):
        shown.append(f"{n_read:,} of {n_tokens:,} tokens")
    return f"{' or '.join(shown)} of the held-out text"


def tokens_of_curves(arms: Sequence[ArmRuns]) -> list[int]:
    """How many tokens the evaluations during the training read, if the results are over others: a number
    for each kind of evaluation."""
    read_in_training: set[int] = set()
    read_for_results = set()
    for arm in arms:
        for run in arm.counted:
            _, _, n_tokens = run.metrics.points("evaluated_tokens")
            read_in_training.update(map(int, n_tokens.tolist()))
            read_for_results.add(finite_number((run.result or {}).get("evaluated_tokens")))
    return sorted(read_in_training) if read_in_training - read_for_results else []


def tokens_of_losses(arms: Sequence[ArmRuns], probe: Mapping[str, Any] | None = None) -> list[Prose]:
    """Why one model has several losses, a paragraph; none if all are over the same tokens."""
    curves = " or ".join(map("{:,}".format, tokens_of_curves(arms)))
    ablation = (probe or {}).get("memory_ablation")
    n_probed = ablation["tokens"] if ablation else 0
    if not curves and not n_probed:
        return []
    results = tokens_of_results(arms)
    return [prose("tokens_of_losses", results=results, curves=curves, probe=n_probed)]


# Costs


def costs_table(arms: Sequence[ArmRuns]) -> Table:
    """What each arm needs; of speed and memory, what was measured on this machine."""
    columns: dict[str, Column] = {
        "keys a layer": lambda arm: keys_text(arm.first.facts),
        "reach of a layer": reach_column("one_layer"),
        "reach of all": reach_column("all_layers"),
        "state per stream": fact_column("state_bytes", " KiB", scale=1 / 1024),
        "operations a token": fact_column("attention_operations"),
        "parameters": fact_column("parameters"),
        "tokens/s": speed,
        "training": lambda arm: number(arm.mean("seconds"), ",.0f", " s"),
        "evaluation": lambda arm: number(arm.mean("evaluation_seconds"), ",.0f", " s"),
        "peak memory": peak_memory,
    }
    return arms_table(arms, columns)


def fact_column(name: str, unit: str = "", scale: float = 1.0) -> Column:
    return lambda arm: number(arm.first.facts.get(name), ",.0f", unit, scale=scale)


def reach_column(layers: str) -> Column:
    return lambda arm: number(arm.first.facts["memory"][layers], ",.0f")


def speed(arm: ArmRuns) -> str:
    speeds: list[float] = []
    for run in arm.counted:
        _, _, values = run.metrics.points("tokens_per_second")
        speeds += values.tolist()
    return number(median(speeds) if speeds else None, ",.0f")


def peak_memory(arm: ArmRuns) -> str:
    peaks = arm.values("peak_memory_bytes").values()
    return number(max(peaks, default=None), ",.0f", " MiB", scale=2**-20)


# What a probe found


@dataclass(frozen=True)
class Probed:
    """What a probe says in a report."""

    method: list[Block]
    """How it was measured, or why it wasn't."""
    tables: list[Table]
    findings: list[Text]
    """A sentence about each part of each memory."""

    @property
    def blocks(self) -> list[Block]:
        if not self.tables:
            return self.method
        return [*self.method, *self.tables, Bullets(self.findings or [prose("no_memory")])]


def read_probed(arms: Sequence[ArmRuns], probe: Mapping[str, Any]) -> Probed:
    # Which runs were probed
    by_run: dict[str, ArmRuns] = {}
    for arm in arms:
        for run in arm.runs:
            by_run[run.folder.name] = arm
    probed = {name: by_run[name] for name in probe["checkpoints"]}
    left_out = labels_of([arm for arm in arms if arm not in probed.values()])

    # How it was measured
    method: list[Block] = []
    if left_out:
        method.append(prose("not_probed", labels=left_out))
    ablation = probe["memory_ablation"]
    if not ablation:
        return Probed([*method, prose("no_ablation")], [], [])
    measure = measure_of_probe(arms)
    method.append(prose("ablation", unit=measure.label, ablation=ablation))

    # What changed memories cost
    rows: list[list[str | Cell]] = []
    findings: list[Text] = []
    for name, arm in probed.items():
        costs = {control: Mean.from_json(mean) for control, mean in ablation["costs"][name].items()}
        cells = [measure.cell(costs.get(control)) for control in CONTROL_LINES]
        rows.append([arm.label, measure.shown(ablation["loss"][name]), *cells])
        for part in ("slots", "memory"):
            if f"{part} zeroed" in costs:
                finding = prose(
                    "finding",
                    label=arm.label,
                    part=part,
                    swapped=costs[f"{part} swapped"],
                    zeroed=costs[f"{part} zeroed"],
                    show=measure.shown_difference,
                )
                findings.append(finding)
    table = Table(["model", "loss", *CONTROL_LINES], rows, has_numbers=True)
    return Probed(method, [table], findings)


def measure_of_probe(arms: Sequence[ArmRuns]) -> Measure:
    """Shows nats per token as bits per character. Without a result, a character counts as a token; where bits
    per character are not known, nats are shown."""
    for arm in arms:
        for result in arm.results.values():
            bits_of_a_nat = bits(result)
            if bits_of_a_nat is None:
                return replace(BITS, label="nats per token")
            return replace(BITS, scale=bits_of_a_nat)
    return replace(BITS, scale=1 / math.log(2))


# Files


def write_results(
    folder: Path, arms: Sequence[ArmRuns], base: ArmRuns, numbers: Callable[[ArmRuns], dict[str, Any]],
    head: Sequence[str], lines: Sequence[Sequence[Any]], **about: Any,
) -> None:  # fmt: skip
    """``results.json`` has arms, and ``results.csv`` training runs."""
    results = []
    for arm in arms:
        names = {"name": arm.name, "label": arm.label, "seeds": list(arm.results)}
        results.append(names | numbers(arm))
    write_json(folder / RESULTS, {"base": base.name, **about, "arms": results})
    write_text(folder / TABLE, csv_text(head, lines))
