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

from experiments.arms import ArmsCommand, Column, Parts, Tasks
from experiments.memory_worth.arms import ALL, KINDS
from experiments.memory_worth.word_distances import word_distances, word_groups, word_lengths
from experiments.python_source import prepared_python_source
from memformers.common.errors import UserError
from memformers.common.fields import Count, Range
from memformers.common.files import read_json, write_json
from memformers.comparison.experiment import Experiment
from memformers.comparison.text import MEMORIES, TextTask
from memformers.convert.load import load_checkpoint
from memformers.data.streams import Reading
from memformers.data.tokenizer import Tokenizer
from memformers.evaluation.evaluate import BASELINE, with_lengths
from memformers.evaluation.memory_ablation import beginnings, losses_under_controls
from memformers.evaluation.probe import common_corpus, held_out_tokens
from memformers.models.config import OF_MODELS
from memformers.models.language_model import MemoryLM
from memformers.report.arms import Measure
from memformers.runs.plan import Arm
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
DISTANCE, WORD, ALL_TOKENS = "by_distance", "by_word", "all"
"""The groupings of tokens: by how far back their word last began, and by the length of their word."""
TWICE = "memory twice as long"
CONTROLS = ("slots swapped", TWICE)
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
        "last began to where it begins again; all of its tokens count. Words of several tokens are those "
        "that are too rare to be a token, names of programs above all."
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
        """The experiment of each budget, by its number of tokens."""
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
        """Write the losses by group of each finished run that has none, on the beginnings, of ``READ`` tokens
        each, of the same held-out documents."""
        runs = [run for run in read_runs(folder) if run.result and not (run.folder / MEASURED).exists()]
        for run in tqdm(runs, desc="losses by distance", unit="run"):
            model, tokenizer = load_checkpoint(run.folder, torch.device("cpu"))
            tokens, held_out = held_out_tokens(common_corpus([run]))
            S = model.config.segment_len
            reading = beginnings(len(tokens), READ - S, S, self.documents * S, held_out)
            if reading is None:
                raise UserError(f"expected at least two held-out documents of more than {READ:,} tokens.")
            losses = losses_of_readings(model, tokens, reading)
            found: dict[str, dict[str, Any]] = {
                title: {name: means(losses, group == i) for i, name in enumerate(names) if (group == i).any()}
                for title, (group, names) in groups_of(tokens, reading, tokenizer).items()
            }
            found[DISTANCE][ALL_TOKENS] = means(losses, torch.ones(len(losses[BASELINE]), dtype=torch.bool))
            write_json(run.folder / MEASURED, {"documents": len(reading.lengths), **found})

    def result_of(self, run: Run) -> dict[str, Any]:
        """The losses by group."""
        return read_json(run.folder / MEASURED) if (run.folder / MEASURED).exists() else {}

    def parts(self, tasks: Tasks) -> Parts:
        """The bits per byte after each budget; after the largest, the losses by how far back a word last
        began and by its length, and how much they rise when the memory is changed."""
        bits = Measure("bits per byte", "bits_per_byte")
        budgets = [
            Column(f"bits per byte, {int(task):,} tokens" if task.isdecimal() else task, bits, arms)
            for task, arms in tasks.items()
        ]
        largest = [*tasks.values()][-1]
        results = [result for arm in largest for result in arm.results.values()]
        groups = {
            title: [*dict.fromkeys(name for result in results for name in result.get(title, ()))]
            for title in (DISTANCE, WORD)
        }

        def columns(title: str, control: str, said: str = "") -> list[Column]:
            return [
                Column(f"{group}{said}", Measure(group, loss_of(title, group, control)), largest)
                for group in groups[title]
            ]

        return {
            "": budgets,
            "Loss by the tokens since the word last began": columns(DISTANCE, BASELINE),
            "Loss by the length of the word": columns(WORD, BASELINE, ", loss"),
            **{f"Rise of the loss, {c}": columns(DISTANCE, c, f", {c}") for c in CONTROLS},
        }


def loss_of(title: str, group: str, control: str) -> Callable[[dict[str, Any]], float | None]:
    """The loss of a group of tokens, in nats per token, of a run's result, or how much it rises under a
    control."""

    def of(result: dict[str, Any]) -> float | None:
        losses = result.get(title, {}).get(group, {})
        rise = losses.get(control)
        return rise if rise is None or control == BASELINE else rise - losses[BASELINE]

    return of


def losses_of_readings(model: MemoryLM, tokens: Tensor, reading: Reading) -> dict[str, Tensor]:
    """The loss of each prediction of the ``reading`` of ``tokens [n]``: with the memory untouched, under each
    control, and, for the package's own memories, with one that is twice as long. It stays so long."""
    losses = losses_under_controls(model, tokens, reading, 0, lambda _: None)
    lengths = {
        name: tuple(2 * length for length in model.config.of_layers(name))
        for name in ("mem_len", "c_mem_len")
        if model.config.model in OF_MODELS[name]
    }
    if lengths:
        longer = with_lengths(model, **lengths)  # type: ignore[arg-type]
        no_controls = max(reading.lengths)  # as if all of it were the warm-up, which is read once
        again = losses_under_controls(longer, tokens, reading, no_controls, lambda _: None)
        losses[TWICE] = again[BASELINE]
    return losses


def groups_of(tokens: Tensor, reading: Reading, tokenizer: Tokenizer) -> dict[str, tuple[Tensor, list[str]]]:
    """Each grouping of the predictions of the ``reading`` of ``tokens [n]``: the number of each prediction's
    group, and the names of the groups."""
    parts = [tokens[i : i + 1 + n] for i, n in zip(reading.begins, reading.lengths, strict=True)]
    distances, lengths = (
        torch.cat([of_words(part, tokenizer)[1:] for part in parts])
        for of_words in (word_distances, word_lengths)
    )
    words = ["no word", "a word of one token", "a word of several tokens"]
    return {DISTANCE: word_groups(distances, EDGES), WORD: (lengths.clamp(max=2), words)}


def means(losses: Mapping[str, Tensor], which: Tensor) -> dict[str, float]:
    """How many tokens there are of ``which [n]``, and their mean loss under each control."""
    return {"tokens": int(which.sum()), **{name: loss[which].mean().item() for name, loss in losses.items()}}


if __name__ == "__main__":
    MemoryWorth.main()
