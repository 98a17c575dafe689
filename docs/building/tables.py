"""The tables of results: a function for each, which a page asks for by its name, and what they share."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from docs.building.results import FLOAT, Seeds, about, experiments, kib, mean, rows, seeds, state, stored
from docs.building.source import ROOT
from memformers.common.intervals import Mean, paired
from memformers.report.markdown import DASH, Markup, number, table

COST = "keys · state · operations"
"""Keys per layer beside the segment's, bytes kept for each stream, operations of attention for each token."""
KEYS, OPERATIONS = "keys per layer, without the segment's", "attention operations per token"
REMOVED = "(removed; last available in a37ff72)"
MODELS = ("transformer-xl", "compressive")


def share(value: Mean | None) -> str:
    return number(value, ".1f", " %", scale=100)


def bits(value: Mean | None) -> str:
    return number(value, ".3f")


def more_points(value: Mean | None) -> str:
    return _bold(value, number(value, ".1f", scale=100, signed=True))


def more_bits(value: Mean | None) -> str:
    return _bold(value, number(value, ".3f", signed=True))


def _bold(value: Mean | None, text: str) -> str:
    return Markup(f"**{text}**") if value and value.leaves_out_zero else text


class Column(NamedTuple):
    """A measure of all arms; with ``minus``, the name of the base, a column of differences to it follows."""

    head: str
    measure: str
    minus: str = ""

    def heads(self) -> list[str]:
        unit = "" if "bits" in self.measure else ", points"
        return [self.head, f"minus {self.minus}{unit}"] if self.minus else [self.head]

    def cells(self, experiment: str, arm: str, base: str) -> list[str]:
        ours, theirs = (seeds(experiment, name, self.measure) for name in (arm, base))
        shown, less = (bits, more_bits) if "bits" in self.measure else (share, more_points)
        cells = [shown(mean(ours)), DASH if arm == base else less(paired(ours, theirs))]
        return cells if self.minus else cells[:1]


Row = tuple[str, str, str]
"""An arm, how a page shows it, and what it costs."""


def compared(
    experiment: str, arms: Sequence[Row], columns: Sequence[Column], base: str = ""
) -> list[list[str]]:
    """A row for each of ``arms``; differences are to the first one, or to ``base``."""
    base = base or arms[0][0]
    return [[shown, cost, *(c for column in columns for c in column.cells(experiment, arm, base))]
            for arm, shown, cost in arms]  # fmt: skip


def heads(*names: str, columns: Sequence[Column]) -> list[str]:
    return [*names, *(head for column in columns for head in column.heads())]


def titled(title: str, body: Sequence[list[str]]) -> list[list[str]]:
    """A row with a title above those of ``body``."""
    return [[Markup(f"**{title}**"), *[""] * (len(body[0]) - 1)], *body]


def cost(keys: int | str, size: str, operations: int | None = None) -> str:
    """What each token and each stream costs: 256 · 512 KiB · 2.56 M."""
    return " · ".join([str(keys), size, *([f"{operations / 1e6:.2f} M"] if operations else [])])


def cost_of(experiment: str, label: str, layers: int = 4, d_model: int = 128) -> str:
    arm = about(experiment)["arms"][label]
    return cost(
        arm[KEYS], kib(arm.get("state per stream", arm[KEYS] * layers * d_model * FLOAT)), arm[OPERATIONS]
    )


# Recall

REACHES = (
    ("2 layers, 128 keys", "recall_two_layers", 2,
     ((0, 192), (192, 256), (256, 320), (320, 384), (192, 384), (448, 1024))),
    ("3 layers, 128 keys", "recall_three_layers", 3, ((0, 192), (192, 384), (384, 448), (448, 1024))),
    ("2 layers, 256 keys", "recall_far", 2, ((0, 256), (256, 512), (512, 2048))),
)  # fmt: skip
"""Networks, where their results are, their layers, and bands of distances."""


def reach() -> str:
    body = []
    for title, experiment, layers, bands in REACHES:
        part = [[COST, *(cost_of(experiment, label, layers, 64) for label in about(experiment)["arms"]), ""]]
        for low, high in bands:
            xl, slots = (seeds(experiment, arm, f"correct, {low} – {high}") for arm in MODELS)
            name = f"set {low:,} to {high - 1:,} positions ago"
            part.append([name, share(mean(xl)), share(mean(slots)), more_points(paired(slots, xl))])
        body += titled(title, part)
    return table(["", "Transformer-XL", "Compressive", "minus Transformer-XL, points"], body, numbers=True)


STREAMS = (("16, 4, 1/16", 1.5), ("8, 2, 1/8", 2.0), ("16, 4, 1/8", 3.0), ("24, 5, 1/8", 3.5),
           ("32, 8, 1/8", 4.0), ("16, 4, 1/4", 6.0))  # fmt: skip
"""Keys, values and the share of tokens that set one; and the bits that a slot must hold."""


def in_slots(arm: str, stream: int, *, longer: bool = False) -> Seeds:
    """Correct answers beyond chance about values set 192 to 383 positions ago, on a stream of the grid, after
    3 or, if ``longer``, 12 million tokens."""
    places = ("recall_grid_longer", "recall_grid_longer_both_losses") if longer else ("recall_grid",)
    measured = [seeds(place, f"{arm}-{stream}", "set 192 to 384 positions ago") for place in places]
    return next(filter(None, measured), {})


def slots() -> str:
    body = []
    for i, (stream, size) in enumerate(STREAMS):
        xl, ours = (in_slots(arm, i) for arm in MODELS)
        more = [share(mean(in_slots(arm, i, longer=True))) for arm in (*MODELS, "both-losses")]
        body.append(
            [f"{size:g}", stream, share(mean(xl)), share(mean(ours)), more_points(paired(ours, xl)), *more]
        )
    head = ["bits in a slot", "keys, values, share that sets one", "Transformer-XL", "Compressive",
            "minus Transformer-XL, points", "4 × the tokens: Transformer-XL", "Compressive",
            "Compressive, both losses"]  # fmt: skip
    return table(head, body, numbers=True)


def slot_settings() -> str:
    """One setting changed at a time, for slots and for Transformer-XL."""
    theirs = {row["variant"]: row for row in rows("slots_transformer_xl")}
    body = []
    for row in rows("slots"):
        of_xl = theirs.get(row["variant"], {})
        found = [row.get(f"correct {place}") for place in ("in memory", "in slots", "beyond")]
        found += [of_xl.get(f"correct {place}") for place in ("in memory", "beyond")]
        body.append([row["variant"], *(f"{percent} %" if percent else DASH for percent in found)])
    head = ["setting that differs", "Compressive: in positions", "in slots", "beyond",
            "Transformer-XL: in positions", "beyond"]  # fmt: skip
    return table(head, body, numbers=True)


def both_losses() -> str:
    body = []
    for title, experiment, base, band in (
        ("slots of 4 positions", "recall_both_losses", "recall_both_losses", "192 – 384"),
        ("slots of 9 positions", "recall_far_both_losses", "recall_far", "512 – 2048"),
    ):
        both = seeds(experiment, "task", f"correct, {band}")
        usual = seeds(base, "compressive", f"correct, {band}")
        less = more_points(paired(both, usual))
        body.append(
            [title, f"{band} positions ago", share(mean(usual)), share(mean(both)), less, str(len(both))]
        )
    head = ["Compressive with", "set", "attention reconstruction", "both losses", "minus, points", "seeds"]
    return table(head, body, numbers=True)


COMPRESSIONS = (
    ("conv", "convolution, attention reconstruction (default)", "0.973"),
    ("conv-from-mean", "the same, begins as the mean", DASH),
    ("dilated", "dilated convolution, attention reconstruction", "0.977"),
    ("most-used", f"most-used {REMOVED}", "0.980"), ("mean", "mean", "0.982"), ("max", "max", "0.986"),
    ("auto-encoding", f"convolution, auto-encoding {REMOVED}", "0.984"),
    ("bptt", "convolution, the language model's loss", "0.996"),
    ("upper-half", "convolution, slots in the upper layer only", DASH),
    ("transformer-xl", "Transformer-XL, equal keys", DASH),
)  # fmt: skip
"""Arms, as the page shows them, and their bits per character on enwik8 in the paper."""
BEYOND, WITHIN = (f"answers about values set {band} positions ago" for band in ("192 to 384", "0 to 192"))
PER_CHARACTER = "bits per character"


def compression() -> str:
    columns = [
        Column("correct beyond", BEYOND, "the default"),
        Column("correct within", WITHIN),
        Column(PER_CHARACTER, PER_CHARACTER, "the default"),
    ]
    of, arms = about("ablation"), []
    for arm, shown, _ in COMPRESSIONS:
        keys = of["arms"][of["rows"][arm]]["recall stream: keys of all layers, beside the segment's"]
        arms.append((arm, shown, cost(keys // 2, state(keys, 64))))
    body = [
        [*row, paper]
        for row, (*_, paper) in zip(compared("ablation", arms, columns), COMPRESSIONS, strict=True)
    ]
    head = heads("compression, and what trains it", "keys · state", columns=columns)
    return table([*head, "paper: enwik8"], body, numbers=True)


def gates() -> str:
    measures = (("correct beyond", BEYOND), ("correct within", WITHIN), (PER_CHARACTER, PER_CHARACTER))
    columns = [Column(*measure, "without") for measure in measures]
    arms = [
        (arm, shown, "128 · 64 KiB") for arm, shown in (("conv", "without gates"), ("gated", "with gates"))
    ]
    head = heads("default compression", "keys · state", columns=columns)
    return table(head, compared("ablation_gated", arms, columns), numbers=True)


# Texts

EVERYWHERE = ("xl-256", "256 positions in every layer", "256 positions")
UPPER = (("xl-upper", "192 positions, 320 in the upper layers", "192 positions, 320 in the upper two layers"),
         ("most-positions-upper", "192 positions, 128 slots in the upper layers",
          "192 positions, slots in the upper two layers"))  # fmt: skip
LAST, HEAD = "64 positions, 832 in the last layer", "64 positions, 832 in one head"
DIVIDED = "64 positions, 128 and 512 divided in the last layer"
TEXTS = (
    ("Python", "text", (
        ("xl-256", "256 positions", "256 positions"),
        *((arm, label, label) for arm, label in (("most-positions", "192 positions, 64 slots"), (
            "more-positions", "128 positions, 128 slots"), ("slots-64-192", "64 positions, 192 slots"))),
        ("none", "No memory", "no memory"), ("xl-832", "832 positions (one seed)", "832 positions"))),
    ("Python, other files", "text_upper", (EVERYWHERE, *UPPER, (
        "most-positions-upper-c2", "the same, slots of 2 positions",
        "192 positions, slots in the upper two layers, c = 2"))),
    ("Prose (RFCs)", "text_rfc", (EVERYWHERE, *UPPER)),
    ("Python, a third collection", "text_heads", (
        EVERYWHERE, ("xl-last", LAST, LAST), ("head-832", f"{HEAD} of four {REMOVED}", HEAD))),
    ("The same, with fewer keys", "text_divided", (
        ("xl-last-256", "64 positions, 256 in the last layer", "64 positions, 256 in the last layer"),
        ("last-divided-256", f"{DIVIDED} {REMOVED}", DIVIDED))),
)  # fmt: skip
"""Texts; arms, as a page shows them, and their labels in the files. Differences are to the first."""
PER_BYTE = Column("bits per byte", "bits per byte, 6,400,000 tokens", "256 positions")
DISTANCES = ("1 – 63", "64 – 127", "128 – 255", "256 – 511", "512 – 1,023", "1,024 – 2,047")


def long_text() -> str:
    """Bits per byte of each memory, after 6.4 million tokens."""
    body = []
    for title, experiment, arms in TEXTS:
        priced = [(arm, shown, cost_of(experiment, label)) for arm, shown, label in arms]
        body += titled(title, compared(experiment, priced, [PER_BYTE]))
    return table(["memory", COST, PER_BYTE.head, "minus the first"], body, numbers=True)


VARIANTS = (
    ("xl-256", "256 positions"), ("slots-64-192", "64 positions, 192 slots of 4"),
    ("slots-64-192-c2", "… slots of 2"), ("slots-64-192-c8", "… slots of 8"),
    ("upper", "… slots in the upper two layers only, twice as many"),
    ("full-length", "… memory of full length from the beginning"), ("start-mean", "… f_c begins as the mean"),
    ("pooling", "… f_c is the mean"), ("bptt", "… f_c learns from the next segment's loss alone"),
)  # fmt: skip


def text_variants() -> str:
    """One setting changed at a time, once each, on another collection of files."""
    arms = [(arm, shown, cost(256, state(1024, 128))) for arm, shown in VARIANTS]
    head = heads("memory", "keys · state", columns=[PER_BYTE])
    return table(head, compared("text_variants", arms, [PER_BYTE]), numbers=True)


def longer_training() -> str:
    """After 24 million tokens, once each."""
    body = []
    for arm, shown, keys, part in (
        ("none", "No memory", 0, "_no_memory"), (*UPPER[0][:2], 256, ""),
        ("most-positions-upper-c2", f"{UPPER[1][1]}, of 2 positions", 256, ""),
    ):  # fmt: skip
        loss = mean(seeds(f"text_longer{part}", arm, "bits per byte, 24,000,000 tokens"))
        body.append([shown, cost(keys, state(keys * 4, 128)), bits(loss)])
    return table(["memory", "keys · state", "bits per byte"], body, numbers=True)


def far_memory() -> str:
    """A long memory for the last layer, by seed: over all of the text, and by how far back a word began."""
    body, numbers = list[list[str]](), sorted(seeds("text_heads", "xl-256", PER_BYTE.measure))
    for measure in (PER_BYTE.measure, *DISTANCES[:-1]):
        ours, theirs = (seeds("text_heads", arm, measure) for arm in ("xl-last", "xl-256"))
        cells = [number(ours[seed] - theirs[seed], ".3f", signed=True) for seed in numbers]
        what = PER_BYTE.head if measure == PER_BYTE.measure else f"nats, {measure} back"
        body.append([what, *cells, more_bits(paired(ours, theirs))])
    head = ["832 in the last layer minus 256 everywhere", *(f"seed {seed}" for seed in numbers), "all"]
    return table(head, body, numbers=True)


def text_distances() -> str:
    """Nats per token by how far back a word last began."""
    body = []
    for d in DISTANCES:
        none, exact, mixed = (seeds("text", arm, d) for arm in ("none", "xl-256", "slots-64-192"))
        upper, same = (seeds("text_upper", arm, d) for arm in ("most-positions-upper", "xl-upper"))
        more = (
            paired(mixed, exact),
            paired(upper, same),
            mean(seeds("text", "slots-64-192", f"{d}, slots swapped")),
        )
        body.append([d, bits(paired(none, exact)), bits(paired(none, mixed)), *map(more_bits, more)])
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
    body, of = [], "tiny_shakespeare"
    for arm, label, shown, parts in SHAKESPEARE:
        is_base = arm == "transformer-xl"
        less = DASH if is_base else more_bits(stored(of, arm, "bits per character minus transformer-xl"))
        costs = [
            number(stored(of, arm, SWAPPED, f"{part} swapped"), ".4f", signed=True) if part in parts else DASH
            for part in ("memory", "compressed memory")
        ]
        training = about(of)["arms"][label]["training time"]
        loss = bits(stored(of, arm, PER_CHARACTER))
        body.append([shown, cost_of(of, label), training, loss, less, *costs])
    head = ["model", COST, "training", PER_CHARACTER, "minus Transformer-XL"]
    return table([*head, "positions swapped, nats", "slots swapped, nats"], body, numbers=True)


def growth() -> str:
    column = Column(PER_CHARACTER, PER_CHARACTER, "the first")
    arms = [(arm, f"{keys} positions{how}", cost(keys, state(keys * 4, 128))) for arm, keys, how in (
        ("transformer-xl", 256, ", which grow (the default)"), ("at-once", 256, " from the beginning"),
        ("short", 64, ", which grow"))]  # fmt: skip
    head = heads("Transformer-XL with", "keys · state", columns=[column])
    return table(head, compared("growth", arms, [column]), numbers=True)


def recipes(search: str) -> str:
    """Losses of the recipes of a ``search`` in 125 seconds."""

    def shown(value: str, half_width: str, sign: str = "") -> str:
        interval = f" ± {float(half_width):.3f}" if half_width else ""
        return f"{float(value):{sign}.3f}{interval}".replace("-", "−") if value else DASH

    body = [
        [row["recipe"], f"{row['million tokens']} M", shown(row["loss (nats)"], row["half width"]),
         shown(row["minus default"], row["half width of the difference"], "+"), row["seeds"]]
        for row in rows("recipes") if row["search"] == search
    ]  # fmt: skip
    return table(["recipe", "tokens", "held-out loss, nats", "minus default", "seeds"], body, numbers=True)


# Agents, memories of other papers, and all experiments

KEPT, MAZES = "32 · 8 KiB", ("t-maze-24", "t-maze-60", "t-maze-80")
AGENTS = (("none", "No memory", "0"), ("gru", "nn.GRU", DASH), ("transformer-xl", "Transformer-XL", KEPT),
          ("compressive", "Compressive", KEPT), ("transformer-xl-gated", "Transformer-XL, gates", KEPT),
          ("compressive-gated", "Compressive, gates", KEPT))  # fmt: skip


def agents() -> str:
    columns = [Column(f"{maze.removeprefix('t-maze-')} steps", maze) for maze in MAZES[:2]]
    columns.append(Column("80 steps", MAZES[2], "Transformer-XL"))
    body = compared("agents", AGENTS, columns, "transformer-xl")
    for row, (arm, *_) in zip(body, AGENTS, strict=True):
        row.append(share(mean(seeds("agents_minigrid", arm, "MiniGrid-MemoryS7-v0"))))
    head = heads("memory", "keys · state", columns=columns)
    return table([*head, "MiniGrid-MemoryS7"], body, numbers=True)


MEMORIES = (("transformer", "No memory", 0, 0), ("transformer-xl", "Transformer-XL", 64, 256),
            ("compressive", "Compressive Transformer", 64, 256), ("averages", "Exponential average", 64, 256),
            ("memory-tokens", "Memory tokens", 64, 64), ("infini", "Infini-attention", 0, 132))  # fmt: skip
"""Arms, their labels, keys per layer, and the vectors of D numbers that all layers together keep."""


def memories() -> str:
    measures = (("recall, set 192 to 383 ago", "recall, set 192 to 384 positions ago"),
                ("Tiny Shakespeare, bits per character", "bits per character, tiny-shakespeare"),
                ("Python, bits per byte", "bits per byte, python-source"))  # fmt: skip
    columns, arms = [Column(*measure, "Transformer-XL") for measure in measures], list[Row]()
    for arm, label, keys, kept in MEMORIES:
        operations = about("memories")["arms"][label][OPERATIONS]
        shown = f"{label} {REMOVED}" if arm in ("memory-tokens", "infini") else label
        arms.append((arm, shown, cost(keys, state(kept, 128), operations)))
    body = compared("memories", arms, columns, "transformer-xl")
    return table(heads("memory", COST, columns=columns), body, numbers=True)


def large_text() -> str:
    return table(["what", "measured", "goal"], [[*row.values()] for row in rows("large_text")], numbers=True)


def of_file(path: str, which: str) -> str:
    """The ``which``-th table of a Markdown file."""
    tables = re.findall(r"(?:^\|.*\n?)+", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    return str(tables[int(which) - 1]).strip()


def data() -> str:
    """All experiments: what was trained, how often, on how much, when, and where its numbers are."""
    body = []
    for name, row in experiments().items():
        numbers = Markup(f"[{name}](data/{name}/results.csv)")
        body.append([*(row[x] for x in ("what", "seeds", "tokens", "date", "machine")), numbers])
    return table(["experiment", "seeds", "tokens of each run", "trained", "machine", "numbers"], body)


def commands() -> str:
    lines = (f"# {row['what']}\n{row['command']}" for row in experiments().values() if row["command"])
    return "```sh\n" + "\n".join(lines) + "\n```"


TABLES = {
    made.__name__: made
    for made in (reach, slots, slot_settings, both_losses, compression, gates, long_text, text_variants,
                 longer_training, far_memory, text_distances, tiny_shakespeare, growth, recipes, agents,
                 memories, large_text, data, commands)
} | {"file": of_file}  # fmt: skip
