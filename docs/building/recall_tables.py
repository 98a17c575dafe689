"""The tables of recall: how far back memories answer, and how much fits into a slot."""

from docs.building.cells import COST, cost_of, more_points, share, titled
from docs.building.results import Seeds, about, mean, rows, seeds
from memformers.common.intervals import paired
from memformers.report.markdown import DASH, table

MODELS = ("transformer-xl", "compressive")
REACHES = (
    ("2 layers, 128 keys", "recall_two_layers", 2,
     ((0, 192), (192, 256), (256, 320), (320, 384), (192, 384), (448, 1024))),
    ("3 layers, 128 keys", "recall_three_layers", 3, ((0, 192), (192, 384), (384, 448), (448, 1024))),
    ("2 layers, 256 keys", "recall_far", 2, ((0, 256), (256, 512), (512, 2048))),
)  # fmt: skip
"""Networks, where their results are, their layers, and bands of distances."""


def reach() -> str:
    """Correct answers by distance, on streams on which nothing was chosen."""
    body = []
    for title, experiment, layers, bands in REACHES:
        of = [[COST, *(cost_of(experiment, label, layers, 64) for label in about(experiment)["arms"]), ""]]
        for low, high in bands:
            both = [seeds(experiment, arm, f"correct, {low} – {high}") for arm in MODELS]
            name = f"set {low:,} to {high - 1:,} positions ago"
            of.append([name, *map(share, map(mean, both)), more_points(paired(both[1], both[0]))])
        body += titled(title, of)
    return table(["", "Transformer-XL", "Compressive", "minus Transformer-XL, points"], body, numbers=True)


STREAMS = (("16, 4, 1/16", 1.5), ("8, 2, 1/8", 2.0), ("16, 4, 1/8", 3.0), ("24, 5, 1/8", 3.5),
           ("32, 8, 1/8", 4.0), ("16, 4, 1/4", 6.0))  # fmt: skip
"""Keys, values and the share of tokens that set one; and the bits that a slot must hold."""


def in_slots(arm: str, stream: int, *, longer: bool = False) -> Seeds:
    """Correct answers beyond chance about values set 192 to 383 positions ago, on a stream of the grid, after
    3 or, if ``longer``, 12 million tokens."""
    found: Seeds = {}
    for experiment in (
        ("recall_grid_longer", "recall_grid_longer_both_losses") if longer else ("recall_grid",)
    ):
        found = found or seeds(experiment, f"{arm}-{stream}", "set 192 to 384 positions ago")
    return found


def slots() -> str:
    """Correct answers beyond chance by what a slot must hold."""
    body = []
    for i, (stream, size) in enumerate(STREAMS):
        theirs, ours = (in_slots(arm, i) for arm in MODELS)
        more = [in_slots(arm, i, longer=True) for arm in (*MODELS, "both-losses")]
        shares = [*map(share, map(mean, (theirs, ours)))], [*map(share, map(mean, more))]
        body.append([f"{size:g}", stream, *shares[0], more_points(paired(ours, theirs)), *shares[1]])
    head = ["bits in a slot", "keys, values, share that sets one", "Transformer-XL", "Compressive",
            "minus Transformer-XL, points", "4 × the tokens: Transformer-XL", "Compressive",
            "Compressive, both losses"]  # fmt: skip
    return table(head, body, numbers=True)


def slot_settings() -> str:
    """One setting changed at a time, for slots and for Transformer-XL."""
    theirs = {row["variant"]: row for row in rows("slots_transformer_xl")}

    def shown(row: dict[str, str], *names: str) -> list[str]:
        return [f"{row[name]} %" if row.get(name) else DASH for name in names]

    body = [
        [
            row["variant"],
            *shown(row, "correct in memory", "correct in slots", "correct beyond"),
            *shown(theirs.get(row["variant"], {}), "correct in memory", "correct beyond"),
        ]
        for row in rows("slots")
    ]
    head = ["setting that differs", "Compressive: in positions", "in slots", "beyond",
            "Transformer-XL: in positions", "beyond"]  # fmt: skip
    return table(head, body, numbers=True)


def both_losses() -> str:
    """What f_c gains by also learning from the answers."""
    body = []
    for title, experiment, far, band in (
        ("slots of 4 positions", "recall_both_losses", "recall_both_losses", "192 – 384"),
        ("slots of 9 positions", "recall_far_both_losses", "recall_far", "512 – 2048"),
    ):
        ours, base = (
            seeds(experiment, "task", f"correct, {band}"),
            seeds(far, "compressive", f"correct, {band}"),
        )
        less = more_points(paired(ours, base))
        body.append(
            [title, f"{band} positions ago", share(mean(base)), share(mean(ours)), less, str(len(ours))]
        )
    head = ["Compressive with", "set", "attention reconstruction", "both losses", "minus, points", "seeds"]
    return table(head, body, numbers=True)
