"""Tables of what computes attention, and of what a large text takes."""

from docs.building.results import mean, rows, seeds, table_of
from docs.building.tables.cells import Row, bits, more, share
from memformers.common.intervals import paired
from memformers.report.numbers import DASH
from memformers.report.rendering import markdown_table

POSITION_ARMS = {
    "all": "P = D, wavelengths up to 10,000 · 2π",
    "p16": "16, the same wavelengths",
    "p16-1k": "16, up to 1,000 · 2π",
    "p8-1k": "8, up to 1,000 · 2π",
    "p8-fit": "8, up to four times the longest distance",
}
"""The arms of ``position_features``, as a table shows them."""
POSITIONS = ("position_features", "position_features_subwords", "position_features_recall")
"""The experiments with these arms."""


def position_features() -> str:
    """Losses with several numbers of position features, and the difference from P = D, by text, and the share
    of correct answers on the recall stream."""
    # Experiments measure different texts.
    measured = []
    for experiment in POSITIONS:
        for measure in dict.fromkeys(row["measure"] for row in rows(experiment)):
            measured.append((experiment, measure))

    head = ["position features"]
    for _, measure in measured:
        text = measure.removeprefix("held-out loss, ").removesuffix(" (nats)")
        head.append(text if "correct" in text else f"held-out loss, {text}, nats")
        head.append("vs. P = D")

    body: list[Row] = []
    for arm, shown in POSITION_ARMS.items():
        row: Row = [shown]
        for experiment, measure in measured:
            values = seeds(experiment, arm, measure)
            base = seeds(experiment, "all", measure)
            is_share = "correct" in measure
            row.append(share(mean(values)) if is_share else bits(mean(values)))
            is_compared = values and arm != "all"
            row.append(more(paired(values, base), points=is_share) if is_compared else DASH)
        body.append(row)
    return markdown_table(head, body, numbers=True)


def flash_steps() -> str:
    """CPU time of a training step with 16 position features, by what computes their attention and by size."""
    rows_of_file = table_of("flash_steps")
    _, *sizes = rows_of_file[0]
    head = ["attention with 16 position features", *(f"{size}, ms" for size in sizes)]
    return markdown_table(head, [[*row.values()] for row in rows_of_file], numbers=True)


def large_text() -> str:
    return markdown_table(
        ["what", "measured", "goal"], [[*row.values()] for row in rows("large_text")], numbers=True
    )
