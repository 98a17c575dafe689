"""The live page of a run or a comparison: the start of its report, computed from the runs as they grow."""

import hashlib
import html
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memformers.common.console import duration
from memformers.common.errors import UserError
from memformers.common.intervals import mean_of_known
from memformers.report.arms import ArmRuns, Column, arms_of, base_of, measure_of
from memformers.report.markdown import DARK, DASH, Markup, html_of, number, plain, prose, table
from memformers.report.plotting import line_styles
from memformers.report.sections import bars, claims, results_table, setting_text, tokens_of_losses, trial
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

FIRST = ("bits_per_character.valid", "loss.valid", "loss.train", "success.train")
"""The metric that is drawn if the reader has chosen none: the first of these that has a point."""
IN_WORDS = {
    "bits_per_character.valid": "held-out loss (bits per character)",
    "bits_per_character.train": "training loss (bits per character)",
    "loss.valid": "held-out loss (nats per token)",
    "loss.train": "training loss (nats per token)",
    "accuracy.valid": "validation accuracy (share of tokens)",
    "reconstruction_loss.train": "reconstruction loss, training (MSE)",
    "reconstruction_loss.valid": "reconstruction loss, validation (MSE)",
    "tokens_per_second": "training speed (tokens per second)",
    "success.train": "episodes that succeed (share)",
    "success.valid": "episodes that succeed, likeliest actions (share)",
    "return.train": "rewards of an episode",
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
MAX_SHOWN = 200  # the most arms that are drawn and listed, and the most runs
Knows = Callable[[str], bool]  # whether labml's pages have a run, by its id


def describe(
    runs: Runs, metric: str = "", over: str = TOKENS, *, log: bool = False, dark: bool = False,
    knows: Knows = lambda run: False,
) -> dict[str, Any]:  # fmt: skip
    """What the page shows: curves of ``metric``, or of another one that has points, and all else as HTML."""
    names = sorted({name for run in runs.all for name in run.metrics.names})
    metrics = [name for name in names if any(run.last(name) is not None for run in runs.all)]
    if metric not in metrics:
        metric = next((name for name in (*FIRST, *metrics) if name in metrics), "")
    arms = arms_of(runs.all)[:MAX_SHOWN]
    above, below = body(arms, runs, knows) if arms else ("", "")
    return {
        "title": runs.folder.name,
        "report": (runs.folder / PAGE).is_file(),
        "metrics": {name: IN_WORDS.get(name, name) for name in metrics},
        "metric": metric,
        "figure": figure(arms, metric, over, log, dark),
        "above": above,
        "below": below,
    }


def body(arms: Sequence[ArmRuns], runs: Runs, knows: Knows) -> tuple[str, str]:
    """What is above the chart, and what below it, as HTML."""
    base = base_of(arms)
    measure = measure_of(arms)
    measured = str(measure.of)  # a name, as all measures of tasks have
    measure = replace(measure, of=lambda result: finite_number(result.get(measured)))
    finished = [run.state[0] for run in runs.all].count(FINISHED)
    above: list[str] = []
    try:
        above += [f"> {warning}" for warning in trial(runs.folder)]
        if 0 < finished < len(runs.all):
            above.append(prose("so_far", finished=finished, planned=len(runs.all)))
        above += claims(arms, base, measure, runs.folder)[: 1 if finished < len(runs.all) else None]
    except UserError as error:  # of a plan that is broken
        above.append(plain(str(error)))
    valid = next((name for name in FIRST if any(arm.curves(name) for arm in arms)), "")
    valid_in_words = IN_WORDS.get(valid, valid) or "validation"

    def last(name: str, form: str, unit: str = "") -> Column:
        return lambda arm: number(
            mean.mean if (mean := mean_of_known(run.last(name) for run in arm.counted)) else None, form, unit
        )

    columns: dict[str, Column] = {"state": states}
    if valid:
        columns[valid_in_words] = last(valid, ".3f")
    columns |= {"tokens": last(TOKENS, ",.0f"), "time": last(SECONDS, ",.0f", " s")}
    columns["tokens/s"] = last("tokens_per_second", ",.0f")
    above.append(results_table(arms, base, [measure], columns))
    if finished:  # then the table has both losses
        above += tokens_of_losses(arms)
    below, of_arms = [], [arm.first.settings for arm in arms]
    if differing := [name for name in differing_settings(of_arms) if name not in ("seed", "label")]:
        names = short_names(differing)
        rows = [
            [names[name], *(DASH if of.get(name) is None else setting_text(of[name]) for of in of_arms)]
            for name in differing
        ]
        below = ["### Settings that differ", table(["setting", *(a.label for a in arms)], rows, numbers=True)]
    rows = []
    for run in runs.all[:MAX_SHOWN]:
        name = plain(run.folder.name)
        if run.identity.isalnum() and knows(run.identity):
            name = Markup(f"[{name}](/run/{run.identity})")
        rows.append([name, state_in_words(run), number(run.last(valid), ".3f")])
    below += ["### Runs", table(["run", "state", valid_in_words], rows, numbers=True)]
    return bars(arms, measure) + html_of("\n\n".join(above)), html_of("\n\n".join(below))


def state_in_words(run: Run) -> str:
    state, why = run.state
    if state == RUNNING and run.budget:
        share = run.tokens / run.budget
        return f"running, {100 * share:.0f} %" if share < 1 else "evaluating"
    return f"{state}: {why}" if why else state


def states(arm: ArmRuns) -> str:
    if len(arm.runs) == 1:
        return state_in_words(arm.first).partition(":")[0]
    every = [run.state[0] for run in arm.runs]
    return ", ".join(f"{every.count(state)} {state}" for state in dict.fromkeys(every))


def figure(arms: Sequence[ArmRuns], metric: str, over: str, log: bool, dark: bool) -> dict[str, Any]:
    """The curves of the arms, with bands over seeds, as plotly has them."""
    lines, traces = line_styles([arm.name for arm in arms]), []
    for arm in arms:
        curve = arm.curve(metric, over) if metric else []
        if not curve:
            continue
        style, (xs, means) = lines[arm.name], zip(*curve, strict=True)
        color = style["color"].lower()
        color = DARK[color] if dark else color
        shared = {"x": [*map(finite, xs)], "legendgroup": arm.name, "mode": "lines", "hoverinfo": "skip",
                  "showlegend": False}  # fmt: skip
        if any(mean.n > 1 and not math.isnan(mean.half_width) for mean in means):
            low, high = ([finite(m.mean + sign * m.half_width) for m in means] for sign in (-1, 1))
            band = {"line": {"width": 0}, "fill": "tonexty", "fillcolor": f"{color}2e"}
            traces += [{**shared, "y": low, "line": {"width": 0}}, {**shared, "y": high, **band}]
        dash = DASHES.get(str(style["linestyle"]), "longdash")
        traces.append(
            {**shared, "y": [finite(mean.mean) for mean in means], "name": html.escape(arm.label),
             "mode": "lines+markers" if len(curve) <= MAX_MARKED else "lines",
             "line": {"color": color, "dash": dash, "width": 2}, "showlegend": True, "hoverinfo": "x+y+name",
             "marker": {"symbol": SYMBOLS[style["marker"]], "size": 7}}
        )  # fmt: skip
    axis = {"gridcolor": "#80808040", "zeroline": False, "automargin": True, "exponentformat": "none"}
    title, kind = html.escape(IN_WORDS.get(metric, metric)), "log" if log else "linear"  # plotly reads tags
    layout = {
        "xaxis": {**axis, "title": {"text": AXES[over]}, "tickformat": "~s"},
        "yaxis": {**axis, "title": {"text": title, "font": {"size": 12}}, "type": kind},
        "uirevision": f"{metric} {over} {log}", "hovermode": "x",
        "font": {"color": "#e3e3e3" if dark else "#1b1b1b", "family": "system-ui, sans-serif", "size": 13},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "modebar": {"orientation": "v"},  # beside the legend and not over it
        "margin": {"l": 60, "r": 15, "t": 10, "b": 40},
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def finite(value: float) -> float | None:
    """The number with seven digits, more than a chart shows; None for one that is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def status(runs: Runs) -> str:
    every = [run.state[0] for run in runs.all]
    parts = [f"{len(every)} run{'s' * (len(every) != 1)}", f"{every.count(FINISHED)} finished"]
    for state in dict.fromkeys(state for state in every if state not in (FINISHED, PLANNED)):
        parts.append(f"{every.count(state)} {state}")
    share = share_trained(runs.all)
    left = seconds_left(runs)
    if share and every.count(FINISHED) < len(every):
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
        if runs := self._open.get(identity):
            runs.update()
        return self._open.setdefault(identity, runs or Runs(folder))

    def all(self) -> dict[str, Runs]:
        return {identity: runs for identity in noted_comparisons() if (runs := self.get(identity))}


def version_of(runs: Runs, *asked: object) -> str:
    """A text that changes whenever something else is shown to one who ``asked``."""
    state = repr((runs.version, (runs.folder / PAGE).is_file(), asked))
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def list_of(comparisons: dict[str, Runs], root: Path | str) -> str:
    links = [
        f'<li><a href="{root}/{identity}">{html.escape(runs.folder.name)}</a><br>{html.escape(status(runs))}'
        for identity, runs in comparisons.items()
    ]
    return f"<ul>{''.join(links)}</ul>" if links else ""
