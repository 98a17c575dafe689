"""Whether longer memories and more slots predict a text better: Transformer-XL with memories of several
lengths, and Compressive Transformers with several kinds of slots, trained alike on one text.

Run it with ``python -m experiments.longer_memory --data FILE --out FOLDER``. Finished training runs are kept;
``--resume`` continues, and adds seeds. The folder has the report of the comparison,
``figures/longer_memory.png``, and as tables what it changes when a memory grows during the training
(``growth.md``), growing memories beside each other (``growing.md``), and how fast each arm learns at its
beginning (``beginning.md``).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from memformers.commands.options import ExperimentCommand
from memformers.common.files import write_text
from memformers.common.intervals import Mean, mean_of, mean_of_known, paired
from memformers.comparison.text import MEMORIES, CompareConfig, compare
from memformers.report import plotting
from memformers.report.arms import BITS, Arm, arms_of, base_of
from memformers.report.markdown import number, table
from memformers.runs.finished import read_runs
from memformers.runs.folder import FIGURES
from memformers.training.config import TrainConfig

BASE = TrainConfig(model=replace(MEMORIES, mem_len=64), memory_warmup=0.0)
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
KINDS = {
    (False, False): ("Transformer-XL, and no memory at 0", plotting.BLUE | {"linestyle": "-"}),
    (False, True): ("Transformer-XL, memory grows", plotting.SKY | {"linestyle": "--"}),
    (True, False): ("Compressive Transformer", plotting.ORANGE | {"linestyle": ""}),
    (True, True): ("Compressive Transformer, memory grows", plotting.AMBER | {"linestyle": ""}),
}
"""By whether an arm has slots, and whether its memory grows: a label and a look."""
APART = 2.5
"""The distance on the axis of keys between arms of two kinds that have the same number."""
GROWS = "-grows"
"""The end of the name of an arm whose memory grows; the arm without it has the same memory from the
beginning."""
EARLY = (0.1, 0.2)
"""The part of a training run, as fractions of its tokens, in which the arms' early progress is compared."""


@dataclass(frozen=True)
class LongerMemory(ExperimentCommand):
    """Train memories of several lengths, and several kinds of slots, on one text."""

    name: ClassVar = "longer-memory"
    data: str = ""
    """The text, as for training: Tiny Shakespeare if not given."""
    seeds: int = 3
    """How many times each arm is trained. Intervals need at least 2."""
    scale: float = 0.5
    """Multiplies the number of tokens of a training run of ``memformers compare``."""
    causes: bool = True
    """Whether to try other kinds of slots as well: a convolution that starts as the mean, and slots of 2 and
    of 8 positions."""
    evaluations: int = 3
    """How many times each training run is evaluated."""

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


def save_figure(folder: Path, path: Path) -> None:
    """Draw the arms of the comparison in ``folder`` that have results into ``path``, as PNG, SVG and CSV."""
    arms = [arm for arm in arms_of(read_runs(folder)) if arm.results]
    base = base_of(arms)
    found = {arm.name: arm.minus(base, BITS.of) for arm in arms}
    points = {name: mean for name, mean in found.items() if mean}
    many = []
    for place, (kind, (label, look)) in enumerate(KINDS.items()):
        of_kind = [arm for arm in arms if arm.name in points and kind_of(arm) == kind]
        pairs = sorted(((keys_of(arm), points[arm.name]) for arm in of_kind), key=lambda pair: pair[0])
        many.append(plotting.Series(label, spread(pairs, APART * place), look))
    figure, [axes] = plotting.panels([2.9])
    axes.axhline(0, color=plotting.GREY, linewidth=0.8, zorder=0)
    plotting.draw_marks(axes, [series for series in many if series.points])
    plotting.style(
        axes, "keys per layer, without the segment's", f"bits per character,\nminus {base.label}'s"
    )
    plotting.legend(figure)
    head = ["arm", "keys", "bits per character, minus the base's", "half width of the 95 % interval", "seeds"]
    rows = [
        [arm.name, keys_of(arm), m.mean, m.half_width, m.n] for arm in arms if (m := points.get(arm.name))
    ]
    plotting.save_with_data(figure, path, head, rows)


def keys_of(arm: Arm) -> float:
    """The keys per layer of ``arm``, without the segment's."""
    return float(arm.first.facts["keys"])


def kind_of(arm: Arm) -> tuple[bool, bool]:
    """Whether ``arm`` has slots, and whether its memory grows during the training."""
    model = arm.first.model
    return model == "compressive", bool(arm.first.config["memory_warmup"]) and model != "transformer"


def spread(points: Sequence[tuple[float, Mean]], right: float) -> list[tuple[float, Mean]]:
    """``points`` by their keys, moved to the ``right``, those with the same number of keys side by side."""
    seen: Counter[float] = Counter()
    placed = []
    for keys, mean in points:
        placed.append((keys + right + len(KINDS) * APART * seen[keys], mean))
        seen[keys] += 1
    return placed


def write_tables(folder: Path) -> None:
    """Write ``growth.md``, ``growing.md`` and ``beginning.md``, of the comparison in ``folder``, into it, as
    Markdown."""
    arms = [arm for arm in arms_of(read_runs(folder)) if arm.results]
    write_text(folder / "growth.md", growth_table(arms) + "\n")
    write_text(folder / "growing.md", growing_table(arms) + "\n")
    write_text(folder / "beginning.md", beginning_table(arms) + "\n")


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


if __name__ == "__main__":
    LongerMemory.main()
