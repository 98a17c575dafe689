"""Whether longer memories and more slots predict a text better: Transformer-XL with memories of several
lengths, and Compressive Transformers with several kinds of slots, trained alike on one text.

Run it with ``python -m experiments.longer_memory --data FILE --out FOLDER``. Finished trainings are kept;
``--resume`` continues, and adds seeds. The folder has the report of the comparison,
``figures/longer_memory.png``, and as tables what it changes when a memory grows during the training
(``growth.md``), growing memories beside each other (``growing.md``), and how fast each arm learns at its
beginning (``beginning.md``).
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.longer_memory.arms import comparison
from experiments.longer_memory.figure import save_figure
from experiments.longer_memory.growth import write_tables
from memformers.commands.places import new_folder, say_report
from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.errors import UserError
from memformers.comparison import compare
from memformers.runs.folder import FIGURES
from memformers.training.config import TrainConfig


@dataclass(frozen=True)
class LongerMemory:
    """Which text, for how long, and from how many seeds."""

    data: str = ""
    """The text, as for training: Tiny Shakespeare if not given."""
    out: Path | None = None
    """Folder of the results; by default runs/, the date and "longer-memory"."""
    resume: bool = False
    """Continue the comparison in --out, of the same settings: finish what was stopped, and add seeds."""
    seeds: int = 3
    """How many times each arm is trained. Intervals need at least 2."""
    scale: float = 0.5
    """Multiplies the number of tokens of a training of ``memformers compare``."""
    causes: bool = True
    """Whether to try other kinds of slots as well: a convolution that starts as the mean, and slots of 2 and
    of 8 positions."""
    evaluations: int = 3
    """How many times each training is evaluated."""
    dashboard: str = ""
    """Where to show the runs live: the address of a labml server, or off."""


def main(arguments: LongerMemory) -> None:
    """Train what the folder doesn't have, and draw the figure of all results."""
    if arguments.resume and arguments.out is None:
        raise UserError("name the comparison to resume as --out.")
    folder = arguments.out or new_folder("longer-memory")
    train = TrainConfig(data=arguments.data, evaluations=arguments.evaluations)
    config = comparison(train, seeds=arguments.seeds, scale=arguments.scale, causes=arguments.causes)
    page = compare(config, folder, arguments.dashboard, resume=arguments.resume)
    save_figure(folder, folder / FIGURES / "longer_memory.png")
    write_tables(folder)
    say_report(page)


if __name__ == "__main__":
    with plain_errors():
        main(parse_arguments(LongerMemory))
