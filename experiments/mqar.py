"""Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927) against the bytes that a memory has.

Run it with ``python -m experiments.mqar --length 512 --out FOLDER``. An episode of N tokens starts with
N / 16 pairs of a key and its value, in successive tokens. Then each key asks once for its value, rather early
than late, between tokens that mean nothing. Each arm has two learning rates, and the better one is drawn.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, cycle, product
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from experiments.arms import ArmsCommand, Parts, Tasks, correct
from experiments.memories.selective import Selective
from memformers.common.fields import Count, Range, replace_nested
from memformers.comparison.experiment import Experiment, train_alone
from memformers.comparison.recall import QUICK_TOKENS, TRAINING, RecallRun, RecallSettings, RecallTask
from memformers.data.recall_stream import NOTHING, RecallStream
from memformers.data.streams import IGNORED, Segment
from memformers.models.config import ModelConfig
from memformers.models.registry import name_of
from memformers.report import plotting
from memformers.report.arms import Measure
from memformers.report.document import right_between
from memformers.report.markdown import Report, write_page
from memformers.runs.folder import REPORT, Arm

SEGMENT, VALUES, KEYS = 64, 64, (32, 64, 128)
"""Tokens of a segment; different values; and keys that a layer remembers."""
SHIFTS, RATES = ("", "-shift"), {"": 1.0, "-slow": 1 / 3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("no memory", {"model": "transformer"}),
    "xl": ("Transformer-XL", {"model": "transformer-xl"}),
    "conv": ("Compressive", {"model": "compressive"}),
    "mean": ("means", {"model": "compressive", "compression": "mean"}),
    "selective": ("selective", {"model": name_of(Selective)}),
}
CORRECT = correct("correct", right_between(0, 2**31))


class MQARTask(RecallTask):
    """Training runs on episodes of ``reach`` tokens with as many pairs as the stream has keys."""

    module = "experiments.mqar"

    def segments(self, run: RecallRun, seed: int, **longest: Any) -> Iterator[tuple[Segment, Tensor]]:
        """Ids are first the values, then four keys for each pair, then the token that means nothing."""
        pairs, length, rng = run.recall.stream.keys, run.recall.reach, np.random.default_rng(seed)
        early = np.arange(1, length - 2 * pairs + 1) ** -0.5
        for begin in count(step=length):
            inputs = np.full((length, run.train.batch_size), VALUES + 4 * pairs)
            targets, distances = np.full(inputs.shape, IGNORED), np.full(inputs.shape, NOTHING)
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
    length: Annotated[int, Range(256, 2048)] = 512
    """Tokens of an episode, N: a multiple of 64."""
    tokens: Count = 10_000_000
    """Tokens of each training run."""

    @classmethod
    def listed(cls) -> Sequence[Arm]:
        """The rival of an arm is that without the token shift, or Transformer-XL with as many keys."""
        arms = []
        for kind, (label, settings) in KINDS.items():
            for n, shift, (rate, factor) in product(KEYS if kind != "none" else (0,), SHIFTS, RATES.items()):
                lengths = {"mem_len": n if kind == "xl" else n // 2, "c_mem_len": n // 2}
                of_model = settings | lengths | {"token_shift": bool(shift)}
                of_optim = {"learning_rate": factor * 3e-3, "muon_learning_rate": factor * 0.02}
                dotted = {f"model.{name}": value for name, value in of_model.items()}
                dotted |= {f"optim.{name}": value for name, value in of_optim.items()}
                said = f"{label}, {n} keys{', token shift' * bool(shift)}{', slow' * bool(rate)}"
                rival = "xl" if kind in ("conv", "mean", "selective") else ""
                rival = f"{kind if shift else rival}-{n}{rate}" if shift or rival else ""
                arms.append(Arm(f"{kind}-{n}{shift}{rate}", dotted, said, rival))
        return arms

    def experiments(self, folder: Path) -> dict[str, Experiment]:
        pairs, times = self.length // 16, 1 if self.quick else 8
        model = ModelConfig(vocab_size=VALUES + 4 * pairs + 1, d_model=64, n_layers=2, d_ff=256)
        tokens = QUICK_TOKENS if self.quick else self.tokens
        train = replace_nested(replace(TRAINING, model=model), tokens=tokens, evaluations=times)
        recall = RecallSettings(RecallStream(pairs, VALUES), 0.0, times * self.length, self.length)
        more = {MQARTask.name: asdict(recall)}
        arms = self.chosen(asdict(train) | more)
        return {MQARTask.name: Experiment(MQARTask(), train, more, arms, *self.how)}

    def measures(self, task: str) -> Sequence[Measure]:
        return [CORRECT]

    def parts(self, tasks: Tasks) -> Parts:
        return {"Correct answers": super().parts(tasks)[""]}  # without the figure of differences

    def report(self, folder: Path) -> Report:
        """The report, and the figure below it."""
        super().report(folder)
        place = folder / MQARTask.name
        arms = {arm.name: arm for arm in self.arms_in(place if place.exists() else folder)}
        figure, (axes,) = plotting.panels([2.8])
        for (kind, shift), line in zip(product(KINDS, SHIFTS), cycle(plotting.PALETTE), strict=False):
            points = []
            for n in (0, *KEYS):
                tried = [arms[name] for rate in RATES if (name := f"{kind}-{n}{shift}{rate}") in arms]
                means = {mean: arm for arm in tried if (mean := arm.mean(CORRECT.of))}
                if means:
                    best = max(means, key=lambda mean: mean.mean)
                    points.append((means[best].first.facts["state_bytes"] / 1024, best))
            label = KINDS[kind][0] + ", token shift" * bool(shift)
            plotting.draw_marks(axes, [plotting.Series(label, points, line, 100)] if points else [])
        plotting.style(axes, "KiB of state per stream", "correct answers, %")
        shown = plotting.save_figure(figure, folder, self.name, self.title, "With the better learning rate.")
        return write_page([(folder / REPORT).read_text(encoding="utf-8").rstrip(), shown], folder)


if __name__ == "__main__":
    train_alone(MQARTask()) if len(sys.argv) > 1 and Path(sys.argv[1]).is_dir() else MQAR.main()
