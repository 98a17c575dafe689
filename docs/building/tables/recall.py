"""Tables of experiments on recall."""

from docs.building.results import Seeds, about, mean, rows, seeds
from docs.building.tables.cells import Row, more, share, titled
from docs.building.tables.comparisons import COST, cost_of_settings
from memformers.common.intervals import paired
from memformers.report.numbers import DASH
from memformers.report.rendering import markdown_table

MODELS = ("transformer-xl", "compressive")
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
