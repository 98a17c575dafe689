"""What makes a slot hold more, and a memory: the Compressive Transformer of the recall experiment with one
setting changed at a time, and Transformer-XL in the same way.

Run it with ``python -m experiments.slots --out FOLDER``, and with ``--memory transformer-xl``. Finished
training runs are kept, so it can be stopped and continued with ``--resume``. ``table.md`` in the folder has
the share of correct answers by the place of the value, on streams on which nothing is claimed later.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from memformers.commands.options import ExperimentCommand
from memformers.common.errors import UserError
from memformers.common.fields import Count
from memformers.common.files import write_text
from memformers.comparison.experiment import Experiment, run_experiment
from memformers.comparison.recall import SETTINGS, USUAL_JOBS, RecallConfig
from memformers.comparison.recall_training import RECALL
from memformers.report.arms import arms_of
from memformers.report.markdown import table
from memformers.report.recall import BASELINE, at_place, percent
from memformers.runs.plan import Arm
from memformers.runs.reader import Run, read_runs

VARIANTS: dict[str, dict[str, Any]] = {
    "as in the experiment": {},
    "c = 2": {"model.compression_rate": 2},
    "c = 8": {"model.compression_rate": 8},
    "1 head": {"model.heads": 1},
    "2 heads": {"model.heads": 2},
    "width 96, 3 heads": {"model.d_model": 96, "model.heads": 3, "model.d_ff": 384},
    "3 layers": {"model.n_layers": 3},
    "16 streams": {"batch_size": 16},
    "half the learning rates": {"learning_rate": 1.5e-3, "muon_learning_rate": 0.01},
    "twice the learning rates": {"learning_rate": 6e-3, "muon_learning_rate": 0.04},
    "β₂ 0.999": {"beta2": 0.999},
    "f_c learns from the task too": {"model.bptt": 1},
    "f_c learns from the task too, for longer": {"model.bptt": 4},
    "distances grow in a quarter": {"recall.growing": 0.25},
    "distances grow in three quarters": {"recall.growing": 0.75},
}
"""What was tried, by the names in the table: the settings that differ."""
OF_SLOTS = {"model.compression_rate"}
"""Settings that Transformer-XL doesn't have."""
COLUMNS = {"memory": "correct in memory", "slots": "correct in slots", "beyond": "correct beyond"}
"""The places of a value in the table, and their headings."""


@dataclass(frozen=True)
class Slots(ExperimentCommand):
    """Train a model of the recall experiment with one setting changed at a time."""

    name: ClassVar = "slots"
    memory: Literal["compressive", "transformer-xl"] = "compressive"
    """The arm of the recall experiment whose settings change."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Which of the variants."""
    tokens: Count = SETTINGS["near"].train.tokens
    """Tokens of each training run."""
    seeds: Count = 1
    """How many times each variant is trained."""
    jobs: Count = USUAL_JOBS
    """Training runs at a time, each with one thread."""

    def experiment(self, folder: Path) -> Path:
        """Train what the folder doesn't have, and write the report and the table."""
        if unknown := sorted(set(self.variants) - set(VARIANTS)):
            raise UserError(f"variants {', '.join(unknown)} are unknown; there are {', '.join(VARIANTS)}.")
        setting = RecallConfig(tokens=self.tokens).setting
        setting = replace(setting, recall=replace(setting.recall, measured_for="choosing"))
        usual = setting.arm(self.memory).settings
        arms = [
            Arm(f"variant-{number:02}", usual | settings, name)
            for number, (name, settings) in enumerate(VARIANTS.items())
            if name in self.variants and (self.memory == "compressive" or not OF_SLOTS & settings.keys())
        ]
        experiment = Experiment(RECALL, setting.train, setting.more, tuple(arms), self.seeds, self.jobs, 1)
        page = run_experiment(experiment, folder, self.dashboard, resume=self.resume)
        write_text(folder / "table.md", shares_table(read_runs(folder, "recall")) + "\n")
        return page


def shares_table(runs: list[Run]) -> str:
    """The shares of correct answers of the finished ``runs``, over seeds with 95 % intervals."""
    rows = [
        [
            arm.label,
            *(percent(at_place(arm, BASELINE, place)) for place in COLUMNS),
            percent(arm.mean("within_reach")),
            f"{len(arm.results)}",
        ]
        for arm in arms_of(runs)
        if arm.results
    ]
    return table(["variant", *COLUMNS.values(), "correct within reach", "seeds"], rows)


if __name__ == "__main__":
    Slots.main()
