"""Writing and reading long texts with cached keys and values, beside doing without them.

Run it with ``make bench-decoding`` or ``python -m experiments.benchmarks.decoding``; it writes
``DECODING.md`` and ``decoding.json`` beside itself.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from experiments.benchmarks.machine import relative_error
from experiments.benchmarks.markdown import row, table
from experiments.benchmarks.peers import LABML, LabmlLM
from experiments.benchmarks.spread import Spread, spread
from memformers import MemoryLM, ModelConfig, from_labml
from memformers.decoding import Decoder
from memformers.environment import describe_environment
from memformers.files import write_json, write_text
from memformers.memory import Memory

HERE = Path(__file__).parent
CONFIG = ModelConfig(vocab_size=65, d_model=512, heads=8, d_ff=2048, n_layers=6, segment_len=64, mem_len=2048)
LENGTHS = (800, 1800, 2800, 3800)
"""How far back a prediction sees, as in the Transformer-XL paper's table of evaluation speed."""
PAPERS = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""Its ratios (Dai et al. 2019, arXiv 1901.02860, section 4.5)."""


def full_decoder(model: MemoryLM) -> Decoder:
    """A decoder of one stream whose memory is full, of random inputs."""
    config, like = model.config, model.embed.weight
    mem = tuple(torch.randn(config.mem_len, 1, config.d_model).to(like) for _ in range(config.n_layers))
    return Decoder(model, 1, Memory(mem))


def bytes_read(decoder: Decoder) -> int:
    """Bytes that a token needs from memory, each once: weights but for the embedding, keys, values and
    position vectors."""
    model = decoder.model
    embedding = model.embed.weight.numel()
    weights = sum(
        p.numel() for n, p in model.named_parameters() if not n.endswith(("self_attn.r", ".position.weight"))
    )
    cached = sum(len(c.recent) * 2 * decoder.config.d_model + c.r.numel() for c in decoder.caches)
    return (weights - embedding + cached) * model.embed.weight.element_size()


def read_bandwidth() -> float:
    """Bytes a second at which a sum over 256 MiB reads memory."""
    x = torch.randn(1 << 26)
    return x.numel() * 4 / median(timed(lambda: x.sum(), 9))


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Seconds of each of so many calls, after one."""
    call()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


@torch.no_grad()
def writing(rounds: int = 12, tokens: int = 10) -> dict[str, Any]:
    """Tokens a second of one stream with a full memory, interleaved; and that both sides agree."""
    torch.manual_seed(0)
    theirs = LabmlLM(replace(CONFIG, positions="learned")).eval()
    learned = MemoryLM(replace(CONFIG, positions="learned")).eval()
    learned.load_state_dict(from_labml(theirs.state_dict(), max_positions=CONFIG.longest_attention))
    sinusoidal = MemoryLM(CONFIG).eval()
    half = MemoryLM(CONFIG).eval().to(torch.bfloat16)
    token = torch.randint(CONFIG.vocab_size, (1, 1))
    decoders = {
        "float32, learned positions": full_decoder(learned),
        "float32, sinusoidal": full_decoder(sinusoidal),
        "bfloat16, sinusoidal": full_decoder(half),
    }
    memory = decoders["float32, learned positions"].memory()
    expected = theirs(token, (list(memory.mem), []))[0][-1]
    error = relative_error(full_copy(learned, memory).read(token), expected)
    if not error < 1e-4:
        raise ValueError(f"decoding with caches differs from {LABML} by {error:.1e}.")
    sides: dict[str, Callable[[], object]] = {
        name: lambda decoder=decoder: decoder.read(token)  # type: ignore[misc]
        for name, decoder in decoders.items()
    }
    sides[f"{LABML}'s way, the whole memory projected again"] = lambda: theirs(token, (list(memory.mem), []))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    bandwidth = []
    for _ in tqdm(range(rounds), desc="writing", leave=False):
        bandwidth.append(read_bandwidth())
        for name, side in sides.items():
            seconds[name] += timed(side, tokens)
    return {
        "error": error,
        "seconds": seconds,
        "bytes": {name: bytes_read(decoder) for name, decoder in decoders.items()},
        "bytes a second": bandwidth,
    }


def full_copy(model: MemoryLM, memory: Memory) -> Decoder:
    """A decoder at the beginning of a segment after ``memory``."""
    return Decoder(model, 1, memory)


def long_text(tokens: int = 20_000) -> list[float]:
    """Seconds of each token of a long text, from nothing remembered."""
    decoder, token = Decoder(MemoryLM(CONFIG).eval(), 1), torch.zeros(1, 1, dtype=torch.long)
    seconds = []
    for _ in tqdm(range(tokens), desc="a long text", leave=False):
        start = time.perf_counter()
        decoder.read(token)
        seconds.append(time.perf_counter() - start)
    return seconds


@torch.no_grad()
def reading(length: int, segment_len: int = 400, samples: int = 3) -> dict[str, Any]:
    """Seconds a token that sees ``length`` back: segments over a memory, with caches and by the forward
    pass; and without memory, a window that slides by one token and is computed anew."""
    config = replace(CONFIG, segment_len=segment_len, mem_len=length - segment_len)
    model = MemoryLM(config).eval()
    window = MemoryLM(replace(config, model="transformer", segment_len=length)).eval()
    text = torch.randint(config.vocab_size, (length, 1))
    segment, decoder = text[:segment_len], full_decoder(model)
    memory = decoder.memory()
    return {
        "length": length,
        "cached": [t / segment_len for t in timed(lambda: decoder.read(segment), 5)],
        "forward": [t / segment_len for t in timed(lambda: model(segment, memory), 5)],
        "sliding": timed(lambda: window(text), samples),
    }


def report(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    facts, c = results["environment"], CONFIG
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
        f"sum reads memory, {median(results['writing']['bytes a second']) / 1e9:.0f} GB/s in this run.",
        "",
        table("", "ms a token", "tokens/s", "MB a token", "share of the limit"),
    ]
    writing = results["writing"]
    bandwidth = median(writing["bytes a second"])
    for name, seconds in writing["seconds"].items():
        size = writing["bytes"].get(name)
        share = f"{size / bandwidth / median(seconds):.0%}" if size else "–"
        ms = milliseconds(seconds)
        lines.append(
            row(name, str(ms), f"{1e3 / ms.median:.0f}", f"{size / 1e6:.0f}" if size else "–", share)
        )
    first, last = (milliseconds(results["long text"][part]) for part in ("early", "late"))
    lines += [
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
    return "\n".join(lines) + "\n"


def milliseconds(seconds: list[float]) -> Spread:
    """Median and quartiles in milliseconds."""
    return spread([1e3 * t for t in seconds])


def main() -> None:
    """Measure, and write everything down."""
    results: dict[str, Any] = {
        "environment": describe_environment(torch.device("cpu")),
        "writing": writing(),
        "reading": [reading(length) for length in LENGTHS],
    }
    seconds = long_text()
    early = slice(CONFIG.mem_len + CONFIG.segment_len, CONFIG.mem_len + CONFIG.segment_len + 1000)
    results["long text"] = {"tokens": len(seconds), "early": seconds[early], "late": seconds[-1000:]}
    write_json(HERE / "decoding.json", results)
    write_text(HERE / "DECODING.md", report(results))
    print(report(results))


if __name__ == "__main__":
    main()
