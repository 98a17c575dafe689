"""The rows of the ablation, in the order of the paper's table, and the arm of each on both tasks."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memformers.models.config import ModelConfig
from memformers.models.lengths import by_layer
from memformers.training.arms import keys_of_layers


@dataclass(frozen=True)
class Row:
    """One memory of the ablation."""

    name: str
    """The name on the command line and of the folders of the text's runs."""
    label: str
    """The name in tables and figures."""
    recall: str
    """The name of its arm in the recall experiment."""
    paper: float | None = None
    """Bits per character on enwik8 (Rae et al. 2020, arXiv 1911.05507), if the paper has this row."""


BASE_ROW = Row("conv", "conv., attention", "conv", 0.973)
"""The row that the others are compared with: the paper's own choice."""
ROWS = (
    Row("transformer-xl", "Transformer-XL, equal keys", "transformer-xl"),
    Row("bptt", "conv., BPTT", "bptt", 0.996),
    Row("max", "max pooling", "max", 0.986),
    Row("auto-encoding", "conv., auto-encoding", "auto-encoding", 0.984),
    Row("mean", "mean pooling", "mean", 0.982),
    Row("most-used", "most-used", "most-used", 0.980),
    Row("dilated", "dilated conv., attention", "dilated", 0.977),
    BASE_ROW,
    Row("conv-from-mean", "conv., from the mean", "compressive"),
    Row("upper-half", "conv., upper layers only", "upper-half"),
)


def chosen_rows(names: Sequence[str]) -> tuple[Row, ...]:
    """The rows of these names, in the order of the table; all of them if none is named."""
    return tuple(row for row in ROWS if not names or row.name in names)


def text_settings(model: ModelConfig) -> dict[str, dict[str, Any]]:
    """The settings in which the network of each row differs from ``model``. All rows have the lengths of
    ``model``, with two exceptions: Transformer-XL has as many keys in its memory alone, and the row with
    slots only in the upper half of the layers has half as many slots."""
    lower, slots = model.n_layers // 2, by_layer(model.c_mem_len, model.n_layers, "c_mem_len")
    different: dict[str, dict[str, Any]] = {
        "transformer-xl": {"model": "transformer-xl", "mem_len": keys_of_layers(model)},
        "bptt": {"compression_loss": "none", "bptt": 1},
        "max": {"compression": "max"},
        "auto-encoding": {"compression_loss": "auto-encoding"},
        "mean": {"compression": "mean"},
        "most-used": {"compression": "most-used"},
        "dilated": {"compression": "dilated"},
        BASE_ROW.name: {},
        "conv-from-mean": {"compression_start": "mean"},
        "upper-half": {"c_mem_len": (0,) * lower + slots[lower:]},
    }
    return {name: {"model": "compressive"} | settings for name, settings in different.items()}


def text_arms(rows: Sequence[Row], model: ModelConfig) -> tuple[str, ...]:
    """The rows as arms of a comparison, ``NAME: setting=value …``."""
    settings = text_settings(model)
    return tuple(
        f"{row.name}: "
        + " ".join(f"{key}={shlex.quote(json.dumps(v))}" for key, v in settings[row.name].items())
        for row in rows
    )
