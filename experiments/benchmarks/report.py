"""The report of the measurements, as Markdown and a figure."""

from pathlib import Path
from statistics import median

from experiments.benchmarks.attention_report import (
    FIGURE,
    attention_alone,
    attention_on_gpu,
    draw_attention,
    mebibytes,
)
from experiments.benchmarks.cases import SIZES
from experiments.benchmarks.measuring import Result, spread, times_as_fast
from experiments.benchmarks.peers import LABML, LUCIDRAINS
from experiments.benchmarks.training import BFLOAT16, COMPILED, KINDS, LABML_FUSED, OPTIMIZER, OTHER, OURS
from experiments.benchmarks.variants import PLAIN_OF, SEGMENTS_A_DOCUMENT, STARTS
from memformers.common.files import write_text
from memformers.report.markdown import table


def write_report(results: Result, folder: Path) -> None:
    """Write ``RESULTS.md`` and its figure to ``folder``, from the measurements."""
    if results.get("attention"):
        draw_attention(results["attention"], folder / FIGURE)
    write_text(folder / "RESULTS.md", report(results))


def report(results: Result) -> str:
    """The whole report, with a section for each measurement that was made."""
    parts = about(results)
    steps = results.get("training", [])
    if steps:
        parts += [*beside_labml(steps), *modes(steps), *beside_lucidrains(steps)]
    if results.get("starts"):
        parts += boundaries(results["starts"])
    if results.get("compressions"):
        parts += compressions(results["compressions"])
    if results.get("attention"):
        parts += [*attention_alone(results["attention"]), *attention_on_gpu(results)]
    if steps:
        parts += what_limits(steps)
    if names := {r["case"]: None for part in ("training", "starts") for r in results.get(part, [])}:
        parts += shapes(list(names))
    return "\n\n".join(parts) + "\n"


def about(results: Result) -> list[str]:
    """The machine and the method of the measurements."""
    where = results["environment"]
    rates = [
        x for r in results.get("training", []) + results.get("attention", []) for x in r["torch.mm, FLOP/s"]
    ]
    facts = [
        f"{where['device']}, {where['threads']} threads, {where['platform']}",
        f"Python {where['python']}",
    ]
    if rates:
        facts.append(f"`torch.mm` of 1024 × 1024 matrices at {median(rates) / 1e9:.0f} GFLOP/s")
    facts.append(", ".join(f"{name} {version}" for name, version in where["packages"].items()))
    quick = ["**A quick run: it shows that everything runs, and its numbers mean nothing.**"]
    return [
        "# Speed and memory beside other implementations",
        *(quick if results["quick"] else []),
        "; ".join(facts) + ".",
        "Everything is float32 and eager unless another mode is named. The implementations take one step "
        "each in turn, and `torch.mm` is timed after every step. The numbers are medians, with quartiles "
        "over rounds in brackets. `make bench` makes this page; `results.json` has every single time.",
    ]


def beside_labml(steps: list[Result]) -> list[str]:
    """Tokens/s and memory of ours and labml-nn."""
    speeds = []
    for r in steps:
        share = r["flops"] / median(r["seconds"][OURS]) / median(r["torch.mm, FLOP/s"])
        ratios = ratio(r, OURS, LABML), ratio(r, OURS, LABML_FUSED), f"{share:.0%}"
        speeds.append(
            [r["case"], r["model"], *(tokens_per_second(r, side) for side in (OURS, LABML)), *ratios]
        )
    sides = (OURS, LABML, LUCIDRAINS)
    peaks = [
        [r["case"], r["model"], *(mebibytes(r["peak memory"].get(side)) for side in sides)] for r in steps
    ]
    return [
        "## Whole training steps beside labml-nn 0.5.1",
        "A step is forward, backward, clip and AdamW of embedding, layers and head, with learned positions, "
        "from the same weights and with full memories. Before, logits and reconstruction losses over growing "
        f"memories, and the whole gradient, are compared: they agree to "
        f"{max(r['parity error'] for r in steps):.0e} (RMS, relative). labml-nn uses PyTorch's "
        "default AdamW, and in the second-to-last column the fused one, which ours uses too.",
        table(["case", "model", "ours, tokens/s", "labml-nn, tokens/s", "ratio", "ratio with fused AdamW",
               "share of torch.mm"], speeds),
        "The share is the model's operations a second divided by those of `torch.mm`. PyTorch counts them: "
        "the matrix products that the forward and backward passes compute with the naive kernel, also "
        "those that the causal mask hides.",
        "Peak resident memory of a separate process, in MiB, with Python and PyTorch:",
        table(["case", "model", *sides], peaks),
    ]  # fmt: skip


def modes(steps: list[Result]) -> list[str]:
    """Ours in bfloat16 and compiled, beside ours in float32, eager."""
    rows = []
    for r in steps:
        seconds = f"{r['seconds to compile']:.0f}" if "seconds to compile" in r else "–"
        speeds = ratio(r, BFLOAT16, OURS), ratio(r, COMPILED, OURS)
        rows.append([r["case"], r["model"], tokens_per_second(r, OURS), *speeds, seconds])
    return [
        "## Other modes of ours",
        "These are multiples of our own speed in float32, eager. bfloat16 is `torch.autocast` around forward "
        "and loss. Compiled is `model.compile(fullgraph=True)`.",
        table(["case", "model", "float32, tokens/s", "bfloat16", "compiled", "seconds to compile"], rows),
    ]


def beside_lucidrains(steps: list[Result]) -> list[str]:
    """Tokens/s of ours and compressive-transformer-pytorch."""
    rows = []
    for r in steps:
        if LUCIDRAINS in r["seconds"]:
            speeds = tokens_per_second(r, LUCIDRAINS), ratio(r, OURS, LUCIDRAINS)
        elif LUCIDRAINS in r["not run"]:
            speeds = ratio(r, LUCIDRAINS, OURS), "–"
        else:
            continue
        rows.append([r["case"], tokens_per_second(r, OURS), *speeds])
    return [
        "## Compressive Transformer beside compressive-transformer-pytorch 0.4.0",
        "Both have the same width, heads, depth, segment, memories and rate, plain residuals "
        "(`gru_gated_residual=False`), a memory for each layer (`enhanced_recurrence=False`) and the "
        "reconstruction loss. It is another architecture, so only speed can be compared:",
        "- it has one table of positions for all layers, no u and no s_d, which is less work;\n"
        "- its feed-forward network has width 4 D and GELU (ours in the case seed: 2 D; elsewhere the same);"
        "\n"
        "- it stores the normalized inputs of a layer, so it doesn't normalize memory again, and it has no "
        "final norm;\n"
        "- it freezes its key and value weights when it computes the reconstruction loss, so its backward "
        "pass computes no gradient of them, and they are never trained.",
        table(["case", "ours, tokens/s", "compressive-transformer-pytorch, tokens/s", "ratio"], rows),
    ]


def boundaries(results: list[Result]) -> list[str]:
    """By how much steps with starts of documents are slower."""
    rows = []
    for r in results:
        for side, plain in PLAIN_OF.items():
            pairs = zip(r["seconds"][side], r["seconds"][plain], strict=True)
            milliseconds = (f"{1000 * median(r['seconds'][name]):.1f}" for name in (plain, side))
            precision = "float32" if side == STARTS else "bfloat16"
            slower = spread([100 * (a / b - 1) for a, b in pairs])
            rows.append([r["case"], r["model"], precision, *milliseconds, f"{slower:.1f}"])
    return [
        "## Boundaries of documents",
        f"By how much a whole training step with `doc_starts` is slower than the same step without. "
        f"Documents begin anywhere in a stream, after {SEGMENTS_A_DOCUMENT} segments on average. "
        f"With `doc_starts` in which no document begins, logits agree to "
        f"{max(r['error'] for r in results):.0e} (RMS, relative) before anything is timed.",
        table(["case", "model", "precision", "ms without", "ms with", "slower by, %"], rows),
    ]


def compressions(result: Result) -> list[str]:
    """How long steps with each compression take beside the convolution."""
    reference, *_ = result["seconds"].values()
    rows = [
        [*name.split(", "), f"{1000 * median(seconds):.1f}", str(times_as_fast(reference, seconds))]
        for name, seconds in result["seconds"].items()
    ]
    return [
        "## Compressions",
        f"A whole training step of the Compressive Transformer on {result['case']} with each compression, "
        f"as a multiple of the time that it takes with the convolution. Compressions without parameters "
        f"learn nothing from the attention-reconstruction loss, which then only measures; without a loss, "
        f"they don't compute it.",
        table(["compression", "compression loss", "ms a step", "times the convolution's time"], rows),
    ]


def what_limits(steps: list[Result]) -> list[str]:
    """Where the time of a step goes."""
    kinds, rows = [*KINDS, OPTIMIZER, OTHER], []
    for r in steps:
        faster = times_as_fast(r["seconds"][OURS], r["seconds"][LABML]).median
        alone = f"{faster / r['profile']['matrix products']:.1f}"
        rows.append([r["case"], r["model"], *(f"{100 * r['profile'][kind]:.0f}" for kind in kinds), alone])
    return [
        "## What limits it",
        "The time of our step by kind of operator, in percent of the operators' own time that the profiler "
        "measured (float32, eager, 3 steps). The last column is an estimate of our speed as a multiple of "
        "labml-nn's if everything except these matrix products took no time:",
        table(["case", "model", *kinds, "products alone"], rows),
    ]


def shapes(names: list[str]) -> list[str]:
    """The sizes behind the cases' names."""
    rows = [[name, *map(str, SIZES[name][:-1])] for name in names]
    return ["## Shapes", table(["case", "D", "H", "FFN", "layers", "S", "M", "C", "c", "B"], rows)]


def tokens_per_second(r: Result, side: str) -> str:
    """A side's speed."""
    return f"{r['tokens'] / median(r['seconds'][side]):,.0f}"


def ratio(r: Result, side: str, reference: str) -> str:
    """A side's speed as a multiple of the reference's, or why the side wasn't run."""
    if side in r["seconds"]:
        return str(times_as_fast(r["seconds"][side], r["seconds"][reference]))
    return f"not run: {r['not run'][side]}"
