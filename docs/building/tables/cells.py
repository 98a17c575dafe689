"""Cells of tables of results: numbers with their intervals, and rows."""

from collections.abc import Sequence

from memformers.common.intervals import Mean
from memformers.report.data import Cell
from memformers.report.numbers import DASH, number

Row = list[str | Cell]
"""Of a table in Markdown."""


def share(value: Mean | None) -> str:
    return number(value, ".1f", " %", scale=100)


def bits(value: Mean | None) -> str:
    return number(value, ".3f")


def more(value: Mean | None, *, points: bool = False) -> str | Cell:
    """A difference, in bits or nats or in points; bold if its interval leaves out zero."""
    text = number(value, ".1f" if points else ".3f", scale=100 if points else 1, signed=True)
    return Cell(text, is_strong=True) if value and value.leaves_out_zero else text


def titled(title: str, heads: Sequence[str]) -> Row:
    return [Cell(title, is_strong=True), *[""] * (len(heads) - 1)]


def stored_number(value: str, half_width: str, sign: str = "") -> str:
    """A number of a file with its interval, if it has one."""
    if not value:
        return DASH
    interval = f" ± {float(half_width):.3f}" if half_width else ""
    return f"{float(value):{sign}.3f}{interval}".replace("-", "−")
