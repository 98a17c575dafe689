"""What makes a slot hold more: the Compressive Transformer of the recall experiment, with one setting changed
at a time.

Run it with ``python -m experiments.slots --out FOLDER``. Finished trainings are kept, so it can be stopped
and continued. ``table.md`` in the folder has the share of right answers by the place of the value.
"""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.errors import TrainingsFailed, UserError
from memformers.common.files import read_json, write_text
from memformers.common.intervals import mean_of
from memformers.common.processes import run_modules
from memformers.recall.arms import SETTINGS
from memformers.recall.config import ArmRun, run_of
from memformers.runs.folder import RESULT, new_run_id, plan_run

BASE = SETTINGS["near"]
COLUMNS = {"memory": "right in memory", "slots": "right in slots", "beyond": "right beyond"}
"""The places of a value in the table, and their headings."""


@dataclass(frozen=True)
class Variant:
    """What is different from the Compressive Transformer of the recall experiment."""

    arm: dict[str, Any] = field(default_factory=dict)
    """Settings of its memory."""
    network: dict[str, Any] = field(default_factory=dict)
    """Settings of its ModelConfig."""
    train: dict[str, Any] = field(default_factory=dict)
    """Settings of its TrainConfig."""
    growing: float = BASE.growing
    """The fraction of the training in which the distances of questions grow."""

    def run(self, seed: int, tokens: int, jobs: int) -> ArmRun:
        """Its training from ``seed``."""
        network = replace(BASE.train.model, **self.network)
        train = replace(BASE.train, tokens=tokens, model=network, **self.train)
        setting = replace(BASE, train=train, growing=self.growing)
        return run_of(setting, replace(BASE.arm("compressive"), **self.arm), seed, jobs)


VARIANTS = {
    "as in the experiment": Variant(),
    "c = 2": Variant(arm={"compression_rate": 2}),
    "c = 8": Variant(arm={"compression_rate": 8}),
    "1 head": Variant(network={"heads": 1}),
    "2 heads": Variant(network={"heads": 2}),
    "width 96, 3 heads": Variant(network={"d_model": 96, "heads": 3, "d_ff": 384}),
    "3 layers": Variant(network={"n_layers": 3}),
    "16 streams": Variant(train={"batch_size": 16}),
    "half the learning rates": Variant(train={"learning_rate": 1.5e-3, "muon_learning_rate": 0.01}),
    "twice the learning rates": Variant(train={"learning_rate": 6e-3, "muon_learning_rate": 0.04}),
    "β₂ 0.999": Variant(train={"beta2": 0.999}),
    "distances grow in a quarter": Variant(growing=0.25),
    "distances grow in three quarters": Variant(growing=0.75),
}
"""What was tried, by the names in the table."""


@dataclass(frozen=True)
class Slots:
    """Which variants to train, and for how long."""

    out: Path = Path("runs/slots")
    """Folder of the results."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Which of the variants."""
    tokens: int = BASE.train.tokens
    """Tokens of each training."""
    seeds: int = 1
    """How many times each variant is trained."""
    jobs: int = min(os.cpu_count() or 1, 2)
    """Trainings at a time, each with one thread."""


def main(arguments: Slots) -> None:
    """Train what the folder doesn't have, and write the table."""
    if unknown := sorted(set(arguments.variants) - set(VARIANTS)):
        raise UserError(f"variants {', '.join(unknown)} are unknown; there are {', '.join(VARIANTS)}.")
    folders = {
        (name, seed): arguments.out / f"{number:02}-{seed}-{arguments.tokens}"
        for number, name in enumerate(VARIANTS)
        for seed in range(arguments.seeds)
        if name in arguments.variants
    }
    due = [one for one, folder in folders.items() if not (folder / RESULT).exists()]
    for name, seed in due:
        folder = folders[name, seed]
        folder.mkdir(parents=True, exist_ok=True)
        VARIANTS[name].run(seed, arguments.tokens, arguments.jobs).save(folder)
        plan_run(folder, new_run_id(), f"slots {arguments.out.resolve().name}", "")
    commands = [["memformers.recall", str(folders[one])] for one in due]
    ended = run_modules(commands, arguments.jobs, environment={"OMP_NUM_THREADS": "1"})
    failed = [due[number] for number, code in ended if code]
    write_text(arguments.out / "table.md", table(folders))
    if failed:
        raise TrainingsFailed(f"the training of {', '.join(name for name, _ in failed)} failed.")


def table(folders: dict[tuple[str, int], Path]) -> str:
    """The shares of right answers of what is finished in ``folders``, as Markdown; over seeds, with 95 %
    intervals."""
    rows = [f"| variant | {' | '.join(COLUMNS.values())} | right within reach | seeds |", "|---" * 6 + "|"]
    for name in dict.fromkeys(name for name, _ in folders):
        files = [folder / RESULT for (other, _), folder in folders.items() if other == name]
        results = [read_json(file) for file in files if file.exists()]
        if results:
            places = [[result["recall"]["by_place"][place] for result in results] for place in COLUMNS]
            shares = [*places, [result["within_reach"] for result in results]]
            rows.append(f"| {name} | {' | '.join(map(percent, shares))} | {len(results)} |")
    return "\n".join(rows) + "\n"


def percent(shares: list[float | None]) -> str:
    """The mean of ``shares`` in percent, with its interval if there are several; a dash where nothing was
    asked."""
    asked = [share for share in shares if share is not None]
    interval = f" ± {100 * mean_of(asked).half_width:.1f}" if len(asked) > 1 else ""
    return f"{100 * mean(asked):.1f}{interval} %" if asked else "–"


if __name__ == "__main__":
    with plain_errors():
        main(parse_arguments(Slots))
