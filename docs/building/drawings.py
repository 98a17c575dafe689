"""The drawings of the method: made by the functions that they explain, at build time, with labels in the
languages of the site's pages."""

import csv
import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from torch import Tensor, nn

from memformers.kernels.naive import relative_shift
from memformers.models.config import ModelConfig
from memformers.models.memory import LayerMemory
from memformers.models.rules.base import MemoryRule, UpdateContext
from memformers.models.rules.compressive import CompressiveRule
from memformers.models.rules.transformer_xl import TransformerXLRule
from memformers.models.sizes import MemorySizes

COLOURS = {"segment": "#56B4E9", "memory": "#F0A35E", "compressed memory": "#5CC5A5", "forgotten": "#EEEEEE"}
INK = "#222222"
FAINT = "#9A9A9A"
SEGMENT = 4
SEGMENTS = 6
"""Length and number of the segments that memory rolls over."""
LABEL = re.compile(r"(?<=>)[^<>]+(?=</text>)")
TRANSLATIONS = Path(__file__).with_name("translations.csv")
"""Patterns of English labels, longer ones first, and what replaces them in each of the other languages."""

Cell = tuple[int, int, str]
"""The first and the last of consecutive positions, and where they are: a name in [`COLOURS`][]."""


class FirstAndLast(nn.Module):
    """An f_c whose slots know what they stand for: of ``mem [n·c, B, 2]``, each position's first and last."""

    def __init__(self, compression_rate: int):
        super().__init__()
        self.compression_rate = compression_rate

    def forward(self, mem: Tensor) -> Tensor:
        c = self.compression_rate
        return torch.stack((mem[::c, :, 0], mem[c - 1 :: c, :, 1]), dim=-1)


def exactly(mem_len: int) -> MemoryRule:
    return TransformerXLRule(MemorySizes(mem_len))


def compressed(mem_len: int, slots: int, rate: int) -> MemoryRule:
    return CompressiveRule(mem_len, slots, FirstAndLast(rate), loss="none")


def rolled(rule: MemoryRule, segments: int = SEGMENTS) -> list[list[Cell]]:
    """Where all positions so far are while each segment is read, oldest first. The inputs of a segment, ``[S,
    1, 2]``, are their own first and last position."""
    memory = LayerMemory.nothing(torch.zeros(0, 1, 2))
    rows = []
    for start in range(0, segments * SEGMENT, SEGMENT):
        remembered: list[Cell] = []
        for part, vectors in (("compressed memory", memory.slots), ("memory", memory.mem)):
            for first, last in vectors[:, 0].int().tolist():
                remembered.append((first, last, part))
        oldest = remembered[0][0] if remembered else start
        end = start + SEGMENT
        rows.append([*single(0, oldest, "forgotten"), *remembered, *single(start, end, "segment")])
        positions = torch.arange(start, end, dtype=torch.float32)
        inputs = positions[:, None, None].expand(-1, 1, 2)
        nobody: Any = None  # no layer: nothing is learned here
        memory, _ = rule.update(memory, inputs, UpdateContext(nobody, inputs, None))
    return rows


def single(start: int, end: int, part: str) -> list[Cell]:
    """Cells of one position each."""
    return [(position, position, part) for position in range(start, end)]


def rolling(rule: MemoryRule, title: str) -> Figure:
    """Where each position of a text is after each segment."""
    figure = Figure(figsize=(8.0, 3.7), layout="constrained")
    axes = figure.add_subplot()
    used = set()
    # A row for each segment: the boxes of all positions, 0.1 apart
    for number, row in enumerate(rolled(rule)):
        y = -1.3 * number
        for first, last, part in row:
            used.add(part)
            shape: Any = {"boxstyle": "round,pad=0,rounding_size=0.15", "facecolor": COLOURS[part]}
            axes.add_patch(
                FancyBboxPatch((first + 0.05, y), last - first + 0.9, 1, edgecolor="none", **shape)
            )
        axes.text(-0.5, y + 0.5, f"segment {number + 1}", ha="right", va="center", color=INK)
    for position in range(0, SEGMENTS * SEGMENT, SEGMENT):
        axes.text(position + 0.5, 1.2, str(position), ha="center", va="bottom", color=FAINT, fontsize=8)
    axes.text(-0.5, 1.2, "position", ha="right", va="bottom", color=FAINT, fontsize=8)
    # The legend, in the order of the colours
    patches = []
    for part, colour in COLOURS.items():
        if part in used:
            patches.append(Patch(facecolor=colour, edgecolor="white", label=part))
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set(xlim=(-4, SEGMENTS * SEGMENT), ylim=(-1.3 * SEGMENTS + 1.1, 1.9))
    axes.axis("off")
    return figure


def shift() -> Figure:
    """The relative shift of 4 queries over 7 keys, as the function does it."""
    S = 4
    K = 7
    of_query = torch.arange(S)[:, None].expand(S, K)
    distance = torch.arange(K - 1, -1, -1).expand(S, K)
    figure = Figure(figsize=(9.0, 2.9), layout="constrained")
    unshifted, padded, shifted = figure.subplots(1, 3, width_ratios=(K, K + 1, K))
    # Products as they are computed, in columns of distances
    matrix(unshifted, of_query, distance, [f"d={d}" for d in range(K - 1, -1, -1)], "products by distance")
    # A column of zeros before them: read on from the line, each row begins one later
    queries = torch.cat((torch.full((S, 1), -1), of_query), dim=1)
    distances = torch.cat((torch.zeros(S, 1, dtype=torch.int64), distance), dim=1)
    matrix(padded, queries, distances, [""] * (K + 1), "padded; read on from the line")
    padded.plot([S, S, S], [1, 1, 0], color=INK, linewidth=2)
    # The same products in columns of keys; keys after the query are masked
    shifted_queries, shifted_distances = relative_shift(torch.stack((of_query, distance)).float()).int()
    matrix(shifted, shifted_queries, shifted_distances, [f"j={j}" for j in range(K)], "products by key")
    for i in range(S):
        for j in range(K - S + i + 1, K):
            box = Rectangle((j, i), 1, 1, facecolor="white", alpha=0.75, hatch="////", edgecolor=FAINT)
            shifted.add_patch(box)
    return figure


def matrix(axes: Axes, queries: Tensor, distances: Tensor, columns: list[str], title: str) -> None:
    """Numbers of distances, in the colours of the queries that they belong to; −1 is padding."""
    for i, row in enumerate(queries.tolist()):
        for j, query in enumerate(row):
            colour = "#F4F4F4" if query < 0 else ("#BFE0F5", "#F9D9B8", "#BFE8DB", "#E8CDE0")[query]
            axes.add_patch(Rectangle((j, i), 1, 1, facecolor=colour, edgecolor="white", linewidth=2))
            text = "0" if query < 0 else str(int(distances[i, j]))
            axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", color=INK if query >= 0 else FAINT)
    for j, label in enumerate(columns):
        axes.text(j + 0.5, -0.15, label, ha="center", va="bottom", fontsize=7.5, color=FAINT)
    for i in range(len(queries)):
        axes.text(-0.15, i + 0.5, f"i={i}", ha="right", va="center", fontsize=7.5, color=FAINT)
    axes.set(xlim=(-0.8, len(columns)), ylim=(len(queries) + 0.1, -0.6), aspect="equal")
    axes.set_title(title, fontsize=10)
    axes.axis("off")


def reach() -> Figure:
    """Which inputs the last output can know of, layer by layer."""
    figure = Figure(figsize=(8.0, 5.4), layout="constrained")
    compressive = ModelConfig(
        model="compressive", n_layers=3, segment_len=4, mem_len=4, c_mem_len=2, compression_rate=2
    )
    upper, lower = figure.subplots(2, 1)
    draw_reach(upper, replace(compressive, model="transformer-xl"), "Transformer-XL, S = M = 4", length=28)
    draw_reach(lower, compressive, "Compressive Transformer, also C = 2, c = 2", length=28)
    return figure


def draw_reach(axes: Axes, config: ModelConfig, title: str, length: int) -> None:
    """Dots for the inputs of each layer and for the output; lines where the reached ones look."""
    levels = reached(config, length)
    # A row of dots for each level, with lines to what it looks at below
    for level, seen in enumerate(levels):
        for i in seen if level else ():
            for j in range(max(farthest(i, config), 0), i + 1):
                axes.plot([j, i], [level - 1, level], color="#F0A35E", linewidth=0.5, alpha=0.6, zorder=1)
        colours = ["#D55E00" if i in seen else "#D5D5D5" for i in range(length)]
        axes.scatter(range(length), [level] * length, s=22, c=colours, zorder=2)
        name = "tokens" if level == 0 else f"layer {level}"
        axes.text(-1, level, name, ha="right", va="center", color=INK, fontsize=9)
    # Borders of segments
    for edge in range(0, length, config.segment_len):
        axes.axvline(edge - 0.5, color="#CCCCCC", linewidth=0.7, linestyle=":", zorder=0)
    axes.set_title(f"{title}: the last output sees {len(levels[0])} tokens", loc="left", fontsize=10)
    axes.set(xlim=(-4, length), ylim=(-0.4, len(levels) - 0.6))
    axes.axis("off")


def reached(config: ModelConfig, length: int) -> list[set[int]]:
    """For the tokens and then each layer, the positions that the last output of a text depends on."""
    levels = [{length - 1}]
    for _ in range(config.n_layers):
        below: set[int] = set()
        for i in levels[0]:
            below.update(range(max(farthest(i, config), 0), i + 1))
        levels.insert(0, below)
    return levels


def farthest(i: int, config: ModelConfig) -> int:
    """The first position that a layer shows to the query at ``i``: the oldest it remembers."""
    return i - i % config.segment_len - config.remembered_positions


DRAWINGS: dict[str, Callable[[], Figure]] = {
    "memory": lambda: rolling(exactly(6), "Transformer-XL, S = 4, M = 6"),
    "compression": lambda: rolling(
        compressed(4, 4, 2), "Compressive Transformer, S = 4, M = 4, C = 4 slots of c = 2"
    ),
    "shift": shift,
    "reach": reach,
}


def svg(figure: Figure, language: str = "en") -> str:
    """A figure as SVG, the same each time, with its labels in ``language``."""
    # Letters are drawn as paths. Other languages are text, because the font here lacks their letters.
    style: Any = {"svg.hashsalt": "memformers", "svg.fonttype": "path", "hatch.linewidth": 0.5}
    file = io.StringIO()
    with matplotlib.rc_context(style if language == "en" else style | {"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    if language == "en":
        return file.getvalue()

    rows = list(csv.DictReader(TRANSLATIONS.read_text(encoding="utf-8").splitlines()))

    def in_language(label: re.Match[str]) -> str:
        text = label[0]
        for row in rows:
            text = re.sub(row["en"], row[language], text)
        return text

    return LABEL.sub(in_language, file.getvalue().replace("<svg ", f'<svg xml:lang="{language}" ', 1))
