"""How many position features quality needs: one Transformer-XL whose sinusoids have P numbers, for several P
and wavelengths, on characters, on subwords and on the recall stream.

Run it with ``python -m experiments.position_features --out FOLDER --characters input.txt --subwords FOLDER``;
``--resume`` continues. An arm ``p16-1k`` has 16 features with wavelengths up to 1,000·2π in place of
10,000·2π; ``p16-fit``, up to four times the longest distance.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from experiments.arms import QUICK_TOKENS, ArmsCommand, Variant, prepared_python_source
from experiments.columns import correct
from memformers.common.fields import Count, Range
from memformers.comparison.arms import keys_of_layers
from memformers.comparison.experiment import Experiment
from memformers.comparison.recall.setup import RecallConfig
from memformers.comparison.recall.task import RECALL
from memformers.comparison.text import TextTask
from memformers.models.config import ModelConfig
from memformers.report.arms import Measure
from memformers.training.config import EvaluationConfig, TrainConfig

SEGMENT = 64
# Lengths of memories.
SHORT = 64
LONG = 832
SUBWORDS = 2048
"""The vocabulary of the text in subwords."""
WAVELENGTHS_PER_REACH = 4
"""The fitted longest wavelength, in longest distances."""
# The longest wavelength is 2π times the base.
PAPER_BASE = 10_000.0
SHORTER_BASE = 1_000.0
FEATURES = (8, 16, 32, 64)


def fitted_base(mem_len: int) -> float:
    """The base of sinusoids whose longest wavelength is 4 times the longest distance."""
    return round(WAVELENGTHS_PER_REACH * (SEGMENT + mem_len) / (2 * math.pi), 1)


def list_features(mem_len: int) -> list[Variant]:
    """P = D and fewer features, with the paper's wavelengths, shorter ones, and those that fit the memory."""
    variants = [Variant("all", {"position_features": None, "position_base": PAPER_BASE}, "P = D")]
    bases = (
        ("", "", PAPER_BASE),
        ("-1k", ", up to 1,000 · 2π", SHORTER_BASE),
        ("-fit", ", fitted", fitted_base(mem_len)),
    )
    for features in FEATURES:
        for suffix, label, base in bases:
            settings = {"position_features": features, "position_base": base}
            variants.append(Variant(f"p{features}{suffix}", settings, f"P = {features}{label}"))
    return variants


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
    variants: ClassVar = tuple(list_features(SHORT))
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

    def plan_experiments(self, folder: Path) -> dict[str, Experiment]:
        planners: dict[str, Callable[[Path], Experiment]] = {
            "characters": self.plan_characters,
            "subwords": self.plan_subwords,
            "recall": self.plan_recall,
        }
        return {task: plan(folder) for task, plan in planners.items() if task in self.tasks}

    def plan_characters(self, folder: Path) -> Experiment:
        model = ModelConfig(token_shift=True, segment_len=SEGMENT, mem_len=SHORT)
        train = replace(self.text_settings(model), data=self.characters)
        return self.plan_experiment(TextTask(probed=False), train, list_features(SHORT))

    def plan_subwords(self, folder: Path) -> Experiment:
        data = self.subwords or prepared_python_source(folder, SUBWORDS)
        lengths = (SHORT, SHORT, SHORT, LONG)
        model = ModelConfig(token_shift=True, segment_len=SEGMENT, mem_len=lengths, vocab_size=SUBWORDS)
        train = replace(self.text_settings(model), data=data, tokenizer="bpe")
        return self.plan_experiment(TextTask(probed=False), train, list_features(LONG))

    def text_settings(self, model: ModelConfig) -> TrainConfig:
        tokens = QUICK_TOKENS if self.quick else self.tokens
        evaluation = EvaluationConfig(evaluations=1)
        return TrainConfig(model, seed=self.seed, max_tokens=tokens, evaluation=evaluation)

    def plan_recall(self, folder: Path) -> Experiment:
        base = RecallConfig(quick=self.quick).setup.base
        mem_len = keys_of_layers(base.model)
        assert isinstance(mem_len, int)  # the same in all layers
        model = replace(base.model, model="transformer-xl", mem_len=mem_len)
        base = replace(base, seed=self.seed, model=model)
        return self.plan_experiment(RECALL, base, list_features(mem_len))

    def measures_of(self, task: str) -> Sequence[Measure]:
        if task == "recall":
            return [correct("correct answers within its reach", "within_reach")]
        return [Measure(f"held-out loss, {task} (nats)", "loss", ".4f")]


if __name__ == "__main__":
    PositionFeatures.main()
