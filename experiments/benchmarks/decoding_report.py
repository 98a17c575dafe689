"""The decoding benchmark's results as Markdown."""

from statistics import median
from typing import Any

from experiments.benchmarks.markdown import row, table
from experiments.benchmarks.peers import LABML
from experiments.benchmarks.spread import Spread, spread
from memformers.common.files import config_from_dict
from memformers.models.config import ModelConfig, upgraded

PAPERS = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""Its ratios (Dai et al. 2019, arXiv 1901.02860, section 4.5)."""


def report(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    facts, c = (
        results["environment"],
        config_from_dict(ModelConfig, upgraded(results["config"]), "decoding.json"),
    )
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    lines = [
        "# Writing and reading long texts",
        "",
        f"D = {c.d_model}, H = {c.heads}, FFN {c.d_ff}, {c.n_layers} layers, one stream. Medians, in "
        "brackets quartiles. Made by `make bench-decoding`.",
        "",
        f"{facts['device']}, {facts['threads']} threads; {packages}.",
        "",
        "## Writing",
        "",
        f"Token by token over a full memory of {c.mem_len} (segments of {c.segment_len}), interleaved; "
        f"logits agree with {LABML}'s, from the same weights, to {results['writing']['error']:.0e}. The "
        "limit is the time to read weights, keys, values and position vectors once, at the rate at which a "
        f"sum reads memory, {median(results['writing']['bytes a second']) / 1e9:.0f} GB/s in this run. "
        "Beside it, the time that `torch.mv` takes to read as many bytes of the same dtype, in matrices of "
        f"{c.d_ff} × {c.d_model}.",
        "",
        table(
            "",
            "ms a token",
            "tokens/s",
            "MB a token",
            "share of the limit",
            "`torch.mv` of as many bytes, ms",
            "speed as a share of `torch.mv`'s",
        ),
    ]
    writing = results["writing"]
    bandwidth = median(writing["bytes a second"])
    for name, seconds in writing["seconds"].items():
        size = writing["bytes"].get(name)
        share = f"{size / bandwidth / median(seconds):.0%}" if size else "–"
        ms = milliseconds(seconds)
        cells = [str(ms), f"{1e3 / ms.median:.0f}", f"{size / 1e6:.0f}" if size else "–", share]
        products = milliseconds(writing["seconds of torch.mv"][name]) if size else None
        cells += [str(products), f"{products.median / ms.median:.0%}"] if products else ["–", "–"]
        lines.append(row(name, *cells))
    first, last = (milliseconds(results["long text"][part]) for part in ("early", "late"))
    losses = results["rounding"]
    lines += [
        "",
        "Whether bfloat16 is the faster one is a matter of the CPU's instructions for it. "
        f"What bfloat16 costs in quality: a model of the comparison, trained for "
        f"{results['rounding tokens']:,} tokens on the built-in play, predicts held-out text at "
        f"{losses['float32']:.4f} nats a token in float32 and at {losses['bfloat16']:.4f} with weights and "
        "caches in bfloat16.",
        "",
        f"From nothing remembered, {results['long text']['tokens']:,} tokens: {first} ms a token just after "
        f"the memory is full, {last} ms at the end.",
        "",
        "## Reading",
        "",
        "Seconds a token of evaluation, against how far back every prediction sees at least. Without memory, "
        "that takes a window that slides by one token and is computed anew each time (three samples). The "
        "paper's ratios were measured on a GPU with its own model.",
        "",
        table("sees back", "cached, ms a token", "forward pass, ms a token", "sliding window, s a token",
              "sliding / cached", "the paper's"),
    ]  # fmt: skip
    for r in results["reading"]:
        cached, forward = milliseconds(r["cached"]), milliseconds(r["forward"])
        ratio = median(r["sliding"]) / median(r["cached"])
        lines.append(row(r["length"], str(cached), str(forward), f"{median(r['sliding']):.2f}",
                         f"{ratio:,.0f}", f"{PAPERS[r['length']]:,}"))  # fmt: skip
    prompt, evaluated = (milliseconds(results["prefill"][k]) for k in ("prefill", "evaluated"))
    lines += [
        "",
        f"Prefill, which reads a prompt, takes {prompt} ms a token over a memory of {c.mem_len} that fills "
        f"on the way; evaluating the same text as one stream takes {evaluated} ms. So prefill has "
        f"{evaluated.median / prompt.median:.0%} of evaluation's speed.",
    ]
    return "\n".join(lines) + "\n"


def milliseconds(seconds: list[float]) -> Spread:
    """Median and quartiles in milliseconds."""
    return spread([1e3 * t for t in seconds])
