"""Tables of all memories: ideas, costs, results."""

from dataclasses import replace
from typing import NamedTuple

from docs.building.results import experiments, kib, seeds
from docs.building.tables.cells import Row, more
from docs.building.tables.comparisons import OF_MEMORIES, PER_CHARACTER
from experiments.memories import ALL_MEMORIES, ListedMemory
from memformers.common.intervals import paired
from memformers.models.config import ModelConfig
from memformers.models.facts import memory_facts
from memformers.report.data import Cell
from memformers.report.numbers import DASH
from memformers.report.rendering import markdown_table


def memory_ideas() -> str:
    """What each built-in memory keeps, and the names of the others."""
    body: list[Row] = []
    in_files = []
    for memory in ALL_MEMORIES:
        if memory.is_built_in:
            body.append([linked_name(memory), memory.idea])
        else:
            in_files.append(memory.name)
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


TEXTS = {"equal_bytes": "Tiny Shakespeare, bits", "equal_bytes_python": "Python, bits"}
"""The columns of the experiments in which all memories read a text, per character."""
RECALL = "recall, points"
BEYOND_A_LAYER = "set 192 to 384 tokens ago"
"""The measure of recall by all memories, of distances that no single layer of Transformer-XL reaches."""
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
OF_MQAR_MEMORIES = {
    "random positions": "random-positions-128-shift",
    "KeyDiff": "keydiff-128-shift",
    "TOVA": "tova-128-shift-slow",
    "R-KV": "r-kv-128-shift-slow",
    "pooled slots": "pooled-slots-128-shift",
    "exponential average": "exponential-average-128-shift",
}
"""Those of the experiment ``mqar_memories``, with a token shift."""
OF_MQAR_WITHOUT_SHIFT = {
    "DMS": "dms-128-slow",
    "Infini-attention": "infini-attention-128",
    "Gated DeltaNet": "gated-deltanet-128-slow",
}
"""Those of ``mqar_memories_without_shift``, which can't have one."""


def claims() -> dict[tuple[str, str], Claim]:
    """What was measured with three seeds, by the name of the memory and the column."""
    known: dict[tuple[str, str], Claim] = {}
    for name, arm in OF_FILES.items():
        _, measure = OF_MEMORIES[0]
        known[name, RECALL] = Claim("memories", arm, "transformer-xl", measure, "memories")
    for memory in ALL_MEMORIES:
        if memory.name != BASE and seeds("equal_bytes_recall", memory.arm, BEYOND_A_LAYER):
            known[memory.name, RECALL] = Claim(
                "equal_bytes_recall", memory.arm, "transformer-xl", BEYOND_A_LAYER, "memories"
            )
    measured_texts = [name for name in TEXTS if name in experiments()]
    for experiment in measured_texts:
        column = TEXTS[experiment]
        for memory in ALL_MEMORIES:
            if memory.name != BASE and seeds(experiment, memory.arm, PER_CHARACTER):
                known[memory.name, column] = Claim(
                    experiment, memory.arm, "transformer-xl", PER_CHARACTER, "memories"
                )
    # Not at equal bytes: its first layer alone would have eight times the keys.
    _, measure = OF_MEMORIES[1]
    known["memory tokens", TEXTS["equal_bytes"]] = Claim(
        "memories", "memory-tokens", "transformer-xl", measure, "memories"
    )
    for name, arm in OF_MQAR.items():
        known[name, ASSOCIATION] = Claim("mqar", arm, "xl-128-shift-slow", "correct", "reach")
    for name, arm in OF_MQAR_MEMORIES.items():
        known[name, ASSOCIATION] = Claim("mqar_memories", arm, "xl-128-shift-slow", "correct", "reach")
    for name, arm in OF_MQAR_WITHOUT_SHIFT.items():
        known[name, ASSOCIATION] = Claim(
            "mqar_memories_without_shift", arm, "xl-128-slow", "correct", "reach"
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
    columns = (*TEXTS.values(), RECALL, ASSOCIATION)
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
