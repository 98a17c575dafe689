"""Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927) against the bytes that a memory has.

Run it with ``python -m experiments.mqar --out FOLDER``. An episode of N tokens starts with N / 16 pairs of a
key and its value; then each key asks once for its value, early rather than late.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, product
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch

from experiments.arms import ArmsCommand, Column, Drawn, Pairs, correct
from experiments.memory_worth import listed
from memformers.common.fields import Count, Range, replace_nested
from memformers.comparison.experiment import Experiment, train_alone
from memformers.comparison.recall import QUICK_TOKENS, TRAINING, RecallRun, RecallSettings, RecallTask
from memformers.data.recall_stream import NO_QUESTION, RecallStream
from memformers.data.streams import IGNORED, Segment
from memformers.report import plotting
from memformers.report.arms import Measure
from memformers.report.document import right_between
from memformers.runs.folder import Arm

SEGMENT, VALUES, KEYS = 64, 64, (32, 128)  # tokens; different values; and keys that a layer remembers
SHIFTS, RATES = {"": "false", "-shift": "true"}, {"": 1.0, "-slow": 1 / 3}
HALVES = "mem_len={half} c_mem_len={half}"
KINDS = {
    "none": ("no memory", "model=transformer"),
    "xl": ("Transformer-XL", "model=transformer-xl mem_len={n}"),
    "conv": ("Compressive", f"model=compressive {HALVES}"),
    "mean": ("means", f"model=compressive compression=mean {HALVES}"),
    "selective": ("selective", f"model=selective {HALVES}"),
}


class MQARTask(RecallTask):
    """Training runs on episodes of ``reach`` tokens with one pair for each key of the stream."""

    module = "experiments.mqar"

    def segments(self, run: RecallRun, seed: int, **longest: Any) -> Iterator[tuple[Segment, Any]]:
        """Ids are first the values, then four keys for each pair, then the token that means nothing."""
        pairs, length, rng = run.recall.stream.keys, run.recall.reach, np.random.default_rng(seed)
        early = np.arange(1, length - 2 * pairs + 1) ** -0.5
        for begin in count(step=length):
            inputs = np.full((length, run.train.batch_size), VALUES + 4 * pairs)
            targets, distances = np.full(inputs.shape, IGNORED), np.full(inputs.shape, NO_QUESTION)
            for b in range(run.train.batch_size):
                keys, values = VALUES + rng.permutation(4 * pairs)[:pairs], rng.integers(VALUES, size=pairs)
                asked = 2 * pairs + rng.choice(len(early), pairs, replace=False, p=early / early.sum())
                inputs[: 2 * pairs : 2, b], inputs[1 : 2 * pairs : 2, b] = keys, values
                inputs[asked, b], targets[asked, b] = keys, values
                distances[asked, b] = asked - 2 * np.arange(pairs)
            parts = (torch.from_numpy(x).split(SEGMENT) for x in (inputs, targets, distances))
            for i, (x, y, d) in enumerate(zip(*parts, strict=True)):
                yield Segment(x, y, starts_over=i == 0, end=begin + (i + 1) * SEGMENT), d


@dataclass(frozen=True)
class MQAR(ArmsCommand):
    """Train each memory on associative recall, with and without a token shift."""

    name: ClassVar = "mqar"
    title: ClassVar = "Associative recall by bytes of state"
    method: ClassVar = "By chance, 1.6 % are correct. Half of a memory's keys are slots, with c = 4."
    base: ClassVar = "none-0"
    length: Annotated[int, Range(256, 2048)] = 256
    """Tokens of an episode, N: a multiple of 64."""
    tokens: Count = 2_000_000
    """Tokens of each training run."""
    seed: Annotated[int, Range(0)] = 0
    """The first seed. Learning rates that were chosen from some seeds are to be measured from others."""

    @classmethod
    def listed(cls) -> Sequence[Arm]:
        """The rival of an arm is Transformer-XL at equal keys; its rival, itself without token shift."""
        arms = {}
        for (kind, (label, model)), shift, rate in product(KINDS.items(), SHIFTS, RATES):
            plain = f"{kind}-{{}}{rate}" if shift else ""  # the same without shift
            rival = plain if kind in ("none", "xl") else f"xl-{{}}{shift}{rate}"
            speed = f"learning_rate={3e-3 * RATES[rate]} muon_learning_rate={0.02 * RATES[rate]}"
            for n in KEYS if kind != "none" else (0,):
                settings = f"{model.format(n=n, half=n // 2)} token_shift={SHIFTS[shift]} " + speed
                shown = f"{label}, {n} keys" + f"{shift}{rate}".replace("-", ", ")
                arms[f"{kind}-{n}{shift}{rate}"] = (shown, settings, rival.format(n))
        return list(listed(arms).values())

    def experiments(self, folder: Path) -> dict[str, Experiment]:
        task, pairs, N, times = MQARTask(), self.length // 16, self.length, 1 if self.quick else 8
        tokens, vocab_size = QUICK_TOKENS if self.quick else self.tokens, VALUES + 4 * pairs + 1
        train = replace_nested(TRAINING, tokens=tokens, evaluations=times, seed=self.seed,
                               vocab_size=vocab_size, d_model=64, n_layers=2, d_ff=256)  # fmt: skip
        more = {task.name: asdict(RecallSettings(RecallStream(pairs, VALUES), 0.0, times * N, N))}
        return {task.name: Experiment(task, train, more, self.chosen(asdict(train) | more), *self.how)}

    def measures(self, task: str) -> Sequence[Measure]:
        return [correct("correct", right_between(0, 2**31))]

    def figure(self, columns: Sequence[Column], pairs: Pairs, labels: Mapping[str, str]) -> Drawn:
        figure, (axes,) = plotting.panels([2.8])
        column, lines = columns[0], []
        for (kind, line), shift, rate in product(zip(KINDS, plotting.PALETTE, strict=False), SHIFTS, RATES):
            names = [f"{kind}-{n}{shift}{rate}" for n in (0, *KEYS)]
            sizes = {arm.name: arm.first.facts["state_bytes"] / 1024 for arm in column.arms}
            points = [(sizes[name], mean) for name in names if (mean := column.mean(name))]
            label = KINDS[kind][0] + f"{shift}{rate}".replace("-", ", ")
            line = line | {"markerfacecolor": line["color"] if shift else "none"}
            lines += [plotting.Series(label, points, line, 100)] if points else []
        plotting.draw_marks(axes, lines)
        plotting.style(axes, "KiB of state per stream", "correct answers, %")
        return figure, "Empty marks are without a token shift. Lines are 95 % intervals by Student's t."


if __name__ == "__main__":
    train_alone(MQARTask()) if len(sys.argv) > 1 and Path(sys.argv[1]).is_dir() else MQAR.main()
