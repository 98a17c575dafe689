"""How many position features quality needs: one Transformer-XL whose sinusoids have P numbers, for several P
and wavelengths, on characters, on subwords and on the recall stream.

Run it with ``python -m experiments.position_features --out FOLDER --characters input.txt --subwords FOLDER``;
``--resume`` continues. An arm ``p16-1k`` has 16 features with wavelengths up to 1,000·2π in place of
10,000·2π; ``p16-fit``, up to four times the longest distance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, cast

from experiments.arms import QUICK_TOKENS, ArmsCommand, Variant, correct, prepared_python_source
from memformers.common.fields import Count, Range
from memformers.comparison.arms import keys_of_layers
from memformers.comparison.experiment import Experiment
from memformers.comparison.recall.setup import RecallConfig
from memformers.comparison.recall.task import RECALL
from memformers.comparison.text import TextTask
from memformers.models.config import ModelConfig
from memformers.report.arms import Measure
from memformers.training.config import EvaluationConfig, TrainConfig

SEGMENT, SHORT, LONG = 64, 64, 832
WAVELENGTHS_PER_REACH = 4
"""The fitted longest wavelength, in longest distances."""
PAPER_BASE, SHORTER_BASE = 10_000.0, 1_000.0
FEATURES = (8, 16, 32, 64)


def fitted_base(mem_len: int) -> float:
    """The base of sinusoids whose longest wavelength is 4 times the longest distance."""
    return round(WAVELENGTHS_PER_REACH * (SEGMENT + mem_len) / (2 * math.pi), 1)


def arms_of_memory(mem_len: int) -> list[Variant]:
    """P = D and fewer features, with the paper's wavelengths, shorter ones, and those that fit the memory."""
    paper = {"position_features": None, "position_base": PAPER_BASE}
    arms = [Variant("all", paper, "P = D")]
    for features in FEATURES:
        settings = paper | {"position_features": features}
        arms.append(Variant(f"p{features}", settings, f"P = {features}"))
        for name, label, base in (
            ("1k", "up to 1,000 · 2π", SHORTER_BASE),
            ("fit", "fitted", fitted_base(mem_len)),
        ):
            arm_settings = settings | {"position_base": base}
            arms.append(Variant(f"p{features}-{name}", arm_settings, f"P = {features}, {label}"))
    return arms


@dataclass(frozen=True)
class PositionFeatures(ArmsCommand):
    """Train the same network with more and with fewer position features."""

    name: ClassVar = "position-features"
    title: ClassVar = "How many position features quality needs"
    method: ClassVar = (
        "P numbers say how far away a key is; nothing else differs. The fitted sinusoids have wavelengths "
        f"from 2π to {WAVELENGTHS_PER_REACH} times the longest distance."
    )
    base: ClassVar = "all"
    known: ClassVar = tuple(arms_of_memory(SHORT))
    characters: str = ""
    """The text that is read in characters, with a memory of 64; Tiny Shakespeare if not given."""
    subwords: str = ""
    """The text that is read in subwords, with memories of 64, 64, 64 and 832; the Python source code of this
    machine if not given."""
    tokens: Count = 1_000_000
    """Tokens of each training run on a text; on the recall stream, those of the recall experiment."""
    seed: Annotated[int, Range(0)] = 0
    """The first seed. More seeds of an experiment whose runs are elsewhere begin after theirs."""
    tasks: tuple[str, ...] = ("characters", "subwords", "recall")
    """Which of the three."""

    def experiments(self, folder: Path) -> dict[str, Experiment]:
        evaluation = EvaluationConfig(evaluations=1)
        tokens = QUICK_TOKENS if self.quick else self.tokens
        model = ModelConfig(token_shift=True, segment_len=SEGMENT)
        experiments = {}
        if "characters" in self.tasks:
            short = replace(model, mem_len=SHORT)
            train = TrainConfig(
                short, data=self.characters, seed=self.seed, max_tokens=tokens, evaluation=evaluation
            )
            experiments["characters"] = self.experiment_of(train, SHORT)
        if "subwords" in self.tasks:
            data = self.subwords or prepared_python_source(folder, 2048)
            long = replace(model, mem_len=(SHORT, SHORT, SHORT, LONG), vocab_size=2048)
            train = TrainConfig(
                long, data=data, seed=self.seed, max_tokens=tokens, evaluation=evaluation, tokenizer="bpe"
            )
            experiments["subwords"] = self.experiment_of(train, LONG)
        if "recall" in self.tasks:
            near = RecallConfig(quick=self.quick).setup.base
            mem_len = cast(int, keys_of_layers(near.model))  # the same in all layers
            near_model = replace(near.model, model="transformer-xl", mem_len=mem_len)
            near = replace(near, seed=self.seed, model=near_model)
            experiments["recall"] = self.experiment_on(RECALL, near, arms_of_memory(mem_len))
        return experiments

    def experiment_of(self, train: TrainConfig, mem_len: int) -> Experiment:
        return self.experiment_on(TextTask(probed=False), train, arms_of_memory(mem_len))

    def measures(self, task: str) -> Sequence[Measure]:
        if task == "recall":
            return [correct("correct answers within its reach", "within_reach")]
        return [Measure(f"held-out loss, {task} (nats)", "loss", ".4f")]


if __name__ == "__main__":
    PositionFeatures.main()
