"""The tables of texts: long ones, Tiny Shakespeare, and recipes."""

from docs.building.cells import COST, Column, bits, compared, cost, cost_of, more_bits, titled
from docs.building.results import about, mean, rows, seeds, state, stored
from memformers.common.intervals import paired
from memformers.report.markdown import DASH, number, table

UPPER = (("xl-upper", "192 positions, 320 in the upper layers", "192 positions, 320 in the upper two layers"),
         ("most-positions-upper", "192 positions, 128 slots in the upper layers",
          "192 positions, slots in the upper two layers"))  # fmt: skip
REMOVED = "(removed; last available in a37ff72)"
EVERYWHERE = ("xl-256", "256 positions in every layer", "256 positions")
TEXTS = (
    ("Python", "text", (
        ("xl-256", "256 positions", "256 positions"),
        ("most-positions", "192 positions, 64 slots", "192 positions, 64 slots"),
        ("more-positions", "128 positions, 128 slots", "128 positions, 128 slots"),
        ("slots-64-192", "64 positions, 192 slots", "64 positions, 192 slots"),
        ("none", "No memory", "no memory"), ("xl-832", "832 positions (one seed)", "832 positions"))),
    ("Python, other files", "text_upper", (EVERYWHERE, *UPPER, (
        "most-positions-upper-c2", "the same, slots of 2 positions",
        "192 positions, slots in the upper two layers, c = 2"))),
    ("Prose (RFCs)", "text_rfc", (EVERYWHERE, *UPPER)),
    ("Python, a third collection", "text_heads", (
        EVERYWHERE,
        ("xl-last", "64 positions, 832 in the last layer", "64 positions, 832 in the last layer"),
        ("head-832", f"64 positions, 832 in one head of four {REMOVED}", "64 positions, 832 in one head"))),
    ("The same, with fewer keys", "text_divided", (
        ("xl-last-256", "64 positions, 256 in the last layer", "64 positions, 256 in the last layer"),
        ("last-divided-256", f"64 positions, 128 and 512 divided in the last layer {REMOVED}",
         "64 positions, 128 and 512 divided in the last layer"))),
)  # fmt: skip
"""Texts; arms, as a page shows them, and their labels in the files. Differences are to the first."""


COLUMN = Column("bits per byte", "bits per byte, 6,400,000 tokens", "256 positions")


def long_text() -> str:
    """Bits per byte of each memory, after 6.4 million tokens."""
    body = []
    for title, experiment, arms in TEXTS:
        priced = [(arm, shown, cost_of(experiment, label)) for arm, shown, label in arms]
        body += titled(title, compared(experiment, arms[0][0], priced, [COLUMN]))
    return table(["memory", COST, COLUMN.head, "minus the first"], body, numbers=True)


VARIANTS = (
    ("xl-256", "256 positions"), ("slots-64-192", "64 positions, 192 slots of 4"),
    ("slots-64-192-c2", "… slots of 2"), ("slots-64-192-c8", "… slots of 8"),
    ("upper", "… slots in the upper two layers only, twice as many"),
    ("full-length", "… memory of full length from the beginning"), ("start-mean", "… f_c begins as the mean"),
    ("pooling", "… f_c is the mean"), ("bptt", "… f_c learns from the next segment's loss alone"),
)  # fmt: skip


def text_variants() -> str:
    """One setting changed at a time, once each, on another collection of files."""
    priced = [(arm, shown, cost(256, state(1024, 128))) for arm, shown in VARIANTS]
    body = compared("text_variants", "xl-256", priced, [COLUMN])
    return table(["memory", "keys · state", *COLUMN.heads], body, numbers=True)


def longer_training() -> str:
    """After 24 million tokens, once each."""
    arms = (("none", "No memory", 0, "_no_memory"), (*UPPER[0][:2], 256, ""),
            ("most-positions-upper-c2", f"{UPPER[1][1]}, of 2 positions", 256, ""))  # fmt: skip
    body = []
    for arm, shown, keys, part in arms:
        loss = mean(seeds(f"text_longer{part}", arm, "bits per byte, 24,000,000 tokens"))
        body.append([shown, cost(keys, state(keys * 4, 128)), bits(loss)])
    return table(["memory", "keys · state", "bits per byte"], body, numbers=True)


def far_memory() -> str:
    """A long memory for the last layer, by seed, over all of the text and by how far back a word began."""
    body, numbers = list[list[str]](), sorted(seeds("text_heads", "xl-256", COLUMN.measure))
    for measure in (COLUMN.measure, *DISTANCES[:-1]):
        ours, theirs = (seeds("text_heads", arm, measure) for arm in ("xl-last", "xl-256"))
        cells = [number(ours[seed] - theirs[seed], ".3f", signed=True) for seed in numbers]
        what = "bits per byte" if measure == COLUMN.measure else f"nats, {measure} back"
        body.append([what, *cells, more_bits(paired(ours, theirs))])
    head = ["832 in the last layer minus 256 everywhere", *(f"seed {seed}" for seed in numbers), "all"]
    return table(head, body, numbers=True)


DISTANCES = ("1 – 63", "64 – 127", "128 – 255", "256 – 511", "512 – 1,023", "1,024 – 2,047")


def text_distances() -> str:
    """Nats per token by how far back a word last began."""
    body = []
    for d in DISTANCES:
        none, exact, mixed = (seeds("text", arm, d) for arm in ("none", "xl-256", "slots-64-192"))
        upper, same = (seeds("text_upper", arm, d) for arm in ("most-positions-upper", "xl-upper"))
        swapped = mean(seeds("text", "slots-64-192", f"{d}, slots swapped"))
        saved = (bits(paired(none, each)) for each in (exact, mixed))
        more = (paired(mixed, exact), paired(upper, same), swapped)
        body.append([d, *saved, *map(more_bits, more)])
    head = ["tokens since the word last began", "256 positions save", "64 positions, 192 slots save",
            "these slots minus 256 positions", "slots in the upper layers minus positions there",
            "64 positions, 192 slots: slots swapped"]  # fmt: skip
    return table(head, body, numbers=True)


SHAKESPEARE = (
    ("transformer", "Transformer, no memory", "No memory", ()),
    ("transformer-xl", "Transformer-XL", "Transformer-XL", ("memory",)),
    ("compressive", "Compressive Transformer", "Compressive", ("memory", "compressed memory")),
)  # fmt: skip
"""Arms, their labels in the file and here, and the parts of their memory."""
SWAPPED = "loss minus that with unchanged memory (nats per token)"


def tiny_shakespeare() -> str:
    """The comparison of three models over five seeds."""
    body, of = [], "tiny_shakespeare"
    for arm, label, shown, parts in SHAKESPEARE:
        base = arm == "transformer-xl"
        less = DASH if base else more_bits(stored(of, arm, "bits per character minus transformer-xl"))
        costs = [
            number(stored(of, arm, SWAPPED, f"{part} swapped"), ".4f", signed=True) if part in parts else DASH
            for part in ("memory", "compressed memory")
        ]
        loss = bits(stored(of, arm, "bits per character"))
        body.append(
            [shown, cost_of(of, label), about(of)["arms"][label]["training time"], loss, less, *costs]
        )
    head = ["model", COST, "training", "bits per character", "minus Transformer-XL"]
    head += ["positions swapped, nats", "slots swapped, nats"]
    return table(head, body, numbers=True)


def growth() -> str:
    """A memory that grows in training against one that is long from the beginning."""
    column = Column("bits per character", "bits per character", minus="the first")
    priced = [
        (arm, shown, cost(keys, state(keys * 4, 128)))
        for arm, shown, keys in (("transformer-xl", "256 positions, which grow (the default)", 256),
                                 ("at-once", "256 positions from the beginning", 256),
                                 ("short", "64 positions, which grow", 64))
    ]  # fmt: skip
    body = compared("growth", "transformer-xl", priced, [column])
    return table(["Transformer-XL with", "keys · state", *column.heads], body, numbers=True)


def recipes(search: str) -> str:
    """Losses of the recipes of a ``search`` in 125 seconds."""

    def shown(value: str, half_width: str, sign: str = "") -> str:
        if not value:
            return DASH
        interval = f" ± {float(half_width):.3f}" if half_width else ""
        return f"{float(value):{sign}.3f}{interval}".replace("-", "−")

    body = [
        [row["recipe"], f"{row['million tokens']} M", shown(row["loss (nats)"], row["half width"]),
         shown(row["minus default"], row["half width of the difference"], "+"), row["seeds"]]
        for row in rows("recipes") if row["search"] == search
    ]  # fmt: skip
    return table(["recipe", "tokens", "held-out loss, nats", "minus default", "seeds"], body, numbers=True)
