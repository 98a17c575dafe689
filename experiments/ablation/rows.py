"""The rows of the ablation, in the order of the paper's table; each is an arm of both tasks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memformers.comparison.arms import keys_of_layers
from memformers.comparison.recall import compressive, paper_ablation, transformer_xl
from memformers.models.config import ModelConfig
from memformers.runs.plan import Arm


@dataclass(frozen=True)
class Row:
    """One memory of the ablation."""

    name: str
    """The name on the command line and of its arms."""
    label: str
    """The name in tables and figures."""
    paper: float | None = None
    """Bits per character on enwik8 (Rae et al. 2020, arXiv 1911.05507), if the paper has this row."""


BASE_ROW = Row("conv", "conv., attention", 0.973)
"""The row that the others are compared with: the paper's own choice."""
ROWS = (
    Row("transformer-xl", "Transformer-XL, equal keys"),
    Row("bptt", "conv., BPTT", 0.996),
    Row("max", "max pooling", 0.986),
    Row("auto-encoding", "conv., auto-encoding", 0.984),
    Row("mean", "mean pooling", 0.982),
    Row("most-used", "most-used", 0.980),
    Row("dilated", "dilated conv., attention", 0.977),
    BASE_ROW,
    Row("conv-from-mean", "conv., from the mean"),
    Row("upper-half", "conv., upper layers only"),
)


def arms_of_rows(names: Sequence[str], model: ModelConfig) -> tuple[Arm, ...]:
    """The arms of the rows of these names, in the order of the table; of all rows if none is named. All have
    the lengths of ``model``, with two exceptions: Transformer-XL has as many keys in its memory alone, and
    the row with slots only in the upper half of the layers has half as many slots."""
    arms = [
        *paper_ablation(model),
        transformer_xl("transformer-xl", keys_of_layers(model)),
        compressive("mean", model, compression="mean"),
        compressive("conv-from-mean", model, compression_start="mean"),
    ]
    by_name = {arm.name: arm for arm in arms}
    return tuple(
        replace(by_name[row.name], label=row.label) for row in ROWS if not names or row.name in names
    )
