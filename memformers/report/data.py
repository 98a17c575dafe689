"""A report as data: what it says, before it becomes Markdown, a page or lines of a terminal."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Prose:
    """A paragraph of ``prose.j2``, by its name, and the values that it mentions."""

    name: str
    values: Mapping[str, Any]
    kind: ClassVar[str] = "text"


Text = str | Prose
"""A paragraph: as it is, or of ``prose.j2``."""


def prose(name: str, /, **values: Any) -> Prose:
    return Prose(name, values)


@dataclass(frozen=True)
class Notice:
    """What a reader must know before trusting the numbers."""

    text: Text
    kind: ClassVar[str] = "notice"


@dataclass(frozen=True)
class Paragraphs:
    """Several texts in one paragraph."""

    texts: Sequence[Text]
    kind: ClassVar[str] = "paragraphs"


@dataclass(frozen=True)
class Bullets:
    items: Sequence[Text]
    kind: ClassVar[str] = "bullets"


@dataclass(frozen=True)
class Code:
    """Text that is shown letter by letter, such as a command or a sample."""

    text: str
    kind: ClassVar[str] = "code"


@dataclass(frozen=True)
class Cell:
    """A cell of a table that is more than its text."""

    text: str
    is_quiet: bool = False
    """Shown in grey: a difference that isn't significant."""
    is_strong: bool = False
    is_code: bool = False
    link: str = ""


@dataclass(frozen=True)
class Table:
    head: Sequence[str | Cell]
    rows: Sequence[Sequence[str | Cell]]
    has_numbers: bool = False
    """Whether all columns but the first are aligned on their right."""
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Figure:
    """A drawing in the folder of figures."""

    file: str
    title: str
    """For those who can't see it."""
    captions: Sequence[Text]
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Point:
    """A mean in a [`Chart`][], by its share of the width."""

    label: str
    color: str
    value: str
    """As it is shown beside the point."""
    mean: float
    low: float
    high: float
    """The ends of the interval; the mean if there is none."""


@dataclass(frozen=True)
class Chart:
    """Means as points with their intervals, one below the other, on a page."""

    title: Text
    points: Sequence[Point]
    first: str
    last: str
    """The values at both ends of the axis."""
    zero: float | None = None
    """Where the line of no difference is."""
    kind: ClassVar[str] = "chart"


@dataclass(frozen=True)
class Details:
    """What few readers want: a page folds it."""

    title: str
    blocks: "Sequence[Block]"
    kind: ClassVar[str] = "details"


Block = Text | Notice | Paragraphs | Bullets | Code | Table | Figure | Chart | Details


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class ReportData:
    """All that a report says, in its order."""

    title: str
    warnings: Sequence[Text] = ()
    claims: Sequence[Block] = ()
    """What the runs show, and what they don't."""
    chart: Chart | None = None
    """Only on the page: the numbers of the first table."""
    tables: Sequence[Block] = ()
    """The results, and what a reader must know about them."""
    figures: Sequence[Block] = ()
    sections: Sequence[Section] = ()
    answer: Sequence[Block] = ()
    """What a terminal shows below the title."""

    @property
    def opening(self) -> list[Block]:
        """What is before the first section."""
        notices = [Notice(warning) for warning in self.warnings]
        return [*notices, *self.claims, *self.tables, *self.figures]
