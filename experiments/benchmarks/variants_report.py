"""What steps with starts and with each compression cost, as Markdown."""

from statistics import median

from experiments.benchmarks.markdown import Result, row, table
from experiments.benchmarks.spread import Spread, spread
from experiments.benchmarks.variants import PLAIN_OF, SEGMENTS_A_DOCUMENT, STARTS


def boundaries(results: list[Result]) -> list[str]:
    """By how much steps with starts are slower."""
    lines = [
        "",
        "## Boundaries of documents",
        "",
        f"By how much a whole training step with `doc_starts` is slower than the same step without. "
        f"Documents begin anywhere in a stream, after {SEGMENTS_A_DOCUMENT} segments on average. "
        f"With `doc_starts` in which no document begins, logits agree to "
        f"{max(r['error'] for r in results):.0e} (RMS, relative) before anything is timed.",
        "",
        table("case", "model", "precision", "ms without", "ms with", "slower by, %"),
    ]
    for r in results:
        for side, plain in PLAIN_OF.items():
            slower = slower_by(r["seconds"][side], r["seconds"][plain])
            lines.append(row(
                r["case"], r["model"], "float32" if side == STARTS else "bfloat16",
                *(f"{1000 * median(r['seconds'][name]):.1f}" for name in (plain, side)),
                f"{slower.median:.1f} ({slower.low:.1f} – {slower.high:.1f})",
            ))  # fmt: skip
    return lines


def compressions(result: Result) -> list[str]:
    """How long steps with each compression take beside the convolution."""
    reference, *_ = result["seconds"].values()
    lines = [
        "",
        "## Compressions",
        "",
        f"A whole training step of the Compressive Transformer on {result['case']} with each compression, "
        f"as a multiple of the time that it takes with the convolution. Compressions without parameters "
        f"learn nothing from the attention-reconstruction loss, which then only measures; without a loss, "
        f"they don't compute it.",
        "",
        table("compression", "compression loss", "ms a step", "times the convolution's time"),
    ]
    for name, seconds in result["seconds"].items():
        times = spread([a / b for a, b in zip(seconds, reference, strict=True)])
        compression, loss = name.split(", ")
        lines.append(row(compression, loss, f"{1000 * median(seconds):.1f}", times))
    return lines


def slower_by(seconds: list[float], reference: list[float]) -> Spread:
    """By how many percent something with these ``seconds`` is slower than the reference, by rounds."""
    return spread([100 * (a / b - 1) for a, b in zip(seconds, reference, strict=True)])
