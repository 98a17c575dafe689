"""The table: what it changes when a memory grows during the training."""

from collections.abc import Sequence
from pathlib import Path

from memformers.common.files import write_text
from memformers.report.arms import Arm, arms_of, paired
from memformers.report.evidence import more_bits, over_seeds, signed
from memformers.report.markdown import table
from memformers.runs.finished import read_runs

GROWS = "-grows"
"""The end of the name of an arm whose memory grows; the arm without it has the same memory from the
beginning."""


def write_table(folder: Path, path: Path) -> None:
    """Write a row for each arm of the comparison in ``folder`` whose memory grows into ``path``, as
    Markdown."""
    arms = {arm.name: arm for arm in arms_of(read_runs(folder)) if arm.results}
    write_text(path, growth_table(list(arms.values())) + "\n")


def growth_table(arms: Sequence[Arm]) -> str:
    """Bits per character of each memory from the beginning and of the same memory growing, over seeds, and
    their difference, paired by seed."""
    by_name = {arm.name: arm for arm in arms}
    same = {"M-64": "transformer-xl"}  # the base of the comparison has the name of its model
    rows = []
    for name, growing in by_name.items():
        plain = name.removesuffix(GROWS)
        full = by_name.get(same.get(plain, plain))
        if not name.endswith(GROWS) or full is None or (change := paired(growing, full, more_bits)) is None:
            continue
        means = (arm.mean("bits_per_character") for arm in (full, growing))
        rows.append([plain, *(over_seeds(mean, ".4f") for mean in means), signed(change), f"{change.n}"])
    head = ["memory", "full from the beginning", "growing", "growing − full", "seeds"]
    return table(head, rows)
