"""Pieces of Markdown."""

from typing import Any

Result = dict[str, Any]
"""The measurements in ``results.json``, or a part of them."""


def table(*heads: str) -> str:
    """The head of a table."""
    return f"{row(*heads)}\n{row(*['---'] * len(heads))}"


def row(*cells: object) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def mebibytes(count: int | None) -> str:
    """Bytes as MiB."""
    return "–" if count is None else f"{count / 2**20:,.0f}"
