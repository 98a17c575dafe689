"""The live page of a run or a comparison: the start of its report, computed from the runs as they grow."""

import hashlib
import html
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from memformers.common.console import duration
from memformers.common.errors import UserError
from memformers.common.intervals import MIN_FOR_A_CLAIM, Mean, mean_of_known
from memformers.report.arms import ArmRuns, Column, Measure, arms_of, base_of, labels_of, measure_of
from memformers.report.claims import claims, trial
from memformers.report.data import Block, Cell, Details, Notice, Table, prose
from memformers.report.made import setting_text
from memformers.report.numbers import DASH, number
from memformers.report.plotting import LineStyle, styles_of
from memformers.report.rendering import DARK, html_of
from memformers.report.sections import chart_of, results_table, tokens_of_losses
from memformers.runs.folder import PAGE, short_names
from memformers.runs.metrics import SECONDS, TOKENS
from memformers.runs.reader import (
    FINISHED,
    PLANNED,
    RUNNING,
    Run,
    Runs,
    differing_settings,
    finite_number,
)
from memformers.runs.time_left import seconds_left, share_trained
from memformers.tracking.discovery import noted_comparisons

FIRST = ("bits_per_character.valid", "loss.valid", "loss.train")
"""The metric that is drawn if the reader has chosen none: the first of these that has a point, or of those
that the plan of another task names."""
IN_WORDS = {
    "bits_per_character.valid": "held-out loss (bits per character)",
    "bits_per_character.train": "training loss (bits per character)",
    "loss.valid": "held-out loss (nats per token)",
    "loss.train": "training loss (nats per token)",
    "accuracy.valid": "validation accuracy (share of tokens)",
    "reconstruction_loss.train": "reconstruction loss, training (MSE)",
    "reconstruction_loss.valid": "reconstruction loss, validation (MSE)",
    "tokens_per_second": "training speed (tokens per second)",
    "gradient_norm": "norm of the gradient",
    "memory.length": "memory (positions)",
    "memory.compressed_length": "compressed memory (slots, or kept positions)",
}  # what metrics are called, with their units; others have their own names
AXES = {TOKENS: "training tokens", SECONDS: "training time (seconds)"}
DASHES = {":": "dot", "-": "solid", "--": "dash", "-.": "dashdot"}
SYMBOLS = {"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down",
           "P": "cross", "X": "x"}  # fmt: skip
"""plotly's names for matplotlib's lines and markers."""
MAX_MARKED = 40  # the most points of a curve of which each has its marker
BAND_ALPHA = "2e"  # how opaque a band is, from 00 to ff: what lies below stays visible
MAX_SHOWN = 200  # the most arms that are drawn and listed, and the most runs
Knows = Callable[[str], bool]  # whether labml's pages have a run, by its id


def describe(
    runs: Runs, metric: str = "", over: str = TOKENS, *, log: bool = False, dark: bool = False,
    knows: Knows = lambda run: False,
) -> dict[str, Any]:  # fmt: skip
    """What the page shows: curves of ``metric``, or of another one that has points, and all else as HTML."""
    metrics = metrics_of(runs.all)
    if metric not in metrics:
        metric = next((name for name in (*FIRST, *curves_of(runs.all), *metrics) if name in metrics), "")
    arms = arms_of(runs.all)[:MAX_SHOWN]
    above, below = body(arms, runs, knows) if arms else ("", "")
    return {
        "title": runs.folder.name,
        "report": (runs.folder / PAGE).is_file(),
        "metrics": {name: in_words(name, runs.all) for name in metrics},
        "metric": metric,
        "figure": figure(arms, metric, over, log, dark),
        "above": above,
        "below": below,
    }


def curves_of(runs: Sequence[Run]) -> Mapping[str, str]:
    """Metrics that the plan of a task outside of the package describes, the most telling one first."""
    return runs[0].task_info.curves if runs else {}


def in_words(name: str, runs: Sequence[Run]) -> str:
    """What a metric of ``runs`` is called, with its unit; the name of one that nothing describes."""
    return curves_of(runs).get(name) or IN_WORDS.get(name, name)


def metrics_of(runs: Sequence[Run]) -> list[str]:
    """The metrics that have a value, in alphabetical order."""
    names: set[str] = set()
    for run in runs:
        for name in run.metrics.names:
            if run.last(name) is not None:
                names.add(name)
    return sorted(names)


def body(arms: Sequence[ArmRuns], runs: Runs, knows: Knows) -> tuple[str, str]:
    """What is above the chart, and what below it, as HTML."""
    base = base_of(arms)
    valid = validation_metric(arms)
    try:
        measure = with_finite_values(measure_of(arms))
    except UserError as error:  # of a plan that is broken
        return html_of([str(error)]), html_of([runs_table(runs, valid, knows)])
    # Above: what there is to know so far
    above: list[Block] = []
    if chart := chart_of(arms, base, measure):
        above.append(chart)
    above += verdict_so_far(arms, base, measure, runs)
    above.append(results_table(arms, base, [measure], live_columns(valid, runs.all)))
    if states_of(runs.all)[FINISHED]:  # then the table has both losses
        above += tokens_of_losses(arms)
    # Below: what few readers want
    below = [*settings_that_differ(arms), runs_table(runs, valid, knows)]
    return html_of(above), html_of(below)


def validation_metric(arms: Sequence[ArmRuns]) -> str:
    """The metric whose last values the tables have; empty if nothing is recorded."""
    for name in (*FIRST, *curves_of(arms[0].runs)):
        for arm in arms:
            if arm.curves(name):
                return name
    return ""


def with_finite_values(measure: Measure) -> Measure:
    """The measure without values that are no numbers, since a file may contain anything."""
    name = str(measure.of)  # as all measures of tasks have
    return replace(measure, of=lambda result: finite_number(result.get(name)))


def verdict_so_far(arms: Sequence[ArmRuns], base: ArmRuns, measure: Measure, runs: Runs) -> list[Block]:
    """What the finished runs support; of the method, nothing until all have finished."""
    n_finished = states_of(runs.all)[FINISHED]
    n_planned = len(runs.all)
    blocks: list[Block] = []
    try:
        blocks += [Notice(warning) for warning in trial(runs.folder)]
        if 0 < n_finished < n_planned:
            blocks.append(prose("so_far", finished=n_finished, planned=n_planned))
        claimed = claims(arms, base, measure, runs.folder)
    except UserError as error:  # of a plan that is broken
        return [*blocks, str(error)]
    return [*blocks, *(claimed if n_finished == n_planned else claimed[:1])]


def live_columns(valid: str, runs: Sequence[Run]) -> dict[str, Column]:
    """The columns beside the results: the last values of the metric ``valid`` and of the training."""
    columns: dict[str, Column] = {"state": states_in_words}
    if valid:
        columns[in_words(valid, runs)] = last_column(valid, ".3f")
    columns["tokens"] = last_column(TOKENS, ",.0f")
    columns["time"] = last_column(SECONDS, ",.0f", " s")
    columns["tokens/s"] = last_column("tokens_per_second", ",.0f")
    return columns


def last_column(name: str, form: str, unit: str = "") -> Column:
    """The last value of a metric, the mean over runs."""

    def cell(arm: ArmRuns) -> str:
        mean = mean_of_known(run.last(name) for run in arm.counted)
        return number(mean and mean.mean, form, unit)

    return cell


def settings_that_differ(arms: Sequence[ArmRuns]) -> list[Block]:
    by_arm = [arm.first.settings for arm in arms]
    differing = [name for name in differing_settings(by_arm) if name not in ("seed", "label")]
    if not differing:
        return []
    shown_names = short_names(differing)
    rows = []
    for name in differing:
        row = [shown_names[name]]
        for settings in by_arm:
            value = settings.get(name)
            row.append(DASH if value is None else setting_text(value))
        rows.append(row)
    head = ["setting", *labels_of(arms)]
    return [Details("Settings that differ", [Table(head, rows, has_numbers=True)])]


def runs_table(runs: Runs, valid: str, knows: Knows) -> Details:
    """Each run, with a link to labml's page of it."""
    rows: list[list[str | Cell]] = []
    for run in runs.all[:MAX_SHOWN]:
        is_known = run.identity.isalnum() and knows(run.identity)
        name = Cell(run.folder.name, link=f"/run/{run.identity}" if is_known else "")
        rows.append([name, state_in_words(run), number(run.last(valid), ".3f")])
    head = ["run", "state", in_words(valid, runs.all) or "validation"]
    return Details("Runs", [Table(head, rows, has_numbers=True)])


def states_of(runs: Sequence[Run]) -> Counter[str]:
    """How many runs are in each state, in the order of the runs."""
    return Counter(run.state[0] for run in runs)


def state_in_words(run: Run) -> str:
    state, reason = run.state
    if state == RUNNING and run.budget:
        share = run.tokens / run.budget
        return f"running, {100 * share:.0f} %" if share < 1 else "evaluating"
    return f"{state}: {reason}" if reason else state


def states_in_words(arm: ArmRuns) -> str:
    if len(arm.runs) == 1:
        state, _, _ = state_in_words(arm.first).partition(":")
        return state
    return ", ".join(f"{count} {state}" for state, count in states_of(arm.runs).items())


def figure(arms: Sequence[ArmRuns], metric: str, over: str, log: bool, dark: bool) -> dict[str, Any]:
    """The curves of the arms, with bands over seeds, as plotly has them."""
    # The curves
    lines = styles_of(arms)
    traces = []
    for arm in arms:
        curve = arm.curve(metric, over) if metric else []
        if curve:
            traces += traces_of(arm, curve, lines[arm.name], dark)

    # Both axes, and what is around them
    axis = {"gridcolor": "#80808040", "zeroline": False, "automargin": True, "exponentformat": "none"}
    title = html.escape(in_words(metric, arms[0].runs if arms else ()))  # plotly reads tags
    layout = {
        "xaxis": {**axis, "title": {"text": AXES[over]}, "tickformat": "~s"},
        "yaxis": {
            **axis,
            "title": {"text": title, "font": {"size": 12}},
            "type": "log" if log else "linear",
        },
        "uirevision": f"{metric} {over} {log}",
        "hovermode": "x",
        "font": {"color": "#e3e3e3" if dark else "#1b1b1b", "family": "system-ui, sans-serif", "size": 13},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "modebar": {"orientation": "v"},  # beside the legend and not over it
        "margin": {"l": 60, "r": 15, "t": 10, "b": 40},
    }
    return {"data": traces, "layout": layout}


def traces_of(
    arm: ArmRuns, curve: Sequence[tuple[float, Mean]], style: LineStyle, dark: bool
) -> list[dict[str, Any]]:
    """The line of an arm, after both edges of its band if it has one."""
    color = style["color"].lower()
    if dark:
        color = DARK[color]
    shared = {
        "x": [finite(x) for x, _ in curve],
        "legendgroup": arm.name,
        "mode": "lines",
        "hoverinfo": "skip",
        "showlegend": False,
    }
    traces = []
    middle = []
    low = []
    high = []
    has_band = False
    for _, mean in curve:
        middle.append(finite(mean.mean))
        low.append(finite(mean.mean - mean.half_width))
        high.append(finite(mean.mean + mean.half_width))
        has_band = has_band or mean.n >= MIN_FOR_A_CLAIM  # of two, it would be as high as the chart
    if has_band:
        # plotly fills the area between a trace and the one before it
        fill = {"fill": "tonexty", "fillcolor": f"{color}{BAND_ALPHA}"}
        traces.append({**shared, "y": low, "line": {"width": 0}})
        traces.append({**shared, "y": high, "line": {"width": 0}, **fill})
    line = {"color": color, "dash": DASHES.get(str(style["linestyle"]), "longdash"), "width": 2}
    traces.append(
        {
            **shared,
            "y": middle,
            "name": html.escape(arm.label),
            "mode": "lines+markers" if len(curve) <= MAX_MARKED else "lines",
            "line": line,
            "showlegend": True,
            "hoverinfo": "x+y+name",
            "marker": {"symbol": SYMBOLS[style["marker"]], "size": 7},
        }
    )
    return traces


def finite(value: float) -> float | None:
    """The number with seven digits, more than a chart shows; None for one that is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def status(runs: Runs) -> str:
    """The line below the title: states, the share that is trained, and the time that is left."""
    # States
    counts = states_of(runs.all)
    n_runs = len(runs.all)
    parts = [f"{n_runs} run{'' if n_runs == 1 else 's'}", f"{counts[FINISHED]} finished"]
    for state, count in counts.items():
        if state not in (FINISHED, PLANNED):
            parts.append(f"{count} {state}")
    # Progress
    share = share_trained(runs.all)
    left = seconds_left(runs)
    if share and counts[FINISHED] < n_runs:
        parts.append(f"{100 * share:.0f} % trained")
    if left:
        parts.append(f"about {duration(left)} left")
    changed = max((run.changed for run in runs.all), default=0.0)
    ago = f"last record {duration(max(0.0, time.time() - changed))} ago" if changed else "no record yet"
    return f"{', '.join(parts)}; {ago}"


class Comparisons:
    """The runs and comparisons of this machine, by their ids; for one thread at a time."""

    def __init__(self) -> None:
        self._open: dict[str, Runs] = {}

    def get(self, identity: str) -> Runs | None:
        """The runs in a folder, with what is new; None if there is no such note, or the folder is gone."""
        folder = noted_comparisons().get(identity)
        if folder is None or not folder.is_dir():
            self._open.pop(identity, None)
            return None
        if identity not in self._open:
            self._open[identity] = Runs(folder)
        else:
            self._open[identity].update()
        return self._open[identity]

    def all(self) -> dict[str, Runs]:
        shown = {}
        for identity in noted_comparisons():
            if runs := self.get(identity):
                shown[identity] = runs
        return shown


def version_of(runs: Runs, *asked: object) -> str:
    """A text that changes whenever something else is shown to one who ``asked``."""
    state = repr((runs.version, (runs.folder / PAGE).is_file(), asked))
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def list_of(comparisons: Mapping[str, Runs], root: str) -> list[Block]:
    """All runs and comparisons, each with a link to its page and its state; of none, how to start one."""
    rows: list[list[str | Cell]] = []
    for identity, runs in comparisons.items():
        rows.append([Cell(runs.folder.name, link=f"{root}/{identity}"), status(runs)])
    return [Table(["folder", "state"], rows)] if rows else [prose("no_run_yet")]
