"""Every memory: those of the package, and those in this folder. The tables of the documentation are made of
this list, and the tests that all memories must pass run over it."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = "experiments/memories"


@dataclass(frozen=True)
class ListedMemory:
    """What the tables say of a memory.

    Its formulas are of the layers n, the widths D and E of layer and head, the settings M, C, c and S, and m
    memory tokens.
    """

    name: str
    model: str
    """What ``--model`` takes in the top folder of a clone."""
    idea: str
    """What a layer remembers."""
    keys: str
    """How many keys a query sees in each layer besides the segment's, as a formula in Python."""
    state: str
    """How many numbers a stream carries from segment to segment, as a formula in Python."""
    paper: str = ""
    """Its authors and year, if it is from a paper."""
    arxiv: str = ""
    """The number of the paper, if it is there."""

    @property
    def arm(self) -> str:
        """Its name as an arm of an experiment."""
        return self.name.lower().replace(" ", "-")

    @property
    def is_built_in(self) -> bool:
        """Whether it is in the package, not in a file."""
        return ":" not in self.model

    @property
    def import_path(self) -> str:
        """What ``--model`` takes in any folder."""
        return self.model if self.is_built_in else f"{ROOT}/{self.model}"


ALL_MEMORIES = (
    ListedMemory(
        name="no memory",
        model="transformer",
        idea="nothing: each segment is read alone",
        keys="0",
        state="0",
        paper="Vaswani et al. 2017",
        arxiv="1706.03762",
    ),
    ListedMemory(
        name="Transformer-XL",
        model="transformer-xl",
        idea="its newest M inputs",
        keys="M",
        state="n * M * D",
        paper="Dai et al. 2019",
        arxiv="1901.02860",
    ),
    ListedMemory(
        name="Compressive Transformer",
        model="compressive",
        idea="its newest M inputs, and C slots, each compressed from c older ones",
        keys="M + C",
        state="n * (M + C) * D",
        paper="Rae et al. 2020",
        arxiv="1911.05507",
    ),
    ListedMemory(
        name="selective",
        model="selective",
        idea="its newest M inputs, and the C older ones that no newer one resembles",
        keys="M + C",
        state="n * (M + C) * D",
    ),
    ListedMemory(
        name="random positions",
        model=f"{FOLDER}/random_positions.py:RandomPositions",
        idea="its newest M inputs, and C older ones at random",
        keys="M + C",
        state="n * ((M + C) * D + C + 1)",
    ),
    ListedMemory(
        name="KeyDiff",
        model=f"{FOLDER}/keydiff.py:KeyDiff",
        idea="its newest M inputs, and the C older ones whose keys differ most from the mean key",
        keys="M + C",
        state="n * (M + C) * D",
        paper="Park et al. 2025",
        arxiv="2504.15364",
    ),
    ListedMemory(
        name="TOVA",
        model=f"{FOLDER}/tova.py:TOVA",
        idea="its newest M inputs, and the C older ones to which the newest query attends most",
        keys="M + C",
        state="n * (M + C) * D",
        paper="Oren et al. 2024",
        arxiv="2401.06104",
    ),
    ListedMemory(
        name="R-KV",
        model=f"{FOLDER}/rkv.py:RKV",
        idea="its newest M inputs, and the C older ones that are attended to and least like others",
        keys="M + C",
        state="n * (M + C) * D",
        paper="Cai et al. 2025",
        arxiv="2505.24133",
    ),
    ListedMemory(
        name="DMS",
        model=f"{FOLDER}/learned_eviction.py:LearnedEviction",
        idea="its newest M inputs, and the C older ones with the highest learned keep-scores",
        keys="M + C",
        state="n * (M + C) * D",
        paper="Łańcucki et al. 2025",
        arxiv="2506.05345",
    ),
    ListedMemory(
        name="pooled slots",
        model=f"{FOLDER}/pooled_slots.py:PooledSlots",
        idea="its newest M inputs, and C slots, each pooled from c older ones by feature",
        keys="M + C",
        state="n * (M + C + S) * D",
        paper="DeepSeek-V4 2026",
    ),
    ListedMemory(
        name="exponential average",
        model=f"{FOLDER}/averages.py:Averages",
        idea="its newest M inputs, and one average of all older ones",
        keys="M + 1",
        state="n * (M + 1) * D",
    ),
    ListedMemory(
        name="Infini-attention",
        model=f"{FOLDER}/infini.py:InfiniAttention",
        idea="a matrix for each head, which maps keys to values",
        keys="0",
        state="n * (E + 1) * D",
        paper="Munkhdalai et al. 2024",
        arxiv="2404.07143",
    ),
    ListedMemory(
        name="Gated DeltaNet",
        model=f"{FOLDER}/gated_delta.py:GatedDelta",
        idea="its newest M inputs, and a matrix for each head of all older ones, which decays",
        keys="M",
        state="n * (M + E) * D",
        paper="Yang et al. 2024",
        arxiv="2412.06464",
    ),
    ListedMemory(
        name="memory tokens",
        model=f"{FOLDER}/memory_tokens.py:MemoryTokens",
        idea="m vectors, in the first layer alone, which are read and written with each segment",
        keys="2 * m",
        state="m * D",
        paper="Bulatov et al. 2022",
        arxiv="2207.06881",
    ),
)
"""In the order of the tables."""
