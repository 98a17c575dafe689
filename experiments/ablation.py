"""The Compressive Transformer's ablation (Rae et al. 2020), on a text and on a stream with known answers:
compression functions, and what they learn from.

Run it with ``make ablation`` or ``python -m experiments.ablation``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from experiments.arms import QUICK_TOKENS, ArmsCommand, Variant
from experiments.columns import correct
from memformers.common.fields import Count, replace_nested
from memformers.comparison.arms import keys_of_layers
from memformers.comparison.experiment import Experiment
from memformers.comparison.recall.setup import SETTINGS, RecallConfig
from memformers.comparison.recall.task import RECALL, layer_reach
from memformers.comparison.text import MEMORIES, TextTask
from memformers.models.config import ModelConfig
from memformers.report.arms import BITS, Measure
from memformers.report.recall import right_between
from memformers.training.config import TrainConfig

# Memories have their full lengths at once, so that there are slots from the first steps.
TEXT = TrainConfig(model=MEMORIES, max_tokens=500_000, memory_warmup=0.0)
RECALL_TOKENS = 1_000_000
ROWS = {
    "transformer-xl": ("Transformer-XL, equal keys", None),
    "bptt": ("conv., BPTT", 0.996),
    "max": ("max pooling", 0.986),
    "mean": ("mean pooling", 0.982),
    "dilated": ("dilated conv., attention", 0.977),
    "conv": ("conv., attention", 0.973),
    "conv-from-mean": ("conv., from the mean", None),
    "upper-half": ("conv., upper layers only", None),
    "gated": ("conv., attention, gated", None),
}
"""The arms in the paper's order: the label, and the paper's bits per character on enwik8, if it has it."""
PAPER = ", ".join(f"{label} {bits:.3f}" for label, bits in ROWS.values() if bits)


def list_compressions(model: ModelConfig) -> list[Variant]:
    """With the lengths of ``model``; Transformer-XL has equal keys, slots in half the layers are half."""
    n_lower = model.n_layers // 2
    no_slots = [0] * n_lower
    upper = (*no_slots, *model.per_layer("c_mem_len")[n_lower:])
    settings: dict[str, dict[str, Any]] = {
        "transformer-xl": {"model": "transformer-xl", "mem_len": keys_of_layers(model)},
        "bptt": {"compression_loss": "none", "bptt": 1},
        "max": {"compression": "max"},
        "mean": {"compression": "mean"},
        "dilated": {"compression": "dilated"},
        "conv": {},
        "conv-from-mean": {"compression_start": "mean"},
        "upper-half": {"c_mem_len": upper},
        "gated": {"gate": "gru"},
    }
    return [Variant(name, settings[name], label) for name, (label, _) in ROWS.items()]


@dataclass(frozen=True)
class Ablation(ArmsCommand):
    """Train each way to compress, and each way to learn to compress, on a text and on the recall stream."""

    name: ClassVar = "ablation"
    title: ClassVar = "The ablation: compression functions and what they learn from"
    method: ClassVar = (
        "Chance on the recall stream is 25 %. The paper's results are bits per character of large networks "
        f"on enwik8, without intervals: {PAPER} (Rae et al. 2020, arXiv 1911.05507). Ours are of small "
        "networks, trained for minutes. In our BPTT, the gradient reaches back through one compression; "
        "the paper may do it in another way. With slots in the upper layers only, there are half the slots; "
        "all other arms have the same number of keys."
    )
    base: ClassVar = "conv"
    seeds: Count = 2
    only: Literal["text", "recall"] | None = None
    """One of the two tasks; both if not given."""
    text_tokens: Count | None = None
    """Tokens of each training run on the text; half a million if not given."""
    recall_tokens: Count | None = None
    """Tokens of each training run on the recall stream; a million if not given."""
    data: str = ""
    """The text, as for training: Tiny Shakespeare if not given."""

    @classmethod
    def list_variants(cls) -> Sequence[Variant]:
        return list_compressions(TEXT.model)

    def plan_experiments(self, folder: Path) -> dict[str, Experiment]:
        """On the text, one training run at a time has all threads."""
        quick_tokens = QUICK_TOKENS if self.quick else None
        text_tokens = self.text_tokens or quick_tokens or TEXT.max_tokens
        text = replace_nested(TEXT, data=self.data, max_tokens=text_tokens)
        if self.quick:
            text = replace_nested(text, evaluations=1)
        on_text = self.plan_experiment(TextTask(probed=False), text, list_compressions(text.model))
        on_text = replace(on_text, jobs=1, threads=None)

        recall_tokens = self.recall_tokens or quick_tokens or RECALL_TOKENS
        recall = RecallConfig(quick=self.quick, tokens=recall_tokens).setup.base
        on_recall = self.plan_experiment(RECALL, recall, list_compressions(recall.model))

        experiments = {"text": on_text, "recall": on_recall}
        return {self.only: experiments[self.only]} if self.only else experiments

    def measures_of(self, task: str) -> Sequence[Measure]:
        """Answers beyond and within the distances that one layer of Transformer-XL with equal keys sees."""
        if task == "text":
            return [BITS]
        setup = SETTINGS["near"]
        xl_reach = layer_reach(setup.run("transformer-xl").model)
        slots_reach = layer_reach(setup.run("conv").model)
        measures = []
        for low, high in ((xl_reach, slots_reach), (0, xl_reach)):
            label = f"answers about values set {low} to {high} tokens ago"
            measures.append(correct(label, right_between(low, high)))
        return measures


if __name__ == "__main__":
    Ablation.main()
