"""Tables of models that learn while they read."""

from collections.abc import Callable, Sequence
from itertools import product

from docs.building.results import experiments, mean, rows, seeds
from docs.building.tables.cells import Row, bits, more, titled
from memformers.common.intervals import paired
from memformers.report.rendering import markdown_table

LEARNED_TEXTS = {
    "learning_worth": "Tiny Shakespeare",
    "learning_worth_python": "Python's standard library",
}
"""The experiments with these texts, which are shown once they have results."""
LEARNED_ARMS = {
    "none": "no memory",
    "xl": "Transformer-XL",
    "compressive": "Compressive Transformer",
    "selective": "selective",
}
READINGS = ("static", "learning")


def learned_texts() -> list[tuple[str, str]]:
    """The experiments that have results, with their texts."""
    known = experiments()
    return [(name, text) for name, text in LEARNED_TEXTS.items() if name in known]


def learning_worth() -> str:
    """Losses as trained and with learning, and what is forgotten."""
    head = ["memory", "static", "with learning", "learning saves", "training text, afterwards"]
    return learned_table(head, learning_cells)


def learning_memory() -> str:
    """What memory saves as trained, and with learning."""
    return learned_table(["memory", "saves, static", "saves, with learning"], memory_cells, but="none")


def learned_table(head: Sequence[str], cells: Callable[[str, str], Row], but: str = "") -> str:
    """A row for each arm of each text, ``but`` one."""
    body: list[Row] = []
    for name, text in learned_texts():
        body.append(titled(text, head))
        for arm, shown in LEARNED_ARMS.items():
            if arm != but and seeds(name, arm, "static (nats)"):
                body.append([shown, *cells(name, arm)])
    return markdown_table(head, body, numbers=True)


def learning_cells(experiment: str, arm: str) -> Row:
    cells: Row = []
    for reading in READINGS:
        cells.append(bits(mean(seeds(experiment, arm, f"{reading} (nats)"))))
    cells.append(more(mean(seeds(experiment, arm, "learning saves (nats)"))))
    # What is forgotten of the text of the training
    static = seeds(experiment, arm, "training text, static (nats)")
    learned = seeds(experiment, arm, "training text, after learning (nats)")
    cells.append(more(paired(learned, static)))
    return cells


def memory_cells(experiment: str, arm: str) -> Row:
    """What a memory saves against none, in both readings."""
    cells: Row = []
    for reading in READINGS:
        measure = f"{reading} (nats)"
        cells.append(more(paired(seeds(experiment, "none", measure), seeds(experiment, arm, measure))))
    return cells


def learning_distances() -> str:
    """What learning and memory save, by the characters since a word last began."""
    head = ["characters since the word last began", "learning saves: no memory", "Transformer-XL",
            "Transformer-XL saves: static", "with learning"]  # fmt: skip
    body: list[Row] = []
    for name, text in learned_texts():
        body.append(titled(text, head))
        for group in learned_groups(name):
            losses = {}
            for arm, reading in product(("none", "xl"), READINGS):
                losses[arm, reading] = seeds(name, arm, f"{group}, {reading}")
            row: Row = [GROUP_NAMES.get(group, group)]
            for arm in ("none", "xl"):
                row.append(more(paired(losses[arm, "static"], losses[arm, "learning"])))
            for reading in READINGS:
                row.append(more(paired(losses["none", reading], losses["xl", reading])))
            body.append(row)
    return markdown_table(head, body, numbers=True)


def learned_groups(experiment: str) -> list[str]:
    """The distances by which losses were measured."""
    groups: dict[str, None] = {}
    for row in rows(experiment):
        if row["arm"] == "none" and row["measure"].endswith(", static"):
            groups[row["measure"].removesuffix(", static")] = None
    return list(groups)


GROUP_NAMES = {"first": "a word that had not occurred", "no word": "no word"}
