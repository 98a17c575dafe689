"""Tables that compare arms, as ``arms.csv`` lists them, and what an arm costs."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from docs.building.results import Seeds, about, kib, mean, seeds, table_of
from docs.building.tables.cells import Row, bits, more, share, titled
from memformers.common.intervals import paired
from memformers.models.config import ModelConfig
from memformers.models.facts import memory_facts
from memformers.report.keys import keys_text
from memformers.report.numbers import DASH
from memformers.report.rendering import markdown_table

COST = "keys · state · operations"
SMALL_COST = "keys · state"
"""Keys per layer beside the segment's, bytes kept for each stream, operations of attention for each token."""
KEYS = "keys per layer, without the segment's"
OPERATIONS = "attention operations per token"
MEMORY_FIELDS = ("model", "d_model", "n_layers", "segment_len", "mem_len", "c_mem_len", "compression_rate")
"""The settings on which the cost of a memory depends."""
Arm = Mapping[str, str]
"""A row of ``arms.csv``: an arm of a table, how it is shown, and what it costs, or its label in the facts of
its experiment."""


class Column(NamedTuple):
    """A measure of arms, in their own experiment if none is given; with ``minus``, the name of the base, a
    column of differences to it follows."""

    head: str
    measure: str
    minus: str = ""
    experiment: str = ""

    def heads(self) -> list[str]:
        unit = "" if "bits" in self.measure else ", points"
        return [self.head, f"vs. {self.minus}{unit}"] if self.minus else [self.head]

    def cells(self, arm: Arm, base: Arm) -> Row:
        values = self.values_of(arm)
        is_share = "bits" not in self.measure
        cells: Row = [share(mean(values)) if is_share else bits(mean(values))]
        if self.minus:
            difference = paired(values, self.values_of(base))
            cells.append(DASH if arm is base else more(difference, points=is_share))
        return cells

    def values_of(self, arm: Arm) -> Seeds:
        return seeds(self.experiment or arm["experiment"], arm["arm"], self.measure)


def arms_of(table: str) -> list[Arm]:
    return [row for row in table_of("arms") if row["table"] == table]


def comparison(
    name: str, head: str, costs: str, columns: Sequence[Column], base: str = "", paper: str = ""
) -> str:
    """The table of the arms that ``arms.csv`` has for it, in parts with a title. Differences are to ``base``,
    the first arm of a part if not given; the last column is what a ``paper`` has."""
    # The head
    heads = [head, costs]
    for column in columns:
        heads += column.heads()
    if paper:
        heads.append(paper)

    # A part for each group of rows that are compared
    body: list[Row] = []
    for title, part in groupby(arms_of(name), key=lambda arm: arm["title"]):
        arms = list(part)
        base_arm = next(arm for arm in arms if arm["arm"] == base or not base)
        if title:
            body.append(titled(title, heads))
        for arm in arms:
            row: Row = [arm["shown"], cost(arm)]
            for column in columns:
                row += column.cells(arm, base_arm)
            if arm["paper"]:
                row.append(arm["paper"])
            body.append(row)
    return markdown_table(heads, body, numbers=True)


def cost(arm: Arm) -> str:
    """What each token and each stream costs: 256 · 512 KiB · 2.56 M."""
    if not arm["label"]:
        return arm["cost"]
    facts = about(arm["experiment"])["arms"][arm["label"]]
    size = arm["cost"] or cost_of_keys(facts)
    return f"{size} · {facts[OPERATIONS] / 1e6:.2f} M"


def cost_of_keys(facts: dict[str, Any], layers: int = 4, d_model: int = 128) -> str:
    kept = facts.get("state per stream", facts[KEYS] * layers * d_model * 4)
    return f"{facts[KEYS]} · {kib(kept)}"


def cost_of_settings(experiment: str, label: str) -> str:
    """What an arm costs whose settings are stored with the results: 252, at most 256 · 128 KiB · 0.44 M."""
    facts = facts_of_settings(experiment, label)
    operations = facts["attention_operations"] / 1e6
    return f"{keys_text(facts)} · {kib(facts['state_bytes'])} · {operations:.2f} M"


def facts_of_settings(experiment: str, label: str) -> dict[str, Any]:
    settings = about(experiment)["settings"]
    stored = {**settings["all"], **settings[label]}
    fields = {}
    for name in MEMORY_FIELDS:
        if f"model.{name}" in stored:
            fields[name] = stored[f"model.{name}"]
    return memory_facts(ModelConfig(**fields))


PER_CHARACTER = "bits per character"
PER_BYTE = "bits per byte, 6,400,000 tokens"
MAZES = ("t-maze-24", "t-maze-60", "t-maze-80")
OF_ABLATION = (
    ("correct beyond", "answers about values set 192 to 384 tokens ago"),
    ("correct within", "answers about values set 0 to 192 tokens ago"),
    (PER_CHARACTER, PER_CHARACTER),
)
BASES = ("the default", "", "the default")
PER_GROUP = "first row of the group"
OF_MEMORIES = (
    ("recall, set 192 to 383 tokens ago", "recall, set 192 to 384 tokens ago"),
    ("Tiny Shakespeare, bits per character", "bits per character, tiny-shakespeare"),
    ("Python, bits per byte", "bits per byte, python-source"),
)
COMPARISONS: dict[str, Sequence[Any]] = {
    "mqar": ("memory", COST, [Column("correct", "correct", "Transformer-XL")]),
    "mqar_memories": ("memory", COST, [Column("correct", "correct", "Transformer-XL")]),
    "recall_shift": ("memory", SMALL_COST, [
        Column("set 0 to 255 tokens ago", "correct, 0 – 256", PER_GROUP),
        Column("set 512 to 2,047 tokens ago", "correct, 512 – 2048", PER_GROUP)]),
    "compression": ("compression, and what trains it", SMALL_COST,
                    [Column(*named, base) for named, base in zip(OF_ABLATION, BASES, strict=True)],
                    "", "paper: enwik8"),
    "gates": ("default compression", SMALL_COST, [Column(*named, "no gates") for named in OF_ABLATION]),
    "long_text": ("memory", COST, [Column("bits per byte", PER_BYTE, PER_GROUP)]),
    "long_text_removed": ("memory", COST, [Column("bits per byte", PER_BYTE, PER_GROUP)]),
    "subwords": ("memory", SMALL_COST, [Column("bits per byte", "bits per byte", PER_GROUP)]),
    "text_variants": ("memory", SMALL_COST, [Column("bits per byte", PER_BYTE, "256 positions")]),
    "longer_training": ("memory", SMALL_COST, [Column("bits per byte", "bits per byte, 24,000,000 tokens")]),
    "growth": ("setting", SMALL_COST, [Column(PER_CHARACTER, PER_CHARACTER, PER_GROUP)]),
    "agents": ("memory", SMALL_COST, [
        *(Column(f"{maze.removeprefix('t-maze-')} steps", maze) for maze in MAZES[:2]),
        Column("80 steps", MAZES[2], "Transformer-XL"),
        Column("MiniGrid-MemoryS7", "MiniGrid-MemoryS7-v0", experiment="agents_minigrid")], "transformer-xl"),
    "memories": ("memory", COST,
                 [Column(*named, "Transformer-XL") for named in OF_MEMORIES], "transformer-xl"),
    "equal_bytes": ("memory", COST, [
        Column("Tiny Shakespeare, bits per character", PER_CHARACTER, "Transformer-XL"),
        Column("Python, bits per character", PER_CHARACTER, "Transformer-XL", "equal_bytes_python")],
        "transformer-xl"),
    "equal_bytes_recall": ("memory", COST, [
        Column("set 0 to 191 tokens ago", "set 0 to 192 tokens ago", "Transformer-XL"),
        Column("set 192 to 383 tokens ago", "set 192 to 384 tokens ago", "Transformer-XL")],
        "transformer-xl"),
}  # fmt: skip
"""What [`comparison`][] takes for its tables: their heads, costs and columns."""
