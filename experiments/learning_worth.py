"""What memory still saves when weights go on learning from the text that is read, and what learning saves
with each memory: small models of characters, trained alike, and evaluated as trained and with ``--learn``.

Run it with ``python -m experiments.learning_worth --data input.txt --out FOLDER``; ``--resume`` continues.
The learning rate of each arm is the best one of its first seed on the first half of the held-out text; all
numbers are of the second half.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.arms import QUICK_TOKENS, ArmsCommand, Variant
from experiments.columns import ArmsByTask, Column, ColumnsByTable
from experiments.memory_worth import positions
from experiments.word_distances import list_groups, losses_by_distance, mean_losses, word_distances
from memformers.common.fields import Count
from memformers.common.files import read_json, write_json
from memformers.comparison.experiment import Experiment
from memformers.comparison.text import TextTask
from memformers.data.streams import Tokens
from memformers.data.tokenizer import Tokenizer
from memformers.evaluation.evaluate import evaluate
from memformers.evaluation.learning import (
    STREAMS,
    STREAMS_OF_LEARNING,
    LearnConfig,
    evaluate_learning,
    learned,
)
from memformers.evaluation.probe import common_corpus, held_out_tokens
from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM
from memformers.report.arms import ArmRuns, Measure, Result
from memformers.runs.load import load_checkpoint
from memformers.runs.reader import Run, read_runs
from memformers.training.config import EvaluationConfig, TrainConfig

BASE = TrainConfig(
    model=ModelConfig(model="transformer-xl", token_shift=True, mem_len=64),
    max_tokens=1_000_000,
    evaluation=EvaluationConfig(evaluations=1),
)
HALVES = {"mem_len": 32, "c_mem_len": 32}
VARIANTS = (
    Variant("none", {"model": "transformer"}, "no memory"),
    Variant("xl", positions(64), "Transformer-XL"),
    Variant("compressive", {"model": "compressive", **HALVES}, "Compressive", "xl"),
    Variant("selective", {"model": "selective", **HALVES}, "selective", "xl"),
)
"""Equal keys, but for no memory."""
MEASURED = "learning.json"
"""In a run's folder: its losses as trained and with learning, in nats per token."""
N_RELEARNED = 65_536
"""Tokens of the training text that are read again after learning, to see how much was forgotten."""

# Names in this file: how a text was read, the part of it, and the choice of the learning rate.
STATIC = "static"
LEARNING = "learning"
SECOND_HALF = "second half"
BY_DISTANCE = "by distance"
TRAINING = "training text"
RATE = "learning rate"
BY_RATE = "first half, by learning rate"


@dataclass(frozen=True)
class LearningWorth(ArmsCommand):
    """Train each memory on a text in characters, and measure it with and without learning while it reads."""

    name: ClassVar = "learning-worth"
    title: ClassVar = "What memory saves when weights learn, too"
    method: ClassVar = (
        "Losses are in nats per character, of the second half of the held-out text, which is read as one "
        "stream from its start. With learning, each segment is first scored and then learned by one step of "
        "gradient descent; the learning rate of each arm is the one that was best for its first seed on the "
        f"first half. The training text is its first {N_RELEARNED:,} characters, read as trained, and with "
        "the weights that the whole held-out text left. A word's distance is the number of characters from "
        "where it last began."
    )
    base: ClassVar = "none"
    variants: ClassVar = VARIANTS
    data: str = ""
    """The text, as for training; Tiny Shakespeare if not given."""
    tokens: Count = BASE.max_tokens
    """Tokens of each training run."""
    rates: tuple[float, ...] = (0.015, 0.03, 0.06)
    """The learning rates to choose from."""

    def plan_experiments(self, folder: Path) -> dict[str, Experiment]:
        tokens = QUICK_TOKENS if self.quick else self.tokens
        train = replace(BASE, data=self.data, max_tokens=tokens)
        return {"characters": self.plan_experiment(TextTask(probed=False), train)}

    def measure_runs(self, folder: Path) -> None:
        """Write the losses of each run, on the same held-out text."""
        runs = [run for run in read_runs(folder) if run.result]
        if all((run.folder / MEASURED).exists() for run in runs):
            return
        # All runs were trained on one text.
        corpus = common_corpus(runs)
        tokens, _ = held_out_tokens(corpus)
        training = corpus.train.tokens[:N_RELEARNED]

        # In the order of seeds, since the first one chooses the learning rate of its arm.
        choices: dict[str, dict[str, Any]] = {}
        for run in tqdm(sorted(runs, key=lambda run: run.seed), desc="learning", unit="run"):
            path = run.folder / MEASURED
            if not path.exists():
                model, tokenizer = load_checkpoint(run.folder, torch.device("cpu"))
                choice = choices.get(run.arm) or choose_rate(model, tokens, self.rates)
                measured = measure_model(model, tokenizer, tokens, training, choice[RATE])
                write_json(path, {**choice, **measured})
            measured = read_json(path)
            choices.setdefault(run.arm, {name: measured[name] for name in (RATE, BY_RATE)})

    def extra_results(self, run: Run) -> dict[str, Any]:
        path = run.folder / MEASURED
        return read_json(path) if path.exists() else {}

    def columns_by_table(self, arms_by_task: ArmsByTask) -> ColumnsByTable:
        [arms] = arms_by_task.values()
        held_out = (
            Measure("static (nats)", loss_of(SECOND_HALF, STATIC)),
            Measure("learning (nats)", loss_of(SECOND_HALF, LEARNING)),
            Measure("learning saves (nats)", saving_of(SECOND_HALF), better=1),
            Measure(RATE, RATE),
        )
        forgetting = (
            Measure("training text, static (nats)", loss_of(TRAINING, STATIC)),
            Measure("training text, after learning (nats)", loss_of(TRAINING, LEARNING)),
            Measure("training text, learning saves (nats)", saving_of(TRAINING), better=1),
        )
        tables = {"": columns_of(held_out, arms), "How much is forgotten": columns_of(forgetting, arms)}
        groups = list_groups(arms, BY_DISTANCE)
        for reading in (STATIC, LEARNING):
            measures = [Measure(f"{group}, {reading}", loss_of_group(group, reading)) for group in groups]
            title = f"Loss by the characters since the word last began, {reading}"
            tables[title] = columns_of(measures, arms)
        return tables


def columns_of(measures: Sequence[Measure], arms: Sequence[ArmRuns]) -> list[Column]:
    return [Column(measure.label, measure, arms) for measure in measures]


def loss_of(part: str, reading: str) -> Callable[[Result], float | None]:
    """The loss of a ``part`` of the text, from a run's result."""
    return lambda result: result.get(part, {}).get(reading)


def loss_of_group(group: str, reading: str) -> Callable[[Result], float | None]:
    """The loss of a ``group`` of distances, from a run's result."""
    return lambda result: result.get(BY_DISTANCE, {}).get(group, {}).get(reading)


def saving_of(part: str) -> Callable[[Result], float | None]:
    """How much lower learning makes the loss of a ``part`` of the text, from a run's result."""

    def read_saving(result: Result) -> float | None:
        losses = result.get(part)
        if not losses:
            return None
        saving: float = losses[STATIC] - losses[LEARNING]
        return saving

    return read_saving


def choose_rate(model: MemoryLM, tokens: Tensor, rates: Sequence[float]) -> dict[str, Any]:
    """The learning rate with the least loss of the first half of ``tokens [n]``, and the loss by rate."""
    by_rate = {}
    for rate in rates:
        learn = LearnConfig(learn_rate=rate)
        first_half = tokens[: half_of(tokens) + 1]
        by_rate[rate] = evaluate_learning(model, first_half, STREAMS_OF_LEARNING, learn).loss
    return {RATE: min(by_rate, key=by_rate.__getitem__), BY_RATE: by_rate}


def half_of(tokens: Tensor) -> int:
    """How many of the predicted tokens are in the first half: of ``tokens [n]``, n − 1 are predicted."""
    return (len(tokens) - 1) // 2


def measure_model(
    model: MemoryLM, tokenizer: Tokenizer, tokens: Tensor, training: Tokens, rate: float
) -> dict[str, Any]:
    """The losses of the second half of ``tokens [n]`` in nats, as trained and with learning, and those of the
    ``training`` text before and after."""
    # Losses of all predicted tokens, [n − 1] each.
    static: list[Tensor] = []
    evaluate(model, tokens, STREAMS_OF_LEARNING, progress=static.append)
    trained_loss = evaluate(model, training, STREAMS).loss
    learning, loss_afterwards = learn_text(model, tokens, training, rate)

    # Only the second half counts: the learning rate was chosen on the first.
    n_first = half_of(tokens)
    losses = {STATIC: torch.cat(static)[n_first:], LEARNING: learning[n_first:]}
    distances = word_distances(tokens, tokenizer)[1 + n_first :]
    return {
        SECOND_HALF: mean_losses(losses),
        TRAINING: {STATIC: trained_loss, LEARNING: loss_afterwards},
        BY_DISTANCE: losses_by_distance(losses, distances),
    }


def learn_text(model: MemoryLM, tokens: Tensor, training: Tokens, rate: float) -> tuple[Tensor, float]:
    """The losses ``[n − 1]`` of ``tokens [n]``, which the model learns as it reads them, and its loss on the
    ``training`` text afterwards. Then it has its trained weights again."""
    learn = LearnConfig(learn_rate=rate)
    losses: list[Tensor] = []
    with learned(model, tokens, STREAMS_OF_LEARNING, learn, progress=losses.append):
        loss_afterwards = evaluate(model, training, STREAMS).loss
    return torch.cat(losses), loss_afterwards


if __name__ == "__main__":
    LearningWorth.main()
