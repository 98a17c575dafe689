"""Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927) against the bytes that a memory has.

Run it with ``python -m experiments.mqar --out FOLDER``. An episode of N tokens starts with N / 16 pairs of a
key and its value; then each key asks once for its value, early rather than late, among random fillers.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch

from experiments.arms import ArmsCommand, Variant
from experiments.columns import Column, Drawing, Labels, Pairs, correct
from experiments.equal_bytes import list_memories
from memformers.common.fields import Count, Range, replace_nested
from memformers.comparison.experiment import Experiment
from memformers.comparison.recall.setup import QUICK_TOKENS, recall_run
from memformers.comparison.recall.task import RecallRun, RecallSettings, RecallTask
from memformers.comparison.task import train_alone
from memformers.data.recall_stream import NO_QUESTION, RecallStream
from memformers.data.streams import IGNORED, Segment
from memformers.models.config import ModelConfig
from memformers.models.registry import import_memory, lookup
from memformers.report import plotting
from memformers.report.arms import Measure
from memformers.report.recall import right_between

SEGMENT = 64
"""Tokens of a segment."""
KEYS = (32, 128)
"""Keys that a layer remembers."""
D_MODEL = 64
N_HEADS = ModelConfig.n_heads

# An episode.
SHORTEST = 256
"""Tokens of the shortest episode."""
VALUES = 64
"""Different values for the shortest episode, and in proportion for longer ones: 4 for each pair."""
KEYS_PER_PAIR = 4
"""Different keys for each pair of an episode."""
FILLERS = 64
"""Different fillers."""
EARLINESS = -0.5
"""A question is asked n tokens after the pairs with a probability in proportion to n^this."""

# The arms: each kind of memory, with each shift and with each factor of the learning rates, by what their
# names end in.
KINDS = {
    "none": ("no memory", {"model": "transformer"}),
    "xl": ("Transformer-XL", {"model": "transformer-xl"}),
    "conv": ("Compressive", {"model": "compressive"}),
    "mean": ("means", {"model": "compressive", "compression": "mean"}),
    "selective": ("selective", {"model": "selective"}),
}
SHIFTS = {"": False, "-shift": True}
RATES = {"": 1.0, "-slow": 1 / 3}


class MQARTask(RecallTask):
    """Training runs on episodes of ``reach`` tokens with one pair for each key of the stream."""

    module = "experiments.mqar"

    def segments(self, run: RecallRun, seed: int, **longest: Any) -> Iterator[tuple[Segment, Any]]:
        stream = run.recall.stream
        length = run.recall.reach
        rng = np.random.default_rng(seed)
        for begin in count(step=length):
            episodes = [draw_episode(rng, length, stream.keys, stream.values) for _ in range(run.batch_size)]
            # Inputs, targets and distances, [N, B] each, in segments of [S, B].
            tensors = [torch.from_numpy(np.stack(arrays, axis=1)) for arrays in zip(*episodes, strict=True)]
            segments = zip(*(tensor.split(SEGMENT) for tensor in tensors), strict=True)
            for i, (inputs, targets, distances) in enumerate(segments):
                end = begin + (i + 1) * SEGMENT
                yield Segment(inputs, targets, starts_over=i == 0, end=end), distances


def draw_episode(
    rng: np.random.Generator, length: int, pairs: int, n_values: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets and distances of an episode of ``length`` tokens, int64 ``[N]`` each. Ids are first the
    values, then the keys, then the fillers.

    As in the paper's code, keys and values are drawn without replacement, and fillers at random. With
    replacement, the most common value of an episode is right in more than one of ``pairs`` questions, without
    any association. Only here, fillers have separate ids: with so few keys, a key among the fillers would
    often begin a second pair, which contradicts the first.
    """
    first_key = n_values
    first_filler = first_key + KEYS_PER_PAIR * pairs
    keys = first_key + rng.choice(KEYS_PER_PAIR * pairs, pairs, replace=False)
    values = rng.choice(n_values, pairs, replace=False)

    # Where the questions are.
    n_left = length - 2 * pairs
    probability = np.arange(1, n_left + 1) ** EARLINESS
    offsets = rng.choice(n_left, pairs, replace=False, p=probability / probability.sum())
    # Early questions are drawn first. In random order, a question's position says nothing about its answer.
    asked = 2 * pairs + rng.permutation(offsets)

    inputs = rng.integers(first_filler, first_filler + FILLERS, size=length)
    inputs[: 2 * pairs : 2] = keys
    inputs[1 : 2 * pairs : 2] = values
    inputs[asked] = keys
    targets = np.full(length, IGNORED)
    targets[asked] = values
    distances = np.full(length, NO_QUESTION)
    distances[asked] = asked - 2 * np.arange(pairs)
    return inputs, targets, distances


def level_without_association(length: int) -> float:
    """The share of right answers of the best constant answer, one of the episode's values: each is the answer
    to one question. It is what a model reaches that knows the values, but not of which keys they are."""
    return 1 / n_pairs(length)


def n_pairs(length: int) -> int:
    """The pairs of an episode of ``length`` tokens."""
    return length // 16


def list_variants_of(kind: str, shift: str, rate: str) -> Iterator[Variant]:
    """A ``kind`` of memory with each number of keys. The rival of an arm is Transformer-XL at equal keys; the
    rival of Transformer-XL, itself without token shift."""
    label, model = KINDS[kind]
    suffix = f"{shift}{rate}"
    for n_keys in KEYS if kind != "none" else (0,):
        settings: dict[str, Any] = {**model, "token_shift": SHIFTS[shift], **learning_rates(rate)}
        rival = f"xl-{n_keys}{suffix}"
        if kind in ("none", "xl"):
            rival = f"{kind}-{n_keys}{rate}" if shift else ""
        if kind == "xl":
            settings["mem_len"] = n_keys
        elif kind != "none":
            settings |= {"mem_len": n_keys // 2, "c_mem_len": n_keys // 2}
        shown = f"{label}, {n_keys} keys{in_words(suffix)}"
        yield Variant(f"{kind}-{n_keys}{suffix}", settings, shown, rival)


def learning_rates(rate: str) -> dict[str, float]:
    """The settings of the rates that ``rate`` in an arm's name stands for."""
    return {"learning_rate": 3e-3 * RATES[rate], "muon_learning_rate": 0.02 * RATES[rate]}


def in_words(suffix: str) -> str:
    """The end of an arm's name as the end of its label."""
    return suffix.replace("-", ", ")


def list_other_memories(rate: str) -> Iterator[Variant]:
    """The memories of other papers, with the bytes of the larger number of keys, and with a token shift where
    they can have one. Their rival is Transformer-XL, at its better rate, with the same shift."""
    n_keys = max(KEYS)
    for memory, settings in list_memories(n_keys, D_MODEL // N_HEADS):
        if memory.is_built_in:
            continue
        shift = "-shift" if lookup(import_memory(memory.import_path)).may_shift() else ""
        suffix = f"{shift}{rate}"
        yield Variant(
            f"{memory.arm}-{n_keys}{suffix}",
            {**settings, "token_shift": bool(shift), **learning_rates(rate)},
            f"{memory.name}, bytes of {n_keys} keys{in_words(suffix)}",
            f"xl-{n_keys}{shift}-slow",
        )


@dataclass(frozen=True)
class MQAR(ArmsCommand):
    """Train each memory on associative recall, with and without a token shift."""

    name: ClassVar = "mqar"
    title: ClassVar = "Associative recall by bytes of state"
    method: ClassVar = (
        "Of the questions of an episode of N tokens, a guess among all values is right in 4 / N (1.6 % of "
        "256 tokens), and one among the values of the episode, which needs no association, in 16 / N "
        "(6.2 %). Half of a memory's keys are slots, with c = 4."
    )
    base: ClassVar = "none-0"
    length: Annotated[int, Range(SHORTEST, 2048)] = SHORTEST
    """Tokens of an episode, N: a multiple of 64."""
    tokens: Count = 2_000_000
    """Tokens of each training run."""
    seed: Annotated[int, Range(0)] = 0
    """The first seed. Learning rates that were chosen from some seeds are to be measured from others."""

    @classmethod
    def list_variants(cls) -> Sequence[Variant]:
        variants: list[Variant] = []
        for kind, shift, rate in product(KINDS, SHIFTS, RATES):
            variants += list_variants_of(kind, shift, rate)
        for rate in RATES:
            variants += list_other_memories(rate)
        return variants

    def plan_experiments(self, folder: Path) -> dict[str, Experiment]:
        pairs = n_pairs(self.length)
        n_values = VALUES * self.length // SHORTEST
        vocab_size = n_values + KEYS_PER_PAIR * pairs + FILLERS
        model = ModelConfig(vocab_size=vocab_size, d_model=D_MODEL, n_layers=2, d_ff=256)
        n_episodes = 1 if self.quick else 8  # measured of each stream
        stream = RecallStream(pairs, n_values)
        recall = RecallSettings(stream, growing=0.0, evaluated=n_episodes * self.length)
        base = replace_nested(
            recall_run(model, recall),
            reach=self.length,
            max_tokens=QUICK_TOKENS if self.quick else self.tokens,
            evaluations=1 if self.quick else 8,
            seed=self.seed,
        )
        task = MQARTask()
        return {task.name: self.plan_experiment(task, base)}

    def measures_of(self, task: str) -> Sequence[Measure]:
        return [correct("correct", right_between(0, 2**31))]

    def draw_figure(self, columns: Sequence[Column], pairs: Pairs, labels: Labels) -> Drawing:
        """Correct answers against bytes of state: a line for each kind of memory, shift and rate."""
        [column] = columns
        kibibytes = {arm.name: arm.first.facts["state_bytes"] / 1024 for arm in column.arms}
        styles = dict(zip(KINDS, plotting.PALETTE, strict=False))
        lines = []
        for kind, shift, rate in product(KINDS, SHIFTS, RATES):
            suffix = f"{shift}{rate}"
            points = []
            for n_keys in (0, *KEYS):
                name = f"{kind}-{n_keys}{suffix}"
                mean = column.mean(name)
                if mean:
                    points.append((kibibytes[name], mean))
            if points:
                label, _ = KINDS[kind]
                style = styles[kind]
                style = style | {"markerfacecolor": style["color"] if shift else "none"}
                lines.append(plotting.Series(f"{label}{in_words(suffix)}", points, style, 100))

        figure, [axes] = plotting.panels([2.8])
        plotting.draw_marks(axes, lines)
        plotting.style(axes, "KiB of state per stream", "correct answers, %")
        level = 100 * level_without_association(self.length)
        axes.axhline(level, color=plotting.GREY, linewidth=0.8, linestyle=":", zorder=0)
        return figure, (
            "Empty marks are without a token shift; the dotted line is the level without association. Lines "
            "are 95 % intervals by Student's t."
        )


if __name__ == "__main__":
    # The experiment starts this file once for each run, with its folder.
    if len(sys.argv) > 1 and Path(sys.argv[1]).is_dir():
        train_alone(MQARTask())
    else:
        MQAR.main()
