"""Writing and reading long texts with cached keys and values, beside doing without them.

Run it with ``make bench-decoding`` or ``python -m experiments.benchmarks.decoding``; it writes
``DECODING.md`` and ``decoding.json`` beside itself.
"""

import random
import string
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from experiments.benchmarks.decoding_report import report
from experiments.benchmarks.machine import relative_error
from experiments.benchmarks.peers import LABML, LabmlLM
from memformers import MemoryLM, ModelConfig, from_labml
from memformers.common.files import write_json, write_text
from memformers.common.machine import describe_environment
from memformers.data.corpora import builtin_corpus
from memformers.data.tokenizers import CharacterTokenizer
from memformers.evaluation.evaluate import evaluate
from memformers.generation.decoding import Decoder
from memformers.generation.text import TextStream
from memformers.models.memory import Memory
from memformers.pretrained.own import load_checkpoint
from memformers.training.config import TrainConfig
from memformers.training.run import train_run

HERE = Path(__file__).parent
CONFIG = ModelConfig(vocab_size=65, d_model=512, heads=8, d_ff=2048, n_layers=6, segment_len=64, mem_len=2048)
LENGTHS = (800, 1800, 2800, 3800)
"""How far back a prediction sees, as in the Transformer-XL paper's table of evaluation speed."""
ALPHABET = string.ascii_letters + string.punctuation[: CONFIG.vocab_size - 52]
ROUNDING_TOKENS = 200_000
"""For how long the model is trained of which bfloat16's loss is measured."""


def full_decoder(model: MemoryLM) -> Decoder:
    """A decoder of one stream whose memory is full, of random inputs."""
    config, like = model.config, model.head.weight
    shapes = [(own.mem_len, 1, config.d_model) for own in config.layer_lengths]
    mem = tuple(torch.randn(shape).to(like) for shape in shapes)
    return Decoder(model, 1, Memory(mem))


def bytes_read(decoder: Decoder) -> int:
    """Bytes that a token needs from memory, each once: weights but for the embedding, keys, values and
    position vectors."""
    model = decoder.model
    embedding = sum(p.numel() for p in model.embed.parameters())
    weights = sum(
        p.numel() for n, p in model.named_parameters() if not n.endswith(("self_attn.r", ".position.weight"))
    )
    cached = sum(
        len(layer.cache.recent) * 2 * decoder.config.d_model + layer.attention.terms["r"].numel()
        for layer in decoder.layers
    )
    return (weights - embedding + cached) * model.head.weight.element_size()


def read_bandwidth() -> float:
    """Bytes a second at which a sum over 256 MiB reads memory."""
    x = torch.randn(1 << 26)
    return x.numel() * 4 / median(timed(lambda: x.sum(), 9))


def vector_products(size: int, dtype: torch.dtype) -> Callable[[], None]:
    """``torch.mv`` with feed-forward matrices ``[4·D, D]`` that have ``size`` bytes together, one after the
    other, as a function."""
    matrix = torch.randn(CONFIG.d_ff, CONFIG.d_model).to(dtype)
    matrices = [matrix.clone() for _ in range(round(size / matrix.nbytes))]
    vector = torch.randn(CONFIG.d_model).to(dtype)

    def multiply() -> None:
        for one in matrices:
            torch.mv(one, vector)

    return multiply


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Seconds of each of this number of ``times``, after one call that isn't counted."""
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
    size = {name: bytes_read(decoder) for name, decoder in decoders.items()}
    vectors = {
        name: vector_products(size[name], decoder.model.head.weight.dtype)
        for name, decoder in decoders.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    products: dict[str, list[float]] = {name: [] for name in vectors}
    bandwidth = []
    for _ in tqdm(range(rounds), desc="writing", leave=False):
        bandwidth.append(read_bandwidth())
        for name, side in sides.items():
            seconds[name] += timed(side, tokens)
        for name, multiply in vectors.items():
            products[name] += timed(multiply, 3)
    return {
        "error": error,
        "seconds": seconds,
        "seconds of torch.mv": products,
        "bytes": size,
        "bytes a second": bandwidth,
    }


def full_copy(model: MemoryLM, memory: Memory) -> Decoder:
    """A decoder at the beginning of a segment after ``memory``."""
    return Decoder(model, 1, memory)


def prefilling(tokens: int = 4096, rounds: int = 3) -> dict[str, list[float]]:
    """Seconds a token of prefill, which reads a prompt, and of the same text's evaluation as one stream,
    interleaved."""
    tokenizer = CharacterTokenizer(ALPHABET)
    model = MemoryLM(CONFIG).eval()
    text = "".join(random.Random(0).choices(ALPHABET, k=tokens))
    encoded = tokenizer.encode(text)
    sides: dict[str, Callable[[], object]] = {
        "prefill": lambda: TextStream(model, tokenizer).read(text),
        "evaluated": lambda: evaluate(model, encoded, 1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in tqdm(range(rounds), desc="prefill", leave=False):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            seconds[name].append((time.perf_counter() - start) / tokens)
    return seconds


def rounding(training: int, tokens: int = 4000) -> dict[str, float]:
    """Mean loss, in nats, of a trained model that reads held-out text token by token, with weights and
    caches in float32 and in bfloat16."""
    with TemporaryDirectory() as folder:
        config = TrainConfig(data="builtin", tokens=training, evaluations=1)
        model, tokenizer = load_checkpoint(train_run(config, Path(folder) / "run"), torch.device("cpu"))
    text = tokenizer.encode(builtin_corpus().validation_text[: tokens + 1])
    losses = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        decoder = Decoder(model.to(dtype), 1)
        logits = torch.cat([decoder.read(token[None, None]) for token in text[:-1]]).float()
        losses[name] = F.cross_entropy(logits, text[1:]).item()
    return losses


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


def main() -> None:
    """Measure, and write everything down."""
    results: dict[str, Any] = {
        "environment": describe_environment(torch.device("cpu")),
        "config": asdict(CONFIG),
        "writing": writing(),
        "reading": [reading(length) for length in LENGTHS],
        "prefill": prefilling(),
        "rounding": rounding(ROUNDING_TOKENS),
        "rounding tokens": ROUNDING_TOKENS,
    }
    seconds = long_text()
    full = CONFIG.longest_attention
    early = slice(full, full + 1000)
    results["long text"] = {"tokens": len(seconds), "early": seconds[early], "late": seconds[-1000:]}
    write_json(HERE / "decoding.json", results)
    write_text(HERE / "DECODING.md", report(results))
    print(report(results))


if __name__ == "__main__":
    main()
