"""The report of agents that remember: the share of successes of each memory by task and by the length of the
corridor, what swapped and zeroed memories cost, speeds beside nn.GRU's, and each seed's numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments.columns import Measured, differences_table, labels_of, measured, seeds_csv

from experiments.agents.environments import T_MAZE
from memformers.common.files import write_json, write_text
from memformers.report import plotting
from memformers.report.arms import ArmRuns, Column, Measure, Quantity, arms_of, arms_table
from memformers.report.markdown import DASH, number, table
from memformers.report.page import write_page
from memformers.report.provenance import facts_table, settings_tables
from memformers.report.sections import warnings
from memformers.runs.folder import EXPERIMENT, RESULTS, TABLE
from memformers.runs.reader import read_runs

SUCCESS = Measure("success", "success", ".1f", " %", scale=100, better=1)
RETURN = Measure("return", "return", ".2f", better=1)
BASE = "transformer-xl"
LOOKS = {"none": plotting.BLUE, "gru": plotting.BLACK, "transformer-xl-gated": plotting.AMBER,
         "compressive-gated": plotting.SKY}  # fmt: skip
SUCCESS_NOTE = (
    "Shares of successes, and in brackets how many seeds. The reach is that of one layer / all layers, in "
    "steps before the window."
)
RETURN_NOTE = "Sums of the rewards of an episode, not discounted, and in brackets how many seeds."
Tasks = Mapping[str, Sequence[ArmRuns]]
"""By their names, the arms that have begun training runs on them."""
METHOD = (
    "Each arm is trained by the same PPO with the same settings and as many steps. "
    "Success is the share of episodes that end with a reward, of {} episodes after the training, with the "
    "likeliest actions. Chance on a T-maze is 50 %. ± is half the width of a 95 % interval over seeds, by "
    "Student's t. No gradient goes beyond a window, in any arm: nn.GRU's state is carried on, but what is "
    "written into it is learned within the window alone."
)


def write_report(folder: Path) -> Path:
    """Write the report of the experiment in ``folder``, or of all those in its sub-folders; returns its
    page."""
    places = [folder] if (folder / EXPERIMENT).is_file() else by_length(folder)
    tasks = {path.resolve().name: arms_of(read_runs(path, "agent")) for path in places}
    write_results(tasks, folder)
    every = [arm for arms in tasks.values() for arm in arms]
    said = [
        f"{warning} ({task})"
        for path, (task, arms) in zip(places, tasks.items(), strict=True)
        for warning in warnings(arms, arms[0], path)
    ]
    parts = [
        "# An agent that remembers",
        *said,
        measured_table(tasks, SUCCESS),
        SUCCESS_NOTE,
        *figure(tasks, folder),
    ]
    columns = columns_of(tasks, SUCCESS)
    differences = differences_table(columns, labels_of(columns), BASE, "percentage points")
    parts += ["## Beside Transformer-XL", differences]
    parts += ["## Memories swapped between streams, and zeroed", controls_table(tasks)]
    longest = list(tasks.values())[-1]
    parts += [f"## Speed and size, on {list(tasks)[-1]}", speeds_table(longest), SPEEDS]
    parts += ["## Returns", measured_table(tasks, RETURN), RETURN_NOTE]
    parts += ["## How it was made", METHOD.format(every[0].first.config["agent"]["evaluated"])]
    return write_page([*parts, facts_table(every, folder), *settings_tables(longest)], folder)


def by_length(folder: Path) -> list[Path]:
    """The experiments in ``folder``: T-mazes by their corridors, then others."""
    places = sorted(path.parent for path in folder.glob(f"*/{EXPERIMENT}"))
    return sorted(places, key=lambda path: length_of(path.name) or 10**9)


def length_of(task: str) -> int | None:
    """The length of a T-maze's corridor; None for another task."""
    return int(task.removeprefix(T_MAZE)) if task.startswith(T_MAZE) else None


def columns_of(tasks: Tasks, measure: Measure) -> list[Measured]:
    """A column of ``measure`` for each task."""
    return [measured(task, measure, arms) for task, arms in tasks.items()]


def measured_table(tasks: Tasks, measure: Measure) -> str:
    """A row for each arm: its reach, and its means at each task."""
    columns, rows = columns_of(tasks, measure), []
    for name, arm in {arm.name: arm for arms in tasks.values() for arm in arms}.items():
        memory = arm.first.facts["memory"]
        reach = f"{memory['one_layer']} / {memory['all_layers']}" if memory["one_layer"] else DASH
        means = (column.mean(name) for column in columns)
        rows.append([arm.label, reach, *(f"{measure.shown(m)} ({m.n})" if m else DASH for m in means)])
    return table(["arm", "reach", *tasks], rows)


def figure(tasks: Tasks, folder: Path) -> list[str]:
    """Success by the length of the corridor, as paragraphs; none for fewer than two T-mazes."""
    lengths = {length: arms for task, arms in tasks.items() if (length := length_of(task))}
    if len(lengths) < 2:
        return []
    columns = [measured(str(length), SUCCESS, arms) for length, arms in lengths.items()]
    names = labels_of(columns)
    looks, many = plotting.line_styles(list(names)) | LOOKS, []
    for name, label in names.items():
        points = [(float(column.head), mean) for column in columns if (mean := column.mean(name))]
        many.append(plotting.Series(label, points, looks[name], scale=100))
    drawn, [axes] = plotting.panels([2.9])
    axes.axhline(50, color=plotting.GREY, linewidth=0.8, zorder=0)
    for series in many:
        plotting.draw_marks(axes, [series])
    plotting.style(axes, "length of the corridor, in steps", "episodes that succeed, %")
    plotting.octave_axis(axes, list(lengths))
    caption = "The sign is seen at the first step only; half of the episodes succeed by guessing."
    return [plotting.save_figure(drawn, folder, "success", "Success by length", caption)]


def under(control: str) -> Quantity:
    """The share of successes under a control, of a run's result."""
    return lambda result: result["controls"].get(control, {}).get("success")


def controls_table(tasks: Tasks) -> str:
    """A row for each arm and control: by how much the successes change, paired by seed."""
    rows: dict[str, list[str]] = {}
    for number_of_task, arms in enumerate(tasks.values()):
        for arm in arms:
            controls = dict.fromkeys(name for r in arm.results.values() for name in r["controls"])
            for control in controls:
                row = rows.setdefault(f"{arm.name}, {control}", [DASH] * len(tasks))
                row[number_of_task] = SUCCESS.shown_difference(arm.minus(arm, under(control), SUCCESS.of))
    return table(["percentage points", *tasks], [[name, *row] for name, row in rows.items()])


SPEEDS = (
    "Steps per second of acting (with the environments) and of learning, as medians over the records of all "
    "training runs, each with one thread. Others ran at the same time, and perhaps other programs."
)


def speeds_table(arms: Sequence[ArmRuns]) -> str:
    """A row for each arm: steps per second of acting and learning, also divided by nn.GRU's."""
    gru = next((arm for arm in arms if arm.name == "gru"), None)

    def speed(what: str) -> Column:
        def cell(arm: ArmRuns) -> str:
            own, other = (median_of(a, f"{what}_per_second") if a else None for a in (arm, gru))
            ratio = f" ({own / other:.2f} of nn.GRU's)" if own and other else ""
            return number(own, ",.0f") + ratio

        return cell

    columns = {what: speed(what) for what in ("acting", "learning")}
    return arms_table(arms, columns | {"parameters": lambda arm: f"{arm.first.facts['parameters']:,}"})


def median_of(arm: ArmRuns, name: str) -> float | None:
    """The median of a number in the records of an arm's training runs."""
    found = [value for run in arm.runs for value in run.metrics.points(name)[2].tolist()]
    return median(found) if found else None


def write_results(tasks: Tasks, folder: Path) -> None:
    """Write each seed's results as JSON, and its successes as CSV."""
    found: dict[str, Any] = {t: {arm.name: arm.results for arm in arms} for t, arms in tasks.items()}
    write_json(folder / RESULTS, found)
    write_text(folder / TABLE, seeds_csv(columns_of(tasks, SUCCESS), ["task", "arm", "seed", "success"]))
