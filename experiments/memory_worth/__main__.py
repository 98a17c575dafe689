"""What memory is worth on a long text: one network with memories of several kinds, at equal keys and at
several budgets of training, against the network without memory.

Run it with ``python -m experiments.memory_worth --out FOLDER``; ``--quick`` is a trial of some minutes. The
text is the Python source code of this machine (``memformers prepare python-source``) in subwords, each file a
document, unless ``--data`` names another one. Each budget is an experiment of its own, in ``FOLDER/TOKENS``.
Finished training runs are kept; ``--resume`` continues, and adds budgets, arms and seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.arms import ArmsCommand, Column, Parts, Tasks, prepared_python_source
from experiments.memory_worth.arms import ALL, KINDS
from experiments.memory_worth.word_distances import word_distances, word_groups
from memformers.common.fields import Count, Range
from memformers.common.files import read_json, write_json
from memformers.common.text import UserError
from memformers.comparison.experiment import Experiment
from memformers.comparison.text import MEMORIES, TextTask
from memformers.convert.load import load_checkpoint
from memformers.evaluation.evaluate import UNTOUCHED
from memformers.evaluation.memory_ablation import (
    choose_streams,
    common_corpus,
    held_out_tokens,
    losses_under_controls,
)
from memformers.report.arms import Measure
from memformers.runs.folder import Arm
from memformers.runs.reader import Run, read_runs
from memformers.training.config import EvaluationConfig, TrainConfig

BASE = TrainConfig(
    model=MEMORIES, tokenizer="bpe", evaluation=EvaluationConfig(evaluations=2, final_tokens=1_000_000)
)
"""The training of all arms, without its memory. The end reads no more than a million held-out tokens."""
MEASURED = "by_distance.json"
"""In a run's folder: the loss by group, in nats per token."""
READ, EDGES = 4096, (1, 64, 128, 256, 512, 1024, 2048)
"""Tokens of each document that are read, and edges of the groups of distances, in tokens."""
DISTANCE, ALL_TOKENS = "by_distance", "all"
CONTROLS = ("memory swapped", "slots swapped")
"""Ways to read that the report shows, beside that of the training."""


@dataclass(frozen=True)
class MemoryWorth(ArmsCommand):
    """Train each memory on a long text, with several budgets and from several seeds."""

    name: ClassVar = "memory-worth"
    title: ClassVar = "What memory is worth on a long text"
    method: ClassVar = (
        "No setting of the training was chosen on this text. Losses by distance, in nats per token, are of "
        f"the first {READ:,} tokens of some of the held-out documents that are so long, each read from an "
        "empty memory. A word may be a name of a program. Its distance is the number of tokens from where it "
        "last began to where it begins again; all of its tokens count."
    )
    base: ClassVar = "none"
    usual: ClassVar = tuple(KINDS)
    data: str = ""
    """The text, as for training; the Python source code of this machine if not given."""
    budgets: tuple[Count, ...] = (1_600_000, 6_400_000)
    """The numbers of tokens of each training run, an experiment each."""
    seed: Annotated[int, Range(0)] = 0
    """The first seed. A finalist that was chosen from some seeds is to be measured from others."""
    vocab_size: Count = 2048
    """How many subwords are learned from the training part."""
    documents: Count = 32
    """How many held-out documents are read to measure losses by distance."""

    @classmethod
    def listed(cls) -> Sequence[Arm]:
        return [*ALL.values()]

    def experiments(self, folder: Path) -> dict[str, Experiment]:
        data = self.data or prepared_python_source(folder, self.vocab_size)
        model, arms, budgets = replace(BASE.model, vocab_size=self.vocab_size), self.arms, self.budgets
        train = replace(BASE, data=data, seed=self.seed, model=model)
        if self.quick:
            arms, budgets = arms or ("none", "xl-64", "slots-32-32", "xl-256"), (65_536,)
        chosen = replace(self, arms=arms).chosen(asdict(train))
        return {
            str(n): Experiment(TextTask(probed=False), replace(train, tokens=n), {}, chosen, *self.how)
            for n in budgets
        }

    def measure(self, folder: Path) -> None:
        """Write the losses by group of each finished run, on the beginnings of the same held-out
        documents."""
        runs = [run for run in read_runs(folder) if run.result and not (run.folder / MEASURED).exists()]
        for run in tqdm(runs, desc="losses by distance", unit="run"):
            model, tokenizer = load_checkpoint(run.folder, torch.device("cpu"))
            tokens, held_out = held_out_tokens(common_corpus([run]))
            S = model.config.segment_len
            reading = choose_streams(len(tokens), READ - S, S, self.documents * S, held_out)
            if reading is None:
                raise UserError(f"expected at least two held-out documents of more than {READ:,} tokens.")
            losses = losses_under_controls(model, tokens, reading, 0, lambda _: None)
            parts = [tokens[i : i + 1 + n] for i, n in zip(reading.begins, reading.lengths, strict=True)]
            distances = torch.cat([word_distances(part, tokenizer)[1:] for part in parts])
            group, names = word_groups(distances, EDGES)
            found = {name: means(losses, group == i) for i, name in enumerate(names) if (group == i).any()}
            found[ALL_TOKENS] = means(losses, torch.ones_like(group, dtype=torch.bool))
            write_json(run.folder / MEASURED, {"documents": len(reading.lengths), DISTANCE: found})

    def result_of(self, run: Run) -> dict[str, Any]:
        return read_json(run.folder / MEASURED) if (run.folder / MEASURED).exists() else {}

    def parts(self, tasks: Tasks) -> Parts:
        """The bits per byte after each budget; after the largest, losses by how far back a word last
        began."""
        bits = Measure("bits per byte", "bits_per_byte")
        budgets = [
            Column(f"bits per byte, {int(task):,} tokens" if task.isdecimal() else task, bits, arms)
            for task, arms in tasks.items()
        ]
        largest = [*tasks.values()][-1]
        results = [result for arm in largest for result in arm.results.values()]
        groups = dict.fromkeys(group for result in results for group in result.get(DISTANCE, ()))
        parts = {"": budgets}
        for control in (UNTOUCHED, *CONTROLS):
            title, more = f"Rise of the loss, {control}", f", {control}"
            if control == UNTOUCHED:
                title, more = "Loss by the tokens since the word last began", ""
            measures = {f"{group}{more}": Measure(group, loss_of(group, control)) for group in groups}
            parts[title] = [Column(name, measure, largest) for name, measure in measures.items()]
        return parts


def loss_of(group: str, control: str) -> Callable[[dict[str, Any]], float | None]:
    def of(result: dict[str, Any]) -> float | None:
        losses = result.get(DISTANCE, {}).get(group, {})
        rise = losses.get(control)
        return rise if rise is None or control == UNTOUCHED else rise - losses[UNTOUCHED]

    return of


def means(losses: Mapping[str, Tensor], which: Tensor) -> dict[str, float]:
    return {"tokens": int(which.sum()), **{name: loss[which].mean().item() for name, loss in losses.items()}}


if __name__ == "__main__":
    MemoryWorth.main()
