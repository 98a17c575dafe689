"""What memory is worth on a long text: one network with memories of several kinds, at equal keys and at
several budgets of training, against the network without memory.

Run it with ``python -m experiments.memory_worth --out FOLDER``; ``--quick`` is a trial of some minutes,
``--help`` lists every setting. The text is the Python source code of this machine (``memformers prepare
python-source``) in subwords, each file a document, unless ``--data`` names another one. Each budget is an
experiment of its own, in ``FOLDER/TOKENS``. Finished training runs are kept; ``--resume`` continues, and adds
budgets, arms and seeds. The report has the gain of each memory by budget, and by how far back a word last
occurred, what swapped and zeroed slots cost, and what a memory twice as long as in training changes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.memory_worth.arms import ALL, KINDS
from experiments.memory_worth.report import (
    ALL_TOKENS,
    DISTANCE,
    EDGES,
    GROUPS,
    MEASURED,
    READ,
    TWICE,
    write_report,
)
from experiments.memory_worth.word_distances import word_distances, word_groups, word_lengths
from experiments.python_source import prepared_python_source
from memformers.commands.options import ExperimentCommand
from memformers.common.errors import UserError
from memformers.common.fields import Count, Range, check_fields
from memformers.common.files import write_json
from memformers.comparison.arms import read_arms
from memformers.comparison.experiment import Experiment
from memformers.comparison.several import run_experiments
from memformers.comparison.text import MEMORIES, TextTask
from memformers.convert.load import load_checkpoint
from memformers.data.streams import Reading, streams_and_places
from memformers.data.tokenizer import Tokenizer
from memformers.evaluation.evaluate import BASELINE, with_lengths
from memformers.evaluation.frequency_buckets import groups_between
from memformers.evaluation.memory_ablation import beginnings, losses_under_controls
from memformers.evaluation.probe import common_corpus, held_out_tokens
from memformers.models.config import OF_MODELS
from memformers.models.language_model import MemoryLM
from memformers.runs.reader import read_runs
from memformers.training.config import EvaluationConfig, TrainConfig

BASE = TrainConfig(model=MEMORIES, tokenizer="bpe", evaluation=EvaluationConfig(evaluations=2))
"""The training of all arms, without its memory."""


@dataclass(frozen=True)
class MemoryWorth(ExperimentCommand):
    """Train each memory on a long text, with several budgets and from several seeds."""

    name: ClassVar = "memory-worth"
    data: str = ""
    """The text, as for training; the Python source code of this machine if not given."""
    budgets: tuple[Count, ...] = (1_600_000, 6_400_000)
    """The numbers of tokens of each training run, an experiment each."""
    seeds: Count = 3
    """How many times each arm is trained. Intervals need at least 2."""
    seed: Annotated[int, Range(0)] = 0
    """The first seed. A finalist that was chosen from some seeds is to be measured from others."""
    arms: tuple[str, ...] = ()
    """Which arms: names, of which experiments/memory_worth/arms.py has the list, or arms of your own, such as
    'mine: model=my_memory.py:Averages mem_len=64'. If none is given, all those that compare memories."""
    vocab_size: Count = 2048
    """How many subwords are learned from the training part."""
    documents: Count = 32
    """How many held-out documents are read to measure losses by distance."""
    jobs: Count = 2
    """Training runs at a time, of one thread each."""
    quick: bool = False
    """Whether to show in some minutes that it runs: one seed, four arms, and too few tokens to learn."""

    def __post_init__(self) -> None:
        """Raise UserError for settings that are out of range."""
        check_fields(self)
        if unknown := [arm for arm in self.arms if ":" not in arm and arm not in ALL]:
            raise UserError(f"expected arms among {', '.join(ALL)}, or NAME: settings; got {unknown[0]!r}.")

    def experiments(self, data: str) -> dict[int, Experiment]:
        """The experiment of each budget on the text ``data``, by its number of tokens."""
        model = replace(BASE.model, vocab_size=self.vocab_size)
        train = replace(BASE, data=data, seed=self.seed, model=model)
        chosen = self.arms or (("none", "xl-64", "slots-32-32", "xl-256") if self.quick else KINDS)
        given = [arm if ":" in arm else f"{arm}: {ALL[arm].settings}" for arm in chosen]
        arms = tuple(read_arms(given, asdict(train)))
        how = (1 if self.quick else self.seeds, self.jobs, 1)
        return {
            tokens: Experiment(TextTask(probed=False), replace(train, tokens=tokens), {}, arms, *how)
            for tokens in ((65_536,) if self.quick else self.budgets)
        }

    def experiment(self, folder: Path) -> Path:
        """Train and measure what ``folder`` doesn't have yet, and write the report of all budgets."""
        data = self.data or prepared_python_source(folder, self.vocab_size)
        budgets = {str(budget): experiment for budget, experiment in self.experiments(data).items()}
        measured = partial(measure, documents=self.documents)
        return run_experiments(
            budgets, folder, write_report, self.dashboard, resume=self.resume, measure=measured
        )


def measure(folder: Path, documents: int) -> None:
    """Write the losses by group of each finished run in ``folder`` that has none, on the beginnings, of
    ``READ`` tokens each, of the same held-out documents."""
    runs = [run for run in read_runs(folder) if run.result and not (run.folder / MEASURED).exists()]
    for run in tqdm(runs, desc="losses by distance", unit="run"):
        model, tokenizer = load_checkpoint(run.folder, torch.device("cpu"))
        tokens, held_out = held_out_tokens(common_corpus([run]))
        segment_len = model.config.segment_len
        how = (READ - segment_len, segment_len, documents * segment_len)
        reading = beginnings(len(tokens), *how, held_out)
        if reading is None:
            raise UserError(f"expected at least two held-out documents of more than {READ:,} tokens.")
        losses = losses_of_readings(model, tokens, reading)
        found: dict[str, dict[str, Any]] = {
            title: {name: means(losses, group == i) for i, name in enumerate(names) if (group == i).any()}
            for title, (group, names) in groups_of(tokens, reading, tokenizer).items()
        }
        found[DISTANCE][ALL_TOKENS] = means(losses, torch.ones(len(losses[BASELINE]), dtype=torch.bool))
        write_json(run.folder / MEASURED, {"documents": len(reading.lengths), **found})


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
    places = streams_and_places(reading.lengths)[1]
    words = ["no word", "a word of one token", "a word of several tokens"]
    groups = (
        word_groups(distances, EDGES),
        groups_between(places, (0, *EDGES[1:])),
        (lengths.clamp(max=2), words),
    )
    return dict(zip(GROUPS, groups, strict=True))


def means(losses: Mapping[str, Tensor], which: Tensor) -> dict[str, float]:
    """How many tokens there are of ``which [n]``, and their mean loss under each control."""
    return {"tokens": int(which.sum()), **{name: loss[which].mean().item() for name, loss in losses.items()}}


if __name__ == "__main__":
    MemoryWorth.main()
