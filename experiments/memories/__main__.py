"""What memories of one's own are worth: three of them beside the package's, on recall and on two texts.

Run it with ``python -m experiments.memories --out FOLDER`` in the top folder of a clone; ``--quick`` is a
trial of some minutes, ``--help`` lists every setting. Each task is an experiment of its own, in
``FOLDER/TASK``. Finished training runs are kept; ``--resume`` continues, and adds seeds. The report has one
table of all tasks, the differences to Transformer-XL, paired by seed, and what each memory costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from experiments.columns import differences_table, means_table, measured, seeds_csv
from experiments.python_source import prepared_python_source
from memformers.commands.options import ExperimentCommand
from memformers.common.fields import Count
from memformers.common.files import write_json, write_text
from memformers.comparison.experiment import Experiment
from memformers.comparison.recall import RecallConfig
from memformers.comparison.several import run_experiments
from memformers.comparison.text import MEMORIES, CompareConfig, TextTask
from memformers.report.arms import BITS, ArmRuns, Measure, arms_of
from memformers.report.page import write_page
from memformers.report.provenance import facts_table
from memformers.report.recall import accuracy_figure, right_between
from memformers.report.sections import costs_table, warnings
from memformers.runs.folder import EXPERIMENT, RESULTS, TABLE
from memformers.runs.reader import read_runs
from memformers.training.config import EvaluationConfig, TrainConfig

SHOWN, RECALL, SHAKESPEARE, PYTHON = "transformer-xl", "recall", "tiny-shakespeare", "python-source"
"""The arm that the others are compared with, and the tasks."""
MODELS = {
    "transformer": "No memory",
    SHOWN: "Transformer-XL",
    "compressive": "Compressive Transformer",
    "averages": "Exponential average",
    "infini": "Infini-attention",
    "memory-tokens": "Memory tokens",
}
"""The arms; the last three are the files in this folder."""
FILES = "experiments/memories"
OWN = (
    f"averages: model={FILES}/averages.py:Averages decay=0.95 mem_len={{average}}",
    f"infini: model={FILES}/infini.py:InfiniAttention tbptt=1 batch_size={{half}}",
    f"memory-tokens: model={FILES}/memory_tokens.py:MemoryTokens tokens_of_memory=32 tbptt=1 "
    "batch_size={half}",
)
"""The average has as many keys as Transformer-XL. The others write what only a later segment's loss can
teach, so their gradient goes one segment back; with half the streams, their steps have as many tokens."""


def answered(low: int, high: int) -> tuple[str, Measure]:
    """Recall of the values that were set from ``low`` to ``high`` positions ago."""
    label = f"recall, set {low} to {high} positions ago"
    return RECALL, Measure(label, right_between(low, high), ".1f", " %", " points", 100, 1)


MEASURES = (
    answered(0, 192),
    answered(192, 384),
    (SHAKESPEARE, BITS),
    (PYTHON, Measure("bits per byte", "bits_per_byte")),
)
"""The tasks, and what is measured on each; one layer of Transformer-XL looks 192 positions back in recall."""
METHOD = (
    "All arms of a task have the same network, seeds, tokens and order of the text; only the memory differs. "
    "No setting of the three memories was searched. ± is half the width of a 95 % interval over seeds, by "
    "Student's t; chance of recall is {chance:.0f} %. The steps of Infini-attention and memory tokens have "
    "two segments of half as many streams. Operations are those that read and write memories, not those "
    "that compress."
)
Tasks = Mapping[str, Sequence[ArmRuns]]


@dataclass(frozen=True)
class Memories(ExperimentCommand):
    """Train each memory on recall, Tiny Shakespeare and Python source code, from several seeds."""

    name: ClassVar = "memories"
    recall_tokens: Count = 3_000_000
    """The tokens of each training run on the recall stream."""
    text_tokens: Count = 800_000
    """The tokens of each training run on a text."""
    seeds: Count = 3
    """How many times each arm is trained. Intervals need at least 2."""
    data: str = ""
    """The long text, as for training; the Python source code of this machine if not given."""
    jobs: Count = 2
    """Training runs at a time, of one thread each."""
    quick: bool = False
    """Whether to only show that everything works, with one seed, few tokens and without the long text."""

    def experiments(self, folder: Path) -> dict[str, Experiment]:
        """The experiment of each task."""
        seeds, tokens = (1, 16_384) if self.quick else (self.seeds, self.text_tokens)
        arms = ("no-memory", SHOWN, "compressive", *(own.format(average=127, half=16) for own in OWN))
        of_stream = None if self.quick else self.recall_tokens
        recall = RecallConfig("near", seeds, self.quick, of_stream, arms, self.jobs)
        text = TrainConfig(model=MEMORIES, tokens=tokens, evaluation=EvaluationConfig(evaluations=2))
        trains = {SHAKESPEARE: text}
        if not self.quick:
            model, data = (
                replace(MEMORIES, vocab_size=2048),
                self.data or prepared_python_source(folder, 2048),
            )
            trains[PYTHON] = replace(text, tokenizer="bpe", data=data, model=model)
        texts = {
            task: replace(
                CompareConfig(
                    train, arms=tuple(own.format(average=63, half=32) for own in OWN), seeds=seeds
                ).experiment(),
                task=TextTask(probed=False),
                jobs=self.jobs,
                threads=1,
            )
            for task, train in trains.items()
        }
        return {RECALL: recall.experiment, **texts}

    def experiment(self, folder: Path) -> Path:
        """Train what ``folder`` doesn't have yet, and write the report of all tasks."""
        experiments = self.experiments(folder)
        return run_experiments(experiments, folder, write_report, self.dashboard, resume=self.resume)


def write_report(folder: Path) -> Path:
    """Write the report of all tasks in ``folder``, with each seed's results as CSV and JSON; returns its
    page."""
    tasks = {
        task: [named(arm) for arm in arms_of(read_runs(folder / task, RECALL if task == RECALL else "text"))]
        for task in (RECALL, SHAKESPEARE, PYTHON)
        if (folder / task / EXPERIMENT).exists()
    }
    write_json(
        folder / RESULTS, {task: {arm.name: arm.results for arm in arms} for task, arms in tasks.items()}
    )
    columns = [
        measured(measure.label + (f", {task}" if task != RECALL else ""), measure, tasks.get(task, ()))
        for task, measure in MEASURES
    ]
    write_text(folder / TABLE, seeds_csv(columns, ["measure", "memory", "seed", "value"]))
    said = [f"{w} ({task})" for task, arms in tasks.items() for w in warnings(arms, arms[0], folder / task)]
    last, arms = list(tasks.items())[-1]
    method = METHOD.format(chance=100 / tasks[RECALL][0].first.config["recall"]["stream"]["values"])
    parts = ["# Memories of one's own, beside those of the package", *said]
    parts.append(means_table(columns, MODELS, "memory"))
    parts += ["## Minus Transformer-XL", differences_table(columns, MODELS, SHOWN, "memory")]
    parts += ["## Recall by distance", accuracy_figure(tasks[RECALL], folder)]
    parts += [f"## What each costs, on {last}", costs_table(arms, arms[0])]
    return write_page([*parts, "## How it was made", method, facts_table(arms, folder / last)], folder)


def named(arm: ArmRuns) -> ArmRuns:
    """The arm with its label, and with one name on all tasks."""
    name = "transformer" if arm.name == "no-memory" else arm.name
    for run in arm.runs:
        run.label = MODELS[name]
    return ArmRuns(name, arm.runs)


if __name__ == "__main__":
    Memories.main()
