"""The Compressive Transformer's ablation (Rae et al. 2020), on a text and on a stream with known answers.

Run it with ``make ablation`` or ``python -m experiments.ablation``; ``--quick`` is a short trial, ``--help``
lists every setting. Each row of the table is trained from each seed, twice: as an arm of an experiment on a
text, in FOLDER/text, and as an arm of a recall experiment, in FOLDER/recall. Only the memory differs.
Finished training runs are kept; ``--resume`` continues, and adds rows and seeds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from experiments.ablation.report import ROWS, arms_of_rows, write_report
from memformers.commands.options import ExperimentCommand
from memformers.common.errors import UserError
from memformers.common.fields import Count, changed, check_fields
from memformers.comparison.experiment import Experiment
from memformers.comparison.recall import USUAL_JOBS, RecallConfig
from memformers.comparison.recall_training import RECALL
from memformers.comparison.several import run_experiments
from memformers.comparison.text import MEMORIES, TextTask
from memformers.training.config import TrainConfig

TEXT = TrainConfig(model=MEMORIES, tokens=500_000, memory_warmup=0.0)
"""The training of each row on the text, without its memory; slots are there from the first steps on."""
RECALL_TOKENS = 1_000_000
QUICK_TOKENS = 16_384
"""Tokens of each training run with --quick."""


@dataclass(frozen=True)
class Ablation(ExperimentCommand):
    """Train each way to compress, and each way to learn to compress, on a text and on the recall stream."""

    name: ClassVar = "ablation"
    only: Literal["text", "recall"] | None = None
    """One of the two tasks; both if not given."""
    arms: tuple[str, ...] = ()
    """Which rows of the table, by their names; all of them if none is named."""
    seeds: Count = 2
    """How many times each row is trained on each task. Intervals need at least 2."""
    quick: bool = False
    """Whether to show in two or three minutes that the ablation runs: one seed, and too few tokens to
    learn."""
    text_tokens: Count | None = None
    """Tokens of each training run on the text; half a million if not given."""
    recall_tokens: Count | None = None
    """Tokens of each training run on the recall stream; a million if not given."""
    data: str = ""
    """The text, as for training: Tiny Shakespeare if not given."""
    jobs: Count = USUAL_JOBS
    """Training runs on the recall stream at a time, of one thread each. On the text there is one at a time,
    with all threads."""
    device: str = "auto"
    """Where to train, such as cpu or cuda:1; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        """Raise UserError for settings that are out of range."""
        check_fields(self)
        known = [row.name for row in ROWS]
        for name in self.arms:
            if name not in known:
                raise UserError(f"arm {name!r} is unknown; the table has {', '.join(known)}.")
        if len(set(self.arms)) < len(self.arms):
            raise UserError(f"arms={' '.join(self.arms)} must name each row once.")

    @property
    def tasks(self) -> dict[str, Experiment]:
        """The experiments, by the names of their tasks and folders."""
        seeds = 1 if self.quick else self.seeds
        changes: dict[str, Any] = {"device": self.device, **({"evaluations": 1} if self.quick else {})}
        text = changed(
            TEXT,
            data=self.data,
            tokens=self.text_tokens or (QUICK_TOKENS if self.quick else TEXT.tokens),
            **changes,
        )
        tokens = self.recall_tokens or (QUICK_TOKENS if self.quick else RECALL_TOKENS)
        near = RecallConfig(quick=self.quick, tokens=tokens, device=self.device).setting
        return {
            "text": Experiment(TextTask(probed=False), text, {}, arms_of_rows(self.arms, text.model), seeds),
            "recall": Experiment(
                RECALL, near.train, near.more, arms_of_rows(self.arms, near.train.model), seeds, self.jobs, 1
            ),
        }

    def experiment(self, folder: Path) -> Path:
        """Train what ``folder`` doesn't have yet, and write the report of both tasks."""
        tasks = {task: each for task, each in self.tasks.items() if self.only in (None, task)}
        return run_experiments(tasks, folder, write_report, self.dashboard, resume=self.resume)


if __name__ == "__main__":
    Ablation.main()
