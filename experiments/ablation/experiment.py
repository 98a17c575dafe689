"""The settings of an ablation, and its trainings."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from experiments.ablation.findings import RESULTS, TABLE, read_findings, write_results
from experiments.ablation.page import write_report
from experiments.ablation.rows import ROWS, chosen_rows, text_arms
from memformers.commands.places import new_folder
from memformers.common.errors import TrainingsFailed, UserError
from memformers.comparison import MEMORIES, CompareConfig, compare
from memformers.recall.config import RecallConfig
from memformers.recall.experiment import recall
from memformers.runs.folder import PAGE, REPORT, check_named, check_nothing_is_lost
from memformers.training.config import TrainConfig

TEXT = TrainConfig(model=MEMORIES, tokens=500_000, memory_warmup=0.0)
"""The training of each row on the text, without its memory; slots are there from the first steps on."""
RECALL_TOKENS = 1_000_000
QUICK_TOKENS = 16_384
"""Tokens of each training with --quick."""


@dataclass(frozen=True)
class Ablation:
    """Which rows to train, on what and for how long."""

    out: Path | None = None
    """Folder of the results; by default runs/, the date and "ablation"."""
    resume: bool = False
    """Continue the ablation in --out, which must have the same settings: finish stopped trainings, and add
    rows and seeds that it doesn't have."""
    only: Literal["text", "recall"] | None = None
    """One of the two tasks; both if not given."""
    arms: tuple[str, ...] = ()
    """Which rows of the table, by their names; all of them if none is named."""
    seeds: int = 2
    """How many times each row is trained on each task. Intervals need at least 2."""
    quick: bool = False
    """Whether to show in two or three minutes that the ablation runs: one seed, and too few tokens to
    learn."""
    text_tokens: int | None = None
    """Tokens of each training on the text; half a million if not given."""
    recall_tokens: int | None = None
    """Tokens of each training on the recall stream; a million if not given."""
    data: str = ""
    """The text, as for training: Tiny Shakespeare if not given."""
    jobs: int = min(os.cpu_count() or 1, 2)
    """Trainings on the recall stream at a time, of one thread each. On the text there is one at a time, with
    all threads."""
    device: str = "auto"
    """Where to train, such as cpu or cuda:1; auto takes a GPU if there is one."""
    dashboard: str = ""
    """Where to show it live: a labml server's address, or off. Empty: labml's own $labml_app_url, else a
    dashboard that runs on this machine, if one does."""

    def __post_init__(self) -> None:
        """Raise UserError for settings that are out of range."""
        known = [row.name for row in ROWS]
        for name in self.arms:
            if name not in known:
                raise UserError(f"arm {name!r} is unknown; the table has {', '.join(known)}.")
        if len(set(self.arms)) < len(self.arms):
            raise UserError(f"arms={' '.join(self.arms)} must name each row once.")
        if self.resume and self.out is None:
            raise UserError("name the ablation to resume as --out.")
        _ = self.text, self.recall  # which check their settings

    def folder(self) -> Path:
        """The folder of the ablation."""
        return self.out or new_folder("ablation")

    @property
    def text(self) -> CompareConfig:
        """The comparison on the text."""
        usual = QUICK_TOKENS if self.quick else TEXT.tokens
        tokens = usual if self.text_tokens is None else self.text_tokens
        return CompareConfig(
            train=replace(
                TEXT,
                tokens=tokens,
                evaluations=1 if self.quick else TEXT.evaluations,
                data=self.data,
                device=self.device,
            ),
            models=(),
            arms=text_arms(chosen_rows(self.arms), TEXT.model),
            seeds=1 if self.quick else self.seeds,
        )

    @property
    def recall(self) -> RecallConfig:
        """The recall experiment."""
        usual = QUICK_TOKENS if self.quick else RECALL_TOKENS
        return RecallConfig(
            seeds=self.seeds,
            quick=self.quick,
            tokens=usual if self.recall_tokens is None else self.recall_tokens,
            arms=tuple(row.recall for row in chosen_rows(self.arms)),
            jobs=self.jobs,
            device=self.device,
        )


def ablation(config: Ablation, folder: Path) -> Path:
    """Train what ``folder`` doesn't have yet, and write the report of all trainings; returns its page.

    A training that fails doesn't stop the others. Raises ValueError for a folder that already holds an
    ablation (when resumed: with other settings), and, after writing the report, if a training failed.
    """
    check_named(folder)
    begun = any((folder / task).exists() for task in ("text", "recall"))
    if begun and not config.resume:
        raise UserError(f"{folder} already holds an ablation; name a new folder, or resume this one.")
    if not begun:
        check_nothing_is_lost(folder, (REPORT, PAGE, RESULTS, TABLE))
    failed = []
    for task in ("text", "recall") if config.only is None else (config.only,):
        try:
            if task == "text":
                compare(config.text, folder / task, config.dashboard, resume=config.resume, probed=False)
            else:
                recall(config.recall, folder / task, config.dashboard, resume=config.resume)
        except TrainingsFailed as error:
            failed.append(f"{task}: {error}")
    findings = read_findings(folder)
    if not findings.arms:
        raise UserError(" ".join(failed))
    write_results(findings, folder)
    page = write_report(findings, folder)
    if failed:
        raise UserError(f"{' '.join(failed)} The results so far are in {page}; --resume trains the rest.")
    return page
