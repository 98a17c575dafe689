"""The decoding benchmark's results as Markdown."""

from functools import partial
from statistics import median

from experiments.benchmarks.measuring import Result, spread
from experiments.benchmarks.peers import LABML
from memformers.report.markdown import table

PAPERS = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""Its ratios (Dai et al. 2019, arXiv 1901.02860, section 4.5)."""
milliseconds = partial(spread, scale=1e3)


def report(results: Result) -> str:
    """The results as Markdown."""
    facts, c, writing = results["environment"], results["config"], results["writing"]
    bandwidth = median(writing["bytes a second"])
    written = []
    for name, seconds in writing["seconds"].items():
        ms, cells = milliseconds(seconds), ["–"] * 4
        if size := writing["bytes"].get(name):
            products = milliseconds(writing["seconds of torch.mv"][name])
            share = size / bandwidth / median(seconds)
            cells = [f"{size / 1e6:.0f}", f"{share:.0%}", str(products), f"{products.median / ms.median:.0%}"]
        written.append([name, str(ms), f"{1e3 / ms.median:.0f}", *cells])
    read = []
    for r in results["reading"]:
        sliding = median(r["sliding"])
        ways = [str(milliseconds(r[way])) for way in ("cached", "forward")]
        ratios = f"{sliding / median(r['cached']):,.0f}", f"{PAPERS[r['length']]:,}"
        read.append([str(r["length"]), *ways, f"{sliding:.2f}", *ratios])
    stepped = []
    for r in results["acting"]["steps"]:
        step, gru, again = (milliseconds(r["seconds"][way]) for way in ("stepper", "gru", "segment"))
        ratios = f"{step.median / gru.median:.1f}", f"{again.median / step.median:.1f}"
        stepped.append([str(r["streams"]), str(step), str(gru), str(again), *ratios])
    core, device = results["acting"]["core"], results["acting"]["device"]
    losses, long_text = results["rounding"], results["long text"]
    first, last = (milliseconds(long_text[part]) for part in ("early", "late"))
    prompt, evaluated = (milliseconds(results["prefill"][k]) for k in ("prefill", "evaluated"))
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    parts = [
        "# Writing and reading long texts",
        f"D = {c['d_model']}, H = {c['heads']}, FFN {c['d_ff']}, {c['n_layers']} layers, one stream. "
        "Medians, in brackets quartiles. Made by `make bench-decoding`.",
        f"{facts['device']}, {facts['threads']} threads; {packages}.",
        "## Writing",
        f"Token by token over a full memory of {c['mem_len']} (segments of {c['segment_len']}), interleaved; "
        f"logits agree with {LABML}'s, from the same weights, to {writing['error']:.0e}. The "
        "limit is the time to read weights, keys, values and position vectors once, at the rate at which a "
        f"sum reads memory, {bandwidth / 1e9:.0f} GB/s in this run. Beside it, the time that `torch.mv` "
        f"takes to read as many bytes of the same dtype, in matrices of {c['d_ff']} × {c['d_model']}.",
        table(["", "ms a token", "tokens/s", "MB a token", "share of the limit",
               "torch.mv of as many bytes, ms", "speed as a share of torch.mv's"], written),
        "Whether bfloat16 is the faster one is a matter of the CPU's instructions for it. "
        f"What bfloat16 costs in quality: a model of the comparison, trained for "
        f"{results['rounding tokens']:,} tokens on the built-in play, predicts held-out text at "
        f"{losses['float32']:.4f} nats per token in float32 and at {losses['bfloat16']:.4f} with weights and "
        "caches in bfloat16.",
        f"From nothing remembered, {long_text['tokens']:,} tokens: {first} ms a token just after "
        f"the memory is full, {last} ms at the end.",
        "## Reading",
        "Seconds a token of evaluation, against how far back every prediction sees at least. Without memory, "
        "that takes a window that slides by one token and is computed anew each time (three samples). The "
        "paper's ratios were measured on a GPU with its own model.",
        table(["sees back", "cached, ms a token", "forward pass, ms a token", "sliding window, s a token",
               "sliding / cached", "the paper's"], read),
        f"Prefill, which reads a prompt, takes {prompt} ms a token over a memory of {c['mem_len']} that "
        f"fills on the way; evaluating the same text as one stream takes {evaluated} ms. So prefill has "
        f"{evaluated.median / prompt.median:.0%} of evaluation's speed.",
        "## Acting",
        f"Processor time, with one thread ({device}), of one step of all streams over a full memory: by the "
        f"stepper of a Compressive `MemoryCore` (D = {core['d_model']}, {core['n_layers']} layers, M = "
        f"{core['mem_len']}, C = {core['c_mem_len']}); by nn.GRU, as wide and deep; and by reading the whole "
        f"segment of {core['segment_len']} again. Outputs of the first and the last agree.",
        table(["streams", "stepper, ms", "nn.GRU, ms", "segment again, ms", "stepper / nn.GRU",
               "segment again / stepper"], stepped),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"
