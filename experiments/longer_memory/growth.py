"""Tables of memories that grow: what growing changes, how they compare with each other, and how fast each arm
learns at its beginning; and the losses of all seeds."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from memformers.common.files import write_text
from memformers.common.intervals import mean_of, mean_of_known, paired
from memformers.report.arms import BITS, Arm, arms_of
from memformers.report.markdown import csv_text, number, table
from memformers.runs.finished import read_runs

GROWS = "-grows"
"""The end of the name of an arm whose memory grows; the arm without it has the same memory from the
beginning."""
EARLY = (0.1, 0.2)
"""The part of a training, as fractions of its tokens, in which the arms' early progress is compared."""


def write_tables(folder: Path) -> None:
    """Write ``growth.md``, ``growing.md`` and ``beginning.md``, of the comparison in ``folder``, into it, as
    Markdown, and each training's loss as ``results.csv``."""
    arms = [arm for arm in arms_of(read_runs(folder)) if arm.results]
    write_text(folder / "growth.md", growth_table(arms) + "\n")
    write_text(folder / "growing.md", growing_table(arms) + "\n")
    write_text(folder / "beginning.md", beginning_table(arms) + "\n")
    losses = [[arm.name, seed, bits] for arm in arms for seed, bits in arm.values(BITS.of).items()]
    write_text(folder / "results.csv", csv_text(["arm", "seed", "bits per character"], losses))


def growth_table(arms: Sequence[Arm]) -> str:
    """Bits per character of each memory from the beginning and of the same memory growing, over seeds, and
    their difference, paired by seed."""
    by_name = {arm.name: arm for arm in arms}
    by_name["M-64"] = by_name["transformer-xl"]  # the base of the comparison has the name of its model
    rows, changes = [], []
    for growing in arms:
        name = growing.name.removesuffix(GROWS)
        full = by_name.get(name)
        if full is None or growing.name == name or (change := growing.minus(full, BITS.of)) is None:
            continue
        means = (BITS.shown(arm.mean(BITS.of)) for arm in (full, growing))
        rows.append([name, *means, BITS.shown_difference(change), f"{change.n}"])
        ours, theirs = growing.values(BITS.of), full.values(BITS.of)
        changes.append({seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs})
    in_all = [seed for seed in changes[0] if all(seed in change for change in changes)] if changes else []
    if len(changes) > 1 and in_all:
        mean = mean_of([fmean(change[seed] for change in changes) for seed in in_all])
        rows.append(["mean of these memories", "", "", BITS.shown_difference(mean), f"{mean.n}"])
    return table(["memory", "full from the beginning", "growing", "growing − full", "seeds"], rows)


def growing_table(arms: Sequence[Arm]) -> str:
    """Bits per character of each growing memory, and minus those of the first of them, paired by seed."""
    growing = [arm for arm in arms if arm.name.endswith(GROWS)]
    rows = []
    for arm in growing:
        change = None if arm is growing[0] else arm.minus(growing[0], BITS.of)
        rows.append([arm.name, BITS.shown(arm.mean(BITS.of)), BITS.shown_difference(change)])
    base = growing[0].name if growing else ""
    return table(["arm", "bits per character", f"bits per character, minus those of {base}"], rows)


def beginning_table(arms: Sequence[Arm]) -> str:
    """The training loss of each arm in the second tenth of its training, in nats per token, over seeds, and
    minus that of the first arm, paired by seed."""
    losses = {arm.label: early_losses(arm) for arm in arms}
    first, base = next(iter(losses.items()), ("", {}))
    rows = []
    for label, by_seed in losses.items():
        change = paired(by_seed, base) if label != first else None
        mean = number(mean_of_known(by_seed.values()), ".3f")
        rows.append([label, mean, number(change, ".4f", signed=True)])
    return table(["arm", "training loss (nats)", f"training loss, minus that of {first}"], rows)


def early_losses(arm: Arm) -> dict[int, float]:
    """By seed, the mean training loss of a run's records in the part [`EARLY`][] of its training; nothing for
    a run too short to have any."""
    found = {}
    for run in arm.counted:
        low, high = (part * run.config["tokens"] for part in EARLY)
        losses = [r["loss.train"] for r in run.metrics if "loss.train" in r and low < r["tokens"] <= high]
        if losses:
            found[run.seed] = fmean(losses)
    return found
