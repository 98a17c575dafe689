"""What memory saves on a long text: one network with memories of several kinds, at equal keys and at
several budgets of training, against the network without memory.

Run it with ``python -m experiments.memory_worth --out FOLDER``; ``--quick`` is a trial of some minutes. Each
budget is an experiment in ``FOLDER/TOKENS``; ``--resume`` continues, and adds budgets, arms and seeds.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.arms import ArmsCommand, Column, Parts, Tasks, Variant, prepared_python_source
from memformers.common.errors import UserError
from memformers.common.fields import Count, Range
from memformers.common.files import read_json, write_json
from memformers.comparison.experiment import Experiment
from memformers.comparison.text import MEMORIES, TextTask
from memformers.data.tokenizer import Tokenizer
from memformers.evaluation.controls import choose_streams, losses_under_controls
from memformers.evaluation.probe import common_corpus, held_out_tokens
from memformers.models.config import Lengths
from memformers.report.arms import Measure
from memformers.runs.folder import UNTOUCHED
from memformers.runs.load import load_checkpoint
from memformers.runs.reader import Run, read_runs
from memformers.training.config import EvaluationConfig, TrainConfig

EVALUATION = EvaluationConfig(evaluations=2, final_tokens=1_000_000)
BASE = TrainConfig(model=MEMORIES, tokenizer="bpe", evaluation=EVALUATION)
MEASURED = "by_distance.json"  # in a run's folder: the loss by group, in nats per token
READ, EDGES = 4096, (1, 64, 128, 256, 512, 1024, 2048)  # tokens of a document; of groups of distances
DISTANCE, ALL_TOKENS = "by_distance", "all"
CONTROLS = ("memory swapped", "slots swapped")  # beside reading as in training
NEVER, NO_WORD = 0, -1  # distances of words that had not occurred, and of tokens outside of words
NAME = re.compile(r"[^\W\d]\w*")  # a word, or a name of a program


def positions(mem_len: Lengths) -> dict[str, Any]:
    """The settings of a Transformer-XL."""
    return {"model": "transformer-xl", "mem_len": mem_len}


def slots(mem_len: Lengths, c_mem_len: Lengths, **settings: Any) -> dict[str, Any]:
    """The settings of a Compressive Transformer."""
    return {"model": "compressive", "mem_len": mem_len, "c_mem_len": c_mem_len, **settings}


def last_layer(mem_len: int) -> tuple[int, ...]:
    """Lengths of 64 in all layers but the last."""
    return (64, 64, 64, mem_len)


def by_name(*variants: Variant) -> dict[str, Variant]:
    return {variant.name: variant for variant in variants}


UPPER = (0, 0, 128, 128)
KINDS = by_name(
    Variant("none", {"model": "transformer"}, "no memory"),
    Variant("xl-64", positions(64), "64 positions"),
    Variant("slots-32-32", slots(32, 32), "32 positions, 32 slots", "xl-64"),
    Variant("xl-256", positions(256), "256 positions"),
    Variant("slots-64-192", slots(64, 192), "64 positions, 192 slots", "xl-256"),
    Variant(
        "slots-64-192-c2", slots(64, 192, compression_rate=2), "64 positions, 192 slots, c = 2", "xl-256"
    ),
    Variant(
        "slots-64-192-c8", slots(64, 192, compression_rate=8), "64 positions, 192 slots, c = 8", "xl-256"
    ),
    Variant("more-positions", slots(128, 128), "128 positions, 128 slots", "xl-256"),
    Variant("most-positions", slots(192, 64), "192 positions, 64 slots", "xl-256"),
    Variant(
        "most-positions-upper", slots(192, UPPER), "192 positions, slots in the upper two layers", "xl-upper"
    ),
    Variant(
        "most-positions-upper-c2",
        slots(192, UPPER, compression_rate=2),
        "192 positions, slots in the upper two layers, c = 2",
        "most-positions-upper",
    ),
    Variant(
        "means-upper",
        slots(192, UPPER, compression="mean"),
        "192 positions, means in the upper two layers",
        "most-positions-upper",
    ),
    Variant(
        "xl-upper", positions((192, 192, 320, 320)), "192 positions, 320 in the upper two layers", "xl-256"
    ),
    Variant("xl-832", positions(832), "832 positions", "xl-256"),
)
"""Equal keys, c = 4 and all layers alike if not named otherwise; and what 192 slots cover, kept exactly."""
HALF_128 = {"mem_len": last_layer(128), "c_mem_len": (0, 0, 0, 128)}
HALF_416 = {"mem_len": last_layer(416), "c_mem_len": (0, 0, 0, 416)}
LAST = (
    Variant("last-256", positions(last_layer(256)), "256 newest"),
    Variant(
        "last-128-selective",
        {"model": "selective", **HALF_128},
        "128 newest, 128 like no newer one",
        "last-256",
    ),
    Variant("last-128-slots", {"model": "compressive", **HALF_128}, "128 newest, 128 slots", "last-256"),
    Variant(
        "last-128-means",
        {"model": "compressive", "compression": "mean", **HALF_128},
        "128 newest, 128 means",
        "last-256",
    ),
    Variant("last-832", positions(last_layer(832)), "832 newest"),
    Variant(
        "last-416-selective",
        {"model": "selective", **HALF_416},
        "416 newest, 416 like no newer one",
        "last-832",
    ),
)
"""Other layers have 64 positions. Each also with a token shift."""


def shifted(variant: Variant) -> Variant:
    """``variant`` with a token shift, compared with itself."""
    settings = {**variant.settings, "token_shift": True}
    return Variant(f"{variant.name}-shift", settings, f"{variant.label}, token shift", variant.name)


VARIANTS = by_name(
    Variant("xl-last", positions(last_layer(832)), "64 positions, 832 in the last layer", "xl-256"),
    Variant("start-mean", slots(64, 192, compression_start="mean"), "f_c begins as the mean", "slots-64-192"),
    Variant("pooling", slots(64, 192, compression="mean"), "f_c is the mean", "slots-64-192"),
    Variant(
        "bptt",
        slots(64, 192, compression_loss="none", bptt=1),
        "f_c learns from the next segment's loss",
        "slots-64-192",
    ),
    Variant("upper", slots(64, (0, 0, 384, 384)), "slots in the upper two layers", "slots-64-192"),
    Variant(
        "full-length", slots(64, 192, memory_warmup=0.0), "memory of full length at once", "slots-64-192"
    ),
)
"""One setting changed, with the same number of keys over all layers."""
SHIFTED = by_name(*map(shifted, (*LAST, KINDS["xl-256"])))
ALL = {**KINDS, **by_name(*LAST), **SHIFTED, **VARIANTS}


@dataclass(frozen=True)
class MemoryWorth(ArmsCommand):
    """Train each memory on a long text, with several budgets and from several seeds."""

    name: ClassVar = "memory-worth"
    title: ClassVar = "What memory saves on a long text"
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
    def listed(cls) -> Sequence[Variant]:
        return [*ALL.values()]

    def experiments(self, folder: Path) -> dict[str, Experiment]:
        data = self.data or prepared_python_source(folder, self.vocab_size)
        model = replace(BASE.model, vocab_size=self.vocab_size)
        base = replace(BASE, data=data, seed=self.seed, model=model)
        command = self
        if self.quick:
            few = self.arms or ("none", "xl-64", "slots-32-32", "xl-256")
            command = replace(self, arms=few, budgets=(65_536,))
        experiments = {}
        for n_tokens in command.budgets:
            task = TextTask(probed=False)
            experiments[str(n_tokens)] = command.experiment_on(task, replace(base, max_tokens=n_tokens))
        return experiments

    def measure(self, folder: Path) -> None:
        """Write the losses by group of each run, on the beginnings of the same held-out documents."""
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
            groups = {name: means(losses, group == i) for i, name in enumerate(names) if (group == i).any()}
            groups[ALL_TOKENS] = means(losses, torch.ones_like(group, dtype=torch.bool))
            write_json(run.folder / MEASURED, {"documents": len(reading.lengths), DISTANCE: groups})

    def result_of(self, run: Run) -> dict[str, Any]:
        return read_json(run.folder / MEASURED) if (run.folder / MEASURED).exists() else {}

    def parts(self, tasks: Tasks) -> Parts:
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


def word_distances(tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
    """How many tokens ago the word of each of ``tokens [T]`` last began before it began here, ``[T]``."""
    newest: dict[str, int] = {}
    distances = torch.full_like(tokens, NO_WORD, dtype=torch.int64)
    for word, begin, end in words_in(tokens, tokenizer):
        distances[begin:end] = begin - newest.get(word, begin)
        newest[word] = begin
    return distances


def words_in(tokens: Tensor, tokenizer: Tokenizer) -> Iterator[tuple[str, int, int]]:
    pieces = list(map(tokenizer.decoder(), tokens.tolist()))
    ends = list(accumulate(map(len, pieces)))
    for match in NAME.finditer("".join(pieces)):
        yield match[0], bisect_left(ends, match.start() + 1), bisect_right(ends, match.end())


def word_groups(distances: Tensor, edges: Sequence[int]) -> tuple[Tensor, list[str]]:
    """The group of each of ``distances``, and names: by edges, first occurrences, and tokens of no word."""
    names = [*(f"{low:,} – {above - 1:,}" for low, above in pairwise(edges)), f"{edges[-1]:,} or more"]
    group = torch.bucketize(distances, torch.tensor(edges), right=True) - 1
    group = group.where(distances != NEVER, len(edges)).where(distances != NO_WORD, len(edges) + 1)
    return group, [*names, "first", "no word"]


if __name__ == "__main__":
    MemoryWorth.main()
