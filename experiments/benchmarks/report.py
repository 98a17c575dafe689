"""The report of the measurements, as Markdown and a figure."""

from pathlib import Path
from statistics import median

from experiments.benchmarks.attention_report import FIGURE, attention_alone, attention_on_gpu
from experiments.benchmarks.cases import CASES, Case
from experiments.benchmarks.figure import draw_attention
from experiments.benchmarks.limits import multiply_share, what_limits
from experiments.benchmarks.markdown import Result, mebibytes, row, table
from experiments.benchmarks.peers import LABML, LUCIDRAINS
from experiments.benchmarks.spread import times_as_fast
from experiments.benchmarks.training import BFLOAT16, COMPILED, LABML_FUSED, OURS
from experiments.benchmarks.variants_report import boundaries, compressions
from memformers.common.files import write_text


def write_report(results: Result, folder: Path) -> None:
    """Write ``RESULTS.md`` and its figure to ``folder``, from the measurements."""
    if results.get("attention"):
        draw_attention(results["attention"], folder / FIGURE)
    write_text(folder / "RESULTS.md", report(results))


def report(results: Result) -> str:
    """The whole report, with a section for each measurement that was made."""
    lines = ["# Speed and memory beside other implementations", "", *about(results)]
    steps = results.get("training", [])
    if steps:
        lines += [*beside_labml(steps), *modes(steps), *beside_lucidrains(steps)]
    if results.get("starts"):
        lines += boundaries(results["starts"])
    if results.get("compressions"):
        lines += compressions(results["compressions"])
    if results.get("attention"):
        lines += attention_alone(results["attention"])
        lines += attention_on_gpu(results)
    if steps:
        lines += what_limits(steps)
    if names := {r["case"]: None for part in ("training", "starts") for r in results.get(part, [])}:
        lines += shapes([CASES[name] for name in names])
    return "\n".join(lines) + "\n"


def about(results: Result) -> list[str]:
    """The machine and the method of the measurements."""
    where = results["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    rates = [
        x for r in results.get("training", []) + results.get("attention", []) for x in r["torch.mm, FLOP/s"]
    ]
    rate = [f"`torch.mm` of 1024 × 1024 matrices at {median(rates) / 1e9:.0f} GFLOP/s"] if rates else []
    quick = ["**A quick run: it shows that everything runs, and its numbers mean nothing.**", ""]
    return [
        *(quick if results["quick"] else []),
        "; ".join(
            [
                f"{where['device']}, {where['threads']} threads, {where['platform']}",
                f"Python {where['python']}",
                *rate,
                f"{packages}.",
            ]
        ),
        "",
        "Everything is float32 and eager unless another mode is named. The implementations take one step "
        "each in turn, and `torch.mm` is timed after every step. The numbers are medians, with quartiles "
        "over rounds in brackets. `make bench` makes this page; `results.json` has every single time.",
    ]


def beside_labml(steps: list[Result]) -> list[str]:
    """Tokens/s and memory of ours and labml-nn."""
    lines = [
        "",
        "## Whole training steps beside labml-nn 0.5.1",
        "",
        "A step is forward, backward, clip and AdamW of embedding, layers and head, with learned positions, "
        "from the same weights and with full memories. Before, logits and reconstruction losses over growing "
        f"memories, and the whole gradient, are compared: they agree to "
        f"{max(r['parity error'] for r in steps):.0e} (RMS, relative). labml-nn uses PyTorch's "
        "default AdamW, and in the second-to-last column the fused one, which ours uses too.",
        "",
        table("case", "model", "ours, tokens/s", "labml-nn, tokens/s", "ratio",
              "ratio with fused AdamW", "share of `torch.mm`"),
    ]  # fmt: skip
    for r in steps:
        ours, theirs = r["seconds"][OURS], r["seconds"][LABML]
        lines.append(row(
            r["case"], r["model"], tokens_per_second(r, OURS), tokens_per_second(r, LABML),
            str(times_as_fast(ours, theirs)),
            str(times_as_fast(ours, r["seconds"][LABML_FUSED])), f"{multiply_share(r):.0%}",
        ))  # fmt: skip
    lines += [
        "",
        "The share is the model's operations a second divided by those of `torch.mm`. PyTorch counts them: "
        "the matrix products that the forward and backward passes compute with the naive kernel, also "
        "those that the causal mask hides.",
        "",
        "Peak resident memory of a separate process, in MiB, with Python and PyTorch:",
        "",
        table("case", "model", "ours", "labml-nn", LUCIDRAINS),
    ]
    for r in steps:
        peaks = [mebibytes(r["peak memory"].get(side)) for side in (OURS, LABML, LUCIDRAINS)]
        lines.append(row(r["case"], r["model"], *peaks))
    return lines


def modes(steps: list[Result]) -> list[str]:
    """Ours in bfloat16 and compiled, beside ours in float32, eager."""
    lines = [
        "",
        "## Other modes of ours",
        "",
        "These are multiples of our own speed in float32, eager. bfloat16 is `torch.autocast` around forward "
        "and loss. Compiled is `model.compile(fullgraph=True)`.",
        "",
        table("case", "model", "float32, tokens/s", "bfloat16", "compiled", "seconds to compile"),
    ]
    for r in steps:
        cells = [
            str(times_as_fast(r["seconds"][side], r["seconds"][OURS])) if side in r["seconds"]
            else f"not run: {r['not run'][side]}"
            for side in (BFLOAT16, COMPILED)
        ]  # fmt: skip
        seconds = f"{r['seconds to compile']:.0f}" if "seconds to compile" in r else "–"
        lines.append(row(r["case"], r["model"], tokens_per_second(r, OURS), *cells, seconds))
    return lines


def beside_lucidrains(steps: list[Result]) -> list[str]:
    """Tokens/s of ours and compressive-transformer-pytorch."""
    lines = [
        "",
        "## Compressive Transformer beside compressive-transformer-pytorch 0.4.0",
        "",
        "Both have the same width, heads, depth, segment, memories and rate, plain residuals "
        "(`gru_gated_residual=False`), a memory for each layer (`enhanced_recurrence=False`) and the "
        "reconstruction loss. It is another architecture, so only speed can be compared:",
        "",
        "- it has one table of positions for all layers, no u and no s_d, which is less work;",
        "- its feed-forward network has width 4 D and GELU (ours in the case seed: 2 D; elsewhere the same);",
        "- it stores the normalized inputs of a layer, so it doesn't normalize memory again, and it has no "
        "final norm;",
        "- it freezes its key and value weights when it computes the reconstruction loss, so its backward "
        "pass computes no gradient of them, and they are never trained.",
        "",
        table("case", "ours, tokens/s", "compressive-transformer-pytorch, tokens/s", "ratio"),
    ]
    for r in steps:
        if LUCIDRAINS in r["seconds"]:
            ratio = times_as_fast(r["seconds"][OURS], r["seconds"][LUCIDRAINS])
            speeds = tokens_per_second(r, OURS), tokens_per_second(r, LUCIDRAINS)
            lines.append(row(r["case"], *speeds, str(ratio)))
        elif LUCIDRAINS in r["not run"]:
            lines.append(
                row(r["case"], tokens_per_second(r, OURS), f"not run: {r['not run'][LUCIDRAINS]}", "–")
            )
    return lines


def shapes(cases: list[Case]) -> list[str]:
    """The sizes behind the cases' names."""
    lines = ["", "## Shapes", "", table("case", "D", "H", "FFN", "layers", "S", "M", "C", "c", "B")]
    for case in cases:
        m = case.config
        sizes = m.d_model, m.heads, m.d_ff, m.n_layers, m.segment_len, m.mem_len, m.c_mem_len
        lines.append(row(case.name, *sizes, m.compression_rate, case.batch_size))
    return lines


def tokens_per_second(r: Result, side: str) -> str:
    """A side's speed."""
    return f"{r['tokens'] / median(r['seconds'][side]):,.0f}"
