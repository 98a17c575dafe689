"""The tables of compressions, agents, memories of other papers, speed, and of all experiments."""

import re

from docs.building.cells import COST, OPERATIONS, Column, compared, cost, share
from docs.building.results import about, experiments, mean, rows, seeds, state
from docs.building.source import ROOT
from docs.building.text_tables import REMOVED
from memformers.report.markdown import DASH, Markup, table

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


def compression() -> str:
    """The paper's ablation on the recall stream and on Tiny Shakespeare."""
    columns = [
        Column("correct beyond", "answers about values set 192 to 384 positions ago", minus="the default"),
        Column("correct within", "answers about values set 0 to 192 positions ago"),
        Column("bits per character", "bits per character", minus="the default"),
    ]
    of, priced = about("ablation"), []
    for arm, shown, _ in COMPRESSIONS:
        keys = of["arms"][of["rows"][arm]]["recall stream: keys of all layers, beside the segment's"]
        priced.append((arm, shown, cost(keys // 2, state(keys, 64))))
    body = [
        [*row, paper]
        for row, (*_, paper) in zip(compared("ablation", "conv", priced, columns), COMPRESSIONS, strict=True)
    ]
    head = [
        "compression, and what trains it",
        "keys · state",
        *(h for column in columns for h in column.heads),
        "paper: enwik8",
    ]
    return table(head, body, numbers=True)


def gates() -> str:
    """Gates beside residuals, as the default compression has them."""
    columns = [
        Column("correct beyond", "answers about values set 192 to 384 positions ago", minus="without"),
        Column("correct within", "answers about values set 0 to 192 positions ago", minus="without"),
        Column("bits per character", "bits per character", minus="without"),
    ]
    arms = [("conv", "without gates", "128 · 64 KiB"), ("gated", "with gates", "128 · 64 KiB")]
    head = ["default compression", "keys · state", *(h for column in columns for h in column.heads)]
    return table(head, compared("ablation_gated", "conv", arms, columns), numbers=True)


KEPT = "32 · 8 KiB"
AGENTS = (("none", "No memory", "0"), ("gru", "nn.GRU", DASH), ("transformer-xl", "Transformer-XL", KEPT),
          ("compressive", "Compressive", KEPT), ("transformer-xl-gated", "Transformer-XL, gates", KEPT),
          ("compressive-gated", "Compressive, gates", KEPT))  # fmt: skip
MAZES = ("t-maze-24", "t-maze-60", "t-maze-80")


def agents() -> str:
    """Episodes that succeed, by the length of the corridor, and in MiniGrid."""
    columns = [Column(f"{maze.removeprefix('t-maze-')} steps", maze) for maze in MAZES[:2]]
    columns.append(Column("80 steps", MAZES[2], "Transformer-XL"))
    body = [
        [*row, share(mean(seeds("agents_minigrid", arm, "MiniGrid-MemoryS7-v0")))]
        for row, (arm, *_) in zip(compared("agents", "transformer-xl", AGENTS, columns), AGENTS, strict=True)
    ]
    head = ["memory", "keys · state", *(h for column in columns for h in column.heads), "MiniGrid-MemoryS7"]
    return table(head, body, numbers=True)


MEMORIES = (("transformer", "No memory", 0, 0), ("transformer-xl", "Transformer-XL", 64, 256),
            ("compressive", "Compressive Transformer", 64, 256), ("averages", "Exponential average", 64, 256),
            ("memory-tokens", "Memory tokens", 64, 64), ("infini", "Infini-attention", 0, 132))  # fmt: skip
"""Arms, their labels, keys per layer, and the vectors of D numbers that all layers together keep."""
GONE = ("memory-tokens", "infini")


def memories() -> str:
    """Memories of other papers beside the package's, on recall and on two texts."""
    columns = [
        Column("recall, set 192 to 383 ago", "recall, set 192 to 384 positions ago", "Transformer-XL"),
        Column(
            "Tiny Shakespeare, bits per character", "bits per character, tiny-shakespeare", "Transformer-XL"
        ),
        Column("Python, bits per byte", "bits per byte, python-source", "Transformer-XL"),
    ]
    arms = about("memories")["arms"]
    priced = [
        (arm, f"{label} {REMOVED}" if arm in GONE else label, cost(keys, state(kept, 128), of[OPERATIONS]))
        for arm, label, keys, kept in MEMORIES
        for of in [arms[label]]
    ]
    body = compared("memories", "transformer-xl", priced, columns)
    return table(["memory", COST, *(head for column in columns for head in column.heads)], body, numbers=True)


def large_text() -> str:
    """A text of a gigabyte, in the memory of a small machine."""
    return table(
        ["what", "measured", "goal"], [list(row.values()) for row in rows("large_text")], numbers=True
    )


def of_file(path: str, which: str) -> str:
    """The ``which``-th table of a Markdown file."""
    tables = re.findall(r"(?:^\|.*\n?)+", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    return str(tables[int(which) - 1]).strip()


def data() -> str:
    """All experiments: what was trained, how often, on how much, when, and where their numbers are."""
    body = [
        [row["what"], row["seeds"], row["tokens"], row["date"], row["machine"],
         Markup(f"[{name}](data/{name}/results.csv)")]
        for name, row in experiments().items()
    ]  # fmt: skip
    return table(["experiment", "seeds", "tokens of each run", "trained", "machine", "numbers"], body)


def commands() -> str:
    """How each experiment is run."""
    found = (f"# {row['what']}\n{row['command']}" for row in experiments().values() if row["command"])
    return "```sh\n" + "\n".join(found) + "\n```"
