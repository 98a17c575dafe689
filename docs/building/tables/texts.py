"""Tables of experiments on texts."""

from docs.building.results import about, mean, rows, seeds, stored
from docs.building.tables.cells import Row, bits, more, stored_number
from docs.building.tables.comparisons import COST, PER_BYTE, PER_CHARACTER, arms_of, cost
from memformers.common.intervals import paired
from memformers.report.numbers import number
from memformers.report.rendering import markdown_table

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
