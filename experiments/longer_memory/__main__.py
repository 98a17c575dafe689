"""Whether longer memories and more slots predict a text better: Transformer-XL with memories of several
lengths, and Compressive Transformers with several kinds of slots, trained alike on one text.

Run it with ``python -m experiments.longer_memory --data FILE --out FOLDER``. Finished trainings are kept;
``--resume`` continues, and adds seeds. The folder has the report of the comparison,
``figures/longer_memory.png``, and as tables what it changes when a memory grows during the training
(``growth.md``), growing memories beside each other (``growing.md``), and how fast each arm learns at its
beginning (``beginning.md``).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from experiments.longer_memory.figure import save_figure
from experiments.longer_memory.growth import write_tables
from memformers.commands.options import ExperimentCommand
from memformers.common.command_line import parse_arguments, plain_errors
from memformers.comparison.text import CompareConfig, compare
from memformers.models.config import ModelConfig
from memformers.runs.folder import FIGURES
from memformers.training.config import TrainConfig

BASE = TrainConfig(model=ModelConfig(mem_len=64, c_mem_len=32), memory_warmup=0.0)
"""The training of all arms, with the memory of Transformer-XL, which the others are compared with."""
SLOTS = "model=compressive mem_len=32 c_mem_len=32"
LENGTHS = ("M-32: mem_len=32", "M-128: mem_len=128", "M-256: mem_len=256")
"""Transformer-XL with other lengths of memory."""
COMPRESSED = (f"slots-32-32: {SLOTS}", "slots-64-64: model=compressive mem_len=64 c_mem_len=64")
"""The Compressive Transformer with memory and slots of these lengths; c = 4, as by default."""
GROWING = (
    "M-64-grows: memory_warmup=0.5",
    "M-256-grows: mem_len=256 memory_warmup=0.5",
    f"slots-32-32-grows: {SLOTS} memory_warmup=0.5",
    "slots-64-64-grows: model=compressive mem_len=64 c_mem_len=64 memory_warmup=0.5",
)
"""Memories that grow over the first half of the training; all others have their length from the beginning."""
CAUSES = (
    f"slots-32-32-mean-start: {SLOTS} compression_start=mean",
    f"slots-32-32-c2: {SLOTS} compression_rate=2",
    f"slots-32-32-c8: {SLOTS} compression_rate=8",
)
"""Slots whose convolution starts as the mean, and slots of fewer and of more positions."""


@dataclass(frozen=True)
class LongerMemory(ExperimentCommand):
    """Train memories of several lengths, and several kinds of slots, on one text."""

    name: ClassVar = "longer-memory"
    data: str = ""
    """The text, as for training: Tiny Shakespeare if not given."""
    seeds: int = 3
    """How many times each arm is trained. Intervals need at least 2."""
    scale: float = 0.5
    """Multiplies the number of tokens of a training of ``memformers compare``."""
    causes: bool = True
    """Whether to try other kinds of slots as well: a convolution that starts as the mean, and slots of 2 and
    of 8 positions."""
    evaluations: int = 3
    """How many times each training is evaluated."""

    @property
    def comparison(self) -> CompareConfig:
        """The comparison of all memories."""
        return CompareConfig(
            train=replace(BASE, data=self.data, evaluations=self.evaluations),
            models=("transformer", "transformer-xl"),
            arms=LENGTHS + COMPRESSED + GROWING + CAUSES * self.causes,
            equal_keys=False,
            seeds=self.seeds,
            scale=self.scale,
        )

    def experiment(self, folder: Path) -> Path:
        """Train what the folder doesn't have, and draw the figure of all results."""
        page = compare(self.comparison, folder, self.dashboard, resume=self.resume)
        save_figure(folder, folder / FIGURES / "longer_memory.png")
        write_tables(folder)
        return page


if __name__ == "__main__":
    with plain_errors():
        parse_arguments(LongerMemory).run()
