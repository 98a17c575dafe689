"""What memory saves on a long text: one network with memories of several kinds, at equal keys and at
several budgets of training, against the network without memory.

Run it with ``python -m experiments.memory_worth --out FOLDER``; ``--quick`` is a trial of some minutes. Each
budget is an experiment in ``FOLDER/TOKENS``; ``--resume`` continues, and adds budgets, arms and seeds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.arms import ArmsCommand, Variant, prepared_python_source
from experiments.columns import ArmsByTask, Column, ColumnsByTable
from experiments.word_distances import list_groups, losses_by_distance, mean_losses, word_distances
from memformers.common.errors import UserError
from memformers.common.fields import Count, Range
from memformers.common.files import read_json, write_json
from memformers.comparison.experiment import Experiment
from memformers.comparison.text import MEMORIES, TextTask
from memformers.data.tokenizer import Tokenizer
from memformers.evaluation.controls import choose_streams, losses_under_controls
from memformers.evaluation.probe import common_corpus, held_out_tokens
from memformers.models.config import Lengths
from memformers.models.language_model import MemoryLM
from memformers.report.arms import Measure, Result
from memformers.runs.folder import UNTOUCHED
from memformers.runs.load import load_checkpoint
from memformers.runs.reader import Run, read_runs
from memformers.training.config import EvaluationConfig, TrainConfig

EVALUATION = EvaluationConfig(evaluations=2, final_tokens=1_000_000)
BASE = TrainConfig(model=MEMORIES, tokenizer="bpe", evaluation=EVALUATION)
N_READ = 4096
"""Tokens of each held-out document that are read to measure losses by distance."""
MEASURED = "by_distance.json"
"""In a run's folder: the losses by group of distances, in nats per token."""
DISTANCE = "by_distance"
"""The groups in this file, of which one has all tokens."""
ALL_TOKENS = "all"
CONTROLS = ("memory swapped", "slots swapped")
"""Beside reading as in training."""


def positions(mem_len: Lengths) -> dict[str, Any]:
    """The settings of a Transformer-XL."""
    return {"model": "transformer-xl", "mem_len": mem_len}


def slots(mem_len: Lengths, c_mem_len: Lengths, **settings: Any) -> dict[str, Any]:
    """The settings of a Compressive Transformer."""
    return {"model": "compressive", "mem_len": mem_len, "c_mem_len": c_mem_len, **settings}


def last_layer(mem_len: int) -> tuple[int, ...]:
    """Lengths of 64 in all layers but the last."""
    return (64, 64, 64, mem_len)


def variants_by_name(*variants: Variant) -> dict[str, Variant]:
    return {variant.name: variant for variant in variants}


UPPER = (0, 0, 128, 128)
"""Slots of each layer."""
KINDS = variants_by_name(
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


ONE_CHANGE = variants_by_name(
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
SHIFTED = variants_by_name(*map(shifted, (*LAST, KINDS["xl-256"])))
ALL = {**KINDS, **variants_by_name(*LAST), **SHIFTED, **ONE_CHANGE}


@dataclass(frozen=True)
class MemoryWorth(ArmsCommand):
    """Train each memory on a long text, with several budgets and from several seeds."""

    name: ClassVar = "memory-worth"
    title: ClassVar = "What memory saves on a long text"
    method: ClassVar = (
        "No setting of the training was chosen on this text. Losses by distance, in nats per token, are of "
        f"the first {N_READ:,} tokens of some of the held-out documents that are so long, each read from an "
        "empty memory. A word may be a name of a program. Its distance is the number of tokens from where it "
        "last began to where it begins again; all of its tokens count."
    )
    base: ClassVar = "none"
    variants: ClassVar = tuple(ALL.values())
    default_arms: ClassVar = tuple(KINDS)
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

    def plan_experiments(self, folder: Path) -> dict[str, Experiment]:
        data = self.data or prepared_python_source(folder, self.vocab_size)
        model = replace(BASE.model, vocab_size=self.vocab_size)
        base = replace(BASE, data=data, seed=self.seed, model=model)
        # A trial has few arms, and one budget in place of several.
        command = self
        if self.quick:
            few = self.arms or ("none", "xl-64", "slots-32-32", "xl-256")
            command = replace(self, arms=few, budgets=(65_536,))
        experiments = {}
        for n_tokens in command.budgets:
            train = replace(base, max_tokens=n_tokens)
            experiments[str(n_tokens)] = command.plan_experiment(TextTask(probed=False), train)
        return experiments

    def measure_runs(self, folder: Path) -> None:
        """Write the losses by group of each run, on the beginnings of the same held-out documents."""
        finished = [run for run in read_runs(folder) if run.result]
        due = [run for run in finished if not (run.folder / MEASURED).exists()]
        for run in tqdm(due, desc="losses by distance", unit="run"):
            model, tokenizer = load_checkpoint(run.folder, torch.device("cpu"))
            tokens, document_lengths = held_out_tokens(common_corpus([run]))
            measured = measure_model(model, tokenizer, tokens, document_lengths, self.documents)
            write_json(run.folder / MEASURED, measured)

    def extra_results(self, run: Run) -> dict[str, Any]:
        path = run.folder / MEASURED
        return read_json(path) if path.exists() else {}

    def columns_by_table(self, arms_by_task: ArmsByTask) -> ColumnsByTable:
        bits = Measure("bits per byte", "bits_per_byte")
        budgets = []
        for task, arms in arms_by_task.items():
            name = f"bits per byte, {int(task):,} tokens" if task.isdecimal() else task
            budgets.append(Column(name, bits, arms))
        tables = {"": budgets}

        # Losses by distance, of the largest budget: as trained, and how much higher under each control.
        largest = [*arms_by_task.values()][-1]
        groups = list_groups(largest, DISTANCE)
        tables["Loss by the tokens since the word last began"] = [
            Column(group, Measure(group, loss_of(group)), largest) for group in groups
        ]
        for control in CONTROLS:
            columns = []
            for group in groups:
                measure = Measure(group, rise_of(group, control))
                columns.append(Column(f"{group}, {control}", measure, largest))
            tables[f"Rise of the loss, {control}"] = columns
        return tables


def loss_of(group: str) -> Callable[[Result], float | None]:
    """The loss of a ``group`` as trained, from a run's result."""

    def read_loss(result: Result) -> float | None:
        losses = result.get(DISTANCE, {}).get(group, {})
        loss: float | None = losses.get(UNTOUCHED)
        return loss

    return read_loss


def rise_of(group: str, control: str) -> Callable[[Result], float | None]:
    """How much higher the loss of a ``group`` is under a ``control``, from a run's result."""

    def read_rise(result: Result) -> float | None:
        losses = result.get(DISTANCE, {}).get(group, {})
        if control not in losses:
            return None
        rise: float = losses[control] - losses[UNTOUCHED]
        return rise

    return read_rise


def measure_model(
    model: MemoryLM, tokenizer: Tokenizer, tokens: Tensor, document_lengths: Sequence[int], n_documents: int
) -> dict[str, Any]:
    """The losses by group of distances, as trained and under each control, on the beginnings of
    ``n_documents`` of the held-out ``tokens [n]``."""
    S = model.config.segment_len
    streams = choose_streams(len(tokens), N_READ - S, S, n_documents * S, document_lengths)
    if streams is None:
        raise UserError(f"expected at least two held-out documents of more than {N_READ:,} tokens.")
    # Each document is read as trained, and with a memory that is zero or another document's.
    losses = losses_under_controls(model, tokens, streams, 0, lambda _: None)

    # The first token of a document is not predicted.
    distances = []
    for begin, length in zip(streams.begins, streams.lengths, strict=True):
        document = tokens[begin : begin + 1 + length]
        distances.append(word_distances(document, tokenizer)[1:])
    groups = losses_by_distance(losses, torch.cat(distances))
    groups[ALL_TOKENS] = mean_losses(losses)
    return {"documents": len(streams.lengths), DISTANCE: groups}


if __name__ == "__main__":
    MemoryWorth.main()
