"""The tables of pages: each page asks for one by its name."""

import re
from collections.abc import Callable
from functools import partial

from docs.building.results import ROOT, experiments
from docs.building.tables.attention import flash_steps, large_text, position_features
from docs.building.tables.cells import Row
from docs.building.tables.comparisons import COMPARISONS, comparison
from docs.building.tables.learning import learning_distances, learning_memory, learning_worth
from docs.building.tables.memories import memory_costs, memory_ideas, memory_models, memory_results
from docs.building.tables.recall import both_losses, reach, slot_settings, slots
from docs.building.tables.texts import far_memory, recipes, text_distances, tiny_shakespeare
from memformers.report.data import Cell
from memformers.report.rendering import markdown_table


def of_file(path: str, table: str) -> str:
    """A table of a Markdown file: the one with this number, or the first with this word in its head."""
    tables = re.findall(r"(?:^\|.*\n?)+", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    if table.isdigit():
        return str(tables[int(table) - 1]).strip()
    for lines in tables:
        head, _, _ = lines.partition("\n")
        if table in head:
            return str(lines).strip()
    raise ValueError(f"{path} has no table with {table!r} in its head.")


def data() -> str:
    """All experiments: what was trained, how often, on how much, when, and where its numbers are."""
    body: list[Row] = []
    for name, row in experiments().items():
        numbers = Cell(name, link=f"data/{name}/results.csv")
        body.append([*(row[x] for x in ("what", "seeds", "tokens", "date", "machine")), numbers])
    return markdown_table(
        ["experiment", "seeds", "tokens of each run", "trained", "machine", "numbers"], body
    )


def commands() -> str:
    lines = (f"# {row['what']}\n{row['command']}" for row in experiments().values() if row["command"])
    return "```sh\n" + "\n".join(lines) + "\n```"


TABLES: dict[str, Callable[..., str]] = {
    made.__name__: made
    for made in (reach, slots, slot_settings, both_losses, far_memory, text_distances, tiny_shakespeare,
                 recipes, position_features, flash_steps, large_text, data, commands, memory_ideas,
                 memory_costs, memory_results, memory_models, learning_worth, learning_memory,
                 learning_distances)
}  # fmt: skip
TABLES["file"] = of_file
for name, arguments in COMPARISONS.items():
    TABLES[name] = partial(comparison, name, *arguments)
