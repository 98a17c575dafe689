"""The tables of results: a function for each, which a page asks for by its name, and what they share."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, product
from typing import Any, NamedTuple

from docs.building.results import ROOT, Seeds, about, experiments, kib, mean, rows, seeds, stored, table_of
from experiments.memories import ALL_MEMORIES, ListedMemory
from memformers.common.intervals import Mean, paired
from memformers.models.config import ModelConfig
from memformers.models.facts import memory_facts
from memformers.report.data import Cell
from memformers.report.keys import keys_text
from memformers.report.numbers import DASH, number
from memformers.report.rendering import markdown_table

COST = "keys · state · operations"
SMALL_COST = "keys · state"
"""Keys per layer beside the segment's, bytes kept for each stream, operations of attention for each token."""
KEYS = "keys per layer, without the segment's"
OPERATIONS = "attention operations per token"
MODELS = ("transformer-xl", "compressive")
MEMORY_FIELDS = ("model", "d_model", "n_layers", "segment_len", "mem_len", "c_mem_len", "compression_rate")
"""The settings on which the cost of a memory depends."""
POSITION_ARMS = {
    "all": "P = D, wavelengths up to 10,000 · 2π",
    "p16": "16, the same wavelengths",
    "p16-1k": "16, up to 1,000 · 2π",
    "p8-1k": "8, up to 1,000 · 2π",
    "p8-fit": "8, up to four times the longest distance",
}
"""The arms of ``position_features``, as a table shows them."""
POSITIONS = ("position_features", "position_features_subwords", "position_features_recall")
"""The experiments with these arms."""
Arm = Mapping[str, str]
"""A row of ``arms.csv``: an arm of a table, how it is shown, and what it costs, or its label in the facts of
its experiment."""


Row = list[str | Cell]
"""Of a table in Markdown."""


def share(value: Mean | None) -> str:
    return number(value, ".1f", " %", scale=100)


def bits(value: Mean | None) -> str:
    return number(value, ".3f")


def more(value: Mean | None, *, points: bool = False) -> str | Cell:
    """A difference, in bits or nats or in points; bold if its interval leaves out zero."""
    text = number(value, ".1f" if points else ".3f", scale=100 if points else 1, signed=True)
    return Cell(text, is_strong=True) if value and value.leaves_out_zero else text


class Column(NamedTuple):
    """A measure of arms, of their own experiment if none is given; with ``minus``, the name of the base, a
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


def titled(title: str, heads: Sequence[str]) -> Row:
    return [Cell(title, is_strong=True), *[""] * (len(heads) - 1)]


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


# Recall

REACHES = (
    ("2 layers, 128 keys", "recall_two_layers",
     ((0, 192), (192, 256), (256, 320), (320, 384), (192, 384), (448, 1024))),
    ("3 layers, 128 keys", "recall_three_layers", ((0, 192), (192, 384), (384, 448), (448, 1024))),
    ("2 layers, 256 keys", "recall_far", ((0, 256), (256, 512), (512, 2048))),
)  # fmt: skip
"""Networks, where their results are, and bands of distances."""
REACH_HEADS = ("", "Transformer-XL", "Compressive", "vs. Transformer-XL, points")


def reach() -> str:
    body: list[Row] = []
    for title, experiment, bands in REACHES:
        body.append(titled(title, REACH_HEADS))
        costs = [cost_of_settings(experiment, label) for label in about(experiment)["arms"]]
        body.append([COST, *costs, ""])
        for low, high in bands:
            measure = f"correct, {low} – {high}"
            xl = seeds(experiment, "transformer-xl", measure)
            compressive = seeds(experiment, "compressive", measure)
            name = f"set {low:,} to {high - 1:,} tokens ago"
            gain = more(paired(compressive, xl), points=True)
            body.append([name, share(mean(xl)), share(mean(compressive)), gain])
    return markdown_table(REACH_HEADS, body, numbers=True)


STREAMS = (("16, 4, 1/16", 1.5), ("8, 2, 1/8", 2.0), ("16, 4, 1/8", 3.0), ("24, 5, 1/8", 3.5),
           ("32, 8, 1/8", 4.0), ("16, 4, 1/4", 6.0))  # fmt: skip
"""Keys, values and the share of tokens that set one; and the bits that a slot must hold."""


def in_slots(arm: str, stream: int, *, longer: bool = False) -> Seeds:
    """Correct answers beyond chance about values set 192 to 383 tokens ago, on a stream of the grid, after
    3 or, if ``longer``, 12 million tokens."""
    experiments = ("recall_grid_longer", "recall_grid_longer_both_losses") if longer else ("recall_grid",)
    for experiment in experiments:
        if values := seeds(experiment, f"{arm}-{stream}", "set 192 to 384 tokens ago"):
            return values
    return {}


def slots() -> str:
    body: list[Row] = []
    for index, (stream, size) in enumerate(STREAMS):
        xl = in_slots("transformer-xl", index)
        compressive = in_slots("compressive", index)
        gain = more(paired(compressive, xl), points=True)
        row: Row = [f"{size:g}", stream, share(mean(xl)), share(mean(compressive)), gain]
        for arm in (*MODELS, "both-losses"):
            row.append(share(mean(in_slots(arm, index, longer=True))))
        body.append(row)
    head = ["bits in a slot", "keys, values, share of tokens that set a key", "Transformer-XL", "Compressive",
            "vs. Transformer-XL, points", "4 × the training: Transformer-XL", "Compressive",
            "Compressive, both losses"]  # fmt: skip
    return markdown_table(head, body, numbers=True)


def slot_settings() -> str:
    """One setting changed at a time, for slots and for Transformer-XL."""
    of_xl = {row["variant"]: row for row in rows("slots_transformer_xl")}
    body: list[Row] = []
    for row in rows("slots"):
        xl = of_xl.get(row["variant"], {})
        shares = [row.get(f"correct {part}") for part in ("in memory", "in slots", "beyond")]
        shares += [xl.get("correct in memory"), xl.get("correct beyond")]
        body.append([row["variant"], *(f"{percent} %" if percent else DASH for percent in shares)])
    head = ["setting that differs", "Compressive: in positions", "in slots", "beyond",
            "Transformer-XL: in positions", "beyond"]  # fmt: skip
    return markdown_table(head, body, numbers=True)


def both_losses() -> str:
    body: list[Row] = []
    for title, experiment, base, band in (
        ("slots of 4 positions", "recall_both_losses", "recall_both_losses", "192 – 384"),
        ("slots of 9 positions", "recall_far_both_losses", "recall_far", "512 – 2048"),
    ):
        values = seeds(experiment, "task", f"correct, {band}")
        base_values = seeds(base, "compressive", f"correct, {band}")
        gain = more(paired(values, base_values), points=True)
        shares = [share(mean(base_values)), share(mean(values)), gain]
        body.append([title, f"{band} tokens ago", *shares, str(len(values))])
    head = ["Compressive with", "set", "attention reconstruction", "both losses", "gain, points", "seeds"]
    return markdown_table(head, body, numbers=True)


# Texts

PER_CHARACTER = "bits per character"
PER_BYTE = "bits per byte, 6,400,000 tokens"
DISTANCES = ("1 – 63", "64 – 127", "128 – 255", "256 – 511", "512 – 1,023", "1,024 – 2,047")


FAR_PAIRS = (
    ("text_heads", "xl-last", "xl-256"),
    ("text_shift_python", "last-256-shift", "last-256"),
    ("text_shift_rfc", "last-256-shift", "last-256"),
    ("text_selective_python", "last-128-selective-shift", "last-256-shift"),
    ("text_selective_rfc", "last-128-selective-shift", "last-256-shift"),
)
"""Experiments, with an arm and the one that it is compared with."""


def far_memory() -> str:
    """What a long memory for the last layer and a token shift save, by how far back a word last began."""
    body: list[Row] = []
    for measure in (PER_BYTE, *DISTANCES):
        row: Row = ["bits per byte" if measure == PER_BYTE else f"nats, {measure} back"]
        for experiment, arm, base in FAR_PAIRS:
            difference = paired(seeds(experiment, arm, measure), seeds(experiment, base, measure))
            row.append(more(difference))
        body.append(row)
    head = ["", "832 in one layer vs. 256 in all", "shift, Python", "shift, RFCs",
            "selective, Python", "selective, RFCs"]  # fmt: skip
    return markdown_table(head, body, numbers=True)


def text_distances() -> str:
    """Nats per token by how far back a word last began."""
    body: list[Row] = []
    for distance in DISTANCES:
        none = seeds("text", "none", distance)
        positions = seeds("text", "xl-256", distance)
        mixed = seeds("text", "slots-64-192", distance)
        upper_slots = seeds("text_upper", "most-positions-upper", distance)
        upper_positions = seeds("text_upper", "xl-upper", distance)
        row: Row = [distance, bits(paired(none, positions)), bits(paired(none, mixed))]
        row.append(more(paired(mixed, positions)))
        row.append(more(paired(upper_slots, upper_positions)))
        row.append(more(mean(seeds("text", "slots-64-192", f"{distance}, slots swapped"))))
        body.append(row)
    head = ["tokens since the word last began", "256 positions save", "64 positions, 192 slots save",
            "these slots vs. 256 positions", "slots vs. positions in the upper layers",
            "64 positions, 192 slots: slots swapped"]  # fmt: skip
    return markdown_table(head, body, numbers=True)


SWAPPED = "loss minus that with unchanged memory (nats per token)"


def tiny_shakespeare() -> str:
    experiment = "tiny_shakespeare"
    body: list[Row] = []
    for arm in arms_of(experiment):
        name = arm["arm"]
        row: Row = [arm["shown"], cost(arm), about(experiment)["arms"][arm["label"]]["training time"]]
        row.append(bits(stored(experiment, name, PER_CHARACTER)))
        row.append(more(stored(experiment, name, f"{PER_CHARACTER} minus transformer-xl")))
        for part in ("memory", "compressed memory"):
            rise = stored(experiment, name, SWAPPED, f"{part} swapped")
            row.append(number(rise, ".4f", signed=True))
        body.append(row)
    head = ["model", COST, "training", PER_CHARACTER, "vs. Transformer-XL"]
    return markdown_table([*head, "positions swapped, nats", "slots swapped, nats"], body, numbers=True)


def recipes(search: str) -> str:
    """Losses of the recipes of a ``search`` in 125 seconds."""
    body: list[Row] = []
    for row in rows("recipes"):
        if row["search"] == search:
            loss = stored_number(row["loss (nats)"], row["half width"])
            difference = stored_number(row["minus default"], row["half width of the difference"], "+")
            body.append([row["recipe"], f"{row['million tokens']} M", loss, difference, row["seeds"]])
    head = ["recipe", "tokens", "held-out loss, nats", "vs. default", "seeds"]
    return markdown_table(head, body, numbers=True)


def stored_number(value: str, half_width: str, sign: str = "") -> str:
    """A number of a file with its interval, if it has one."""
    if not value:
        return DASH
    interval = f" ± {float(half_width):.3f}" if half_width else ""
    return f"{float(value):{sign}.3f}{interval}".replace("-", "−")


# All experiments, and comparisons of arms


def position_features() -> str:
    """Losses with several numbers of position features, and the difference from P = D, by text, and the share
    of correct answers on the recall stream."""
    # Experiments measure different texts.
    measured = []
    for experiment in POSITIONS:
        for measure in dict.fromkeys(row["measure"] for row in rows(experiment)):
            measured.append((experiment, measure))

    head = ["position features"]
    for _, measure in measured:
        text = measure.removeprefix("held-out loss, ").removesuffix(" (nats)")
        head.append(text if "correct" in text else f"held-out loss, {text}, nats")
        head.append("vs. P = D")

    body: list[Row] = []
    for arm, shown in POSITION_ARMS.items():
        row: Row = [shown]
        for experiment, measure in measured:
            values = seeds(experiment, arm, measure)
            base = seeds(experiment, "all", measure)
            is_share = "correct" in measure
            row.append(share(mean(values)) if is_share else bits(mean(values)))
            is_compared = values and arm != "all"
            row.append(more(paired(values, base), points=is_share) if is_compared else DASH)
        body.append(row)
    return markdown_table(head, body, numbers=True)


def flash_steps() -> str:
    """CPU time of a training step with 16 position features, by what computes their attention and by size."""
    rows_of_file = table_of("flash_steps")
    _, *sizes = rows_of_file[0]
    head = ["attention with 16 position features", *(f"{size}, ms" for size in sizes)]
    return markdown_table(head, [[*row.values()] for row in rows_of_file], numbers=True)


def large_text() -> str:
    return markdown_table(
        ["what", "measured", "goal"], [[*row.values()] for row in rows("large_text")], numbers=True
    )


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


# Learning while reading

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


# All memories


def memory_ideas() -> str:
    """What each built-in memory keeps, and the names of the others."""
    body: list[Row] = []
    in_files = []
    for memory in ALL_MEMORIES:
        if ":" in memory.model:
            in_files.append(memory.name)
        else:
            body.append([linked_name(memory), memory.idea])
    ideas = markdown_table(["memory", "what each layer remembers"], body)
    *names, last = in_files
    return f"{ideas}\n\nOthers, [one file each](experiments/memories): {', '.join(names)} and {last}."


def linked_name(memory: ListedMemory) -> str | Cell:
    """The name of a memory, with a link to its paper, if it has one."""
    if not memory.arxiv:
        return memory.name
    return Cell(memory.name, link=f"https://arxiv.org/abs/{memory.arxiv}")


COMPARE_KEYS = 64
"""The keys per layer of ``make compare``, half of them slots or kept positions where there are any."""
UNTESTED = "untested"
BASE = "Transformer-XL"


class Claim(NamedTuple):
    """A measured difference from Transformer-XL: the arms of an experiment, the measure, and its page."""

    experiment: str
    arm: str
    rival: str
    measure: str
    page: str


TEXT = "text: bits per character"
RECALL = "recall, points"
ASSOCIATION = "associative recall, points"
OF_FILES = {
    "no memory": "transformer",
    "Compressive Transformer": "compressive",
    "exponential average": "averages",
    "memory tokens": "memory-tokens",
    "Infini-attention": "infini",
}
"""The arms of the experiment ``memories``, by the names of the memories."""
OF_MQAR = {
    "no memory": "none-0-shift",
    "Compressive Transformer": "conv-128-shift",
    "selective": "selective-128-shift",
}
"""The arms of the experiment ``mqar``, with 128 keys."""


def claims() -> dict[tuple[str, str], Claim]:
    """What was measured with three seeds, by the name of the memory and the column."""
    known: dict[tuple[str, str], Claim] = {}
    for name, arm in OF_FILES.items():
        for column, (_, measure) in ((RECALL, OF_MEMORIES[0]), (TEXT, OF_MEMORIES[1])):
            known[name, column] = Claim("memories", arm, "transformer-xl", measure, "memories")
    for name, arm in OF_MQAR.items():
        known[name, ASSOCIATION] = Claim("mqar", arm, "xl-128-shift-slow", "correct", "reach")
    known["selective", TEXT] = Claim(
        "tiny_shakespeare_shift", "selective", "transformer-xl", PER_CHARACTER, "tiny-shakespeare"
    )
    return known


def memory_costs() -> str:
    """Each memory's source, its idea, and what it costs."""
    body: list[Row] = []
    for memory in ALL_MEMORIES:
        body.append([memory.name, source_of(memory), memory.idea, formula(memory.keys), state_of(memory)])
    head = ["memory", "source", "what each layer remembers", "keys per layer", "bytes per stream"]
    return markdown_table(head, body)


def memory_results() -> str:
    """Each memory's results minus Transformer-XL's."""
    measured = claims()
    columns = (TEXT, RECALL, ASSOCIATION)
    body: list[Row] = []
    for memory in ALL_MEMORIES:
        row: Row = [memory.name]
        for column in columns:
            claim = measured.get((memory.name, column))
            if claim is not None:
                row.append(difference_of(claim))
            else:
                row.append(DASH if memory.name == BASE else UNTESTED)
        body.append(row)
    return markdown_table(["memory", *columns], body)


def memory_models() -> str:
    """What names each memory on the command line."""
    body: list[Row] = [[memory.name, Cell(memory.model, is_code=True)] for memory in ALL_MEMORIES]
    return markdown_table(["memory", Cell("--model", is_code=True)], body)


def state_of(memory: ListedMemory) -> str:
    """The bytes that a stream carries, as a formula, and those in a model of ``make compare``'s size."""
    if memory.state == "0":
        return "0"
    M = COMPARE_KEYS // 2 if "C" in memory.keys else COMPARE_KEYS
    config = ModelConfig(model=memory.import_path, mem_len=M, c_mem_len=COMPARE_KEYS - M)
    n_bytes = formula(f"4 * {memory.state}")
    return f"{n_bytes} = {kib(memory_facts(config)['state_bytes'])}"


def difference_of(claim: Claim) -> Cell:
    """The paired difference of a ``claim``, with a link to its page."""
    values = seeds(claim.experiment, claim.arm, claim.measure)
    rival_values = seeds(claim.experiment, claim.rival, claim.measure)
    shown = more(paired(values, rival_values), points="bits" not in claim.measure)
    difference = shown if isinstance(shown, Cell) else Cell(shown)
    return replace(difference, link=f"results/{claim.page}.md")


def source_of(memory: ListedMemory) -> str | Cell:
    """A link to the paper of a memory, if it has one."""
    if not memory.paper:
        return DASH
    if not memory.arxiv:
        return memory.paper
    return Cell(memory.paper, link=f"https://arxiv.org/abs/{memory.arxiv}")


def formula(code: str) -> str:
    """A formula in Python, as it is printed: 4·n·(M + C)·D."""
    return code.replace(" * ", "·")


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
}  # fmt: skip
"""What [`comparison`][] takes for its tables: their heads, costs and columns."""

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
