"""The cells and rows of tables of results, and what each arm costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from docs.building.results import FLOAT, about, kib, mean, seeds
from memformers.common.intervals import Mean, paired
from memformers.report.markdown import DASH, Markup, number

COST = "keys · state · operations"
"""Keys per layer beside the segment's, bytes kept for each stream, operations of attention for each token."""
KEYS, OPERATIONS = "keys per layer, without the segment's", "attention operations per token"
STATE = "state per stream"


def share(value: Mean | None) -> str:
    """A share, such as 96.8 ± 2.9 %."""
    return number(value, ".1f", " %", scale=100)


def bits(value: Mean | None) -> str:
    """Bits, or nats."""
    return number(value, ".3f")


def more_points(value: Mean | None) -> str:
    """A difference of shares: bold if its interval leaves out zero."""
    return _seen(value, number(value, ".1f", scale=100, signed=True))


def more_bits(value: Mean | None) -> str:
    """A difference of bits, or nats: bold if its interval leaves out zero."""
    return _seen(value, number(value, ".3f", signed=True))


def _seen(value: Mean | None, text: str) -> str:
    return Markup(f"**{text}**") if value and value.leaves_out_zero else text


@dataclass(frozen=True)
class Column:
    """A measure of all arms, and beside it what each has more than the base."""

    head: str
    measure: str
    minus: str = ""
    """The name of the base, for a column of differences to it."""

    @property
    def is_share(self) -> bool:
        """Whether it is shown in percent, and not as a number of bits."""
        return "bits" not in self.measure

    @property
    def heads(self) -> list[str]:
        """The heads of its columns."""
        unit = ", points" if self.is_share else ""
        return [self.head, f"minus {self.minus}{unit}"] if self.minus else [self.head]

    def cells(self, experiment: str, arm: str, base: str) -> list[str]:
        """Those of an arm."""
        found, theirs = (seeds(experiment, name, self.measure) for name in (arm, base))
        shown, less = (share, more_points) if self.is_share else (bits, more_bits)
        cells = [shown(mean(found)), DASH if arm == base else less(paired(found, theirs))]
        return cells if self.minus else cells[:1]


def compared(
    experiment: str, base: str, arms: Sequence[tuple[str, str, str]], columns: Sequence[Column]
) -> list[list[str]]:
    """A row for each of ``arms``: how it is shown, what it costs, and what it comes to."""
    return [
        [shown, cost, *(cell for column in columns for cell in column.cells(experiment, arm, base))]
        for arm, shown, cost in arms
    ]


def titled(title: str, rows: Sequence[list[str]]) -> list[list[str]]:
    """A row with a title above ``rows``."""
    return [[Markup(f"**{title}**"), *[""] * (len(rows[0]) - 1)], *rows]


def cost(keys: int | str, size: str, operations: int | None = None) -> str:
    """What each token and each stream costs: 256 · 512 KiB · 2.56 M."""
    work = [f"{operations / 1e6:.2f} M"] if operations else []
    return " · ".join([str(keys), size, *work])


def cost_of(experiment: str, label: str, layers: int = 4, d_model: int = 128) -> str:
    """The cost of an arm, by its label in the file of results."""
    arm = about(experiment)["arms"][label]
    kept = arm.get(STATE, arm[KEYS] * layers * d_model * FLOAT)  # as many where all heads read all
    return cost(arm[KEYS], kib(kept), arm[OPERATIONS])
