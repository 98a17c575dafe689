"""Writing and reading long texts with cached keys and values, beside doing without them."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from experiments.benchmarks.measuring import Result, check_errors, in_turns, relative_error, timed
from experiments.benchmarks.peers import LABML, two_alike
from memformers import CoreConfig, MemoryCore, MemoryLM, ModelConfig, Stepper
from memformers.common.machine import describe_environment
from memformers.models.memory import LayerMemory, Memory

CONFIG = ModelConfig(
    vocab_size=65, d_model=512, n_heads=8, d_ff=2048, n_layers=6, segment_len=64, mem_len=2048
)
LENGTHS = (800, 1800, 2800, 3800)  # how far back a prediction sees, as in the Transformer-XL paper
CORE = CoreConfig("compressive", d_input=32, mem_len=64, c_mem_len=64)  # of an agent
TOLERANCE = 1e-4  # the largest relative RMS error of logits from caches


def full_decoder(model: MemoryLM) -> Stepper:
    config = model.config
    like = model.transformer.weight
    layers = []
    for size in config.memory_sizes:
        mem = torch.randn(size.mem_len, 1, config.d_model).to(like)
        layers.append(LayerMemory(mem, mem[:0]))
    return Stepper(model, 1, Memory(tuple(layers)))


def bytes_read(decoder: Stepper) -> int:
    """Bytes that a token needs: weights but for the embedding, keys, values and position vectors."""
    config, embedding = decoder.model.config, decoder.model.embed.parameters()
    named = decoder.model.named_parameters()
    weights = sum(p.numel() for n, p in named if not n.endswith(("self_attn.r", ".position.weight")))
    cached = 3 * config.n_layers * config.longest_attention * config.d_model
    return (weights - sum(p.numel() for p in embedding) + cached) * decoder.model.head.weight.element_size()


def vector_products(size: int, dtype: torch.dtype) -> Callable[[], object]:
    """``torch.mv`` with matrices ``[4·D, D]`` of ``size`` bytes together, as a function."""
    vector, matrix = torch.randn(CONFIG.d_model).to(dtype), torch.randn(CONFIG.d_ff, CONFIG.d_model).to(dtype)
    matrices = [matrix.clone() for _ in range(round(size / matrix.nbytes))]
    return lambda: [torch.mv(one, vector) for one in matrices]


@torch.no_grad()
def writing(rounds: int, tokens: int) -> Result:
    torch.manual_seed(0)
    learned, theirs = two_alike(replace(CONFIG, positions="learned"))
    learned.eval(), theirs.eval()
    sinusoidal, half = MemoryLM(CONFIG).eval(), MemoryLM(CONFIG).eval().to(torch.bfloat16)
    token = torch.randint(CONFIG.n_tokens, (1, 1))
    decoders = {
        "float32, learned positions": full_decoder(learned),
        "float32, sinusoidal": full_decoder(sinusoidal),
        "bfloat16, sinusoidal": full_decoder(half),
    }
    memory = decoders["float32, learned positions"].memory()
    their_way = partial(theirs, token, ([layer.mem for layer in memory.layers], []))
    error = relative_error(Stepper(learned, 1, memory).read(token)[-1], their_way()[0][-1])
    check_errors({"logits": error}, TOLERANCE, "decoding with caches")
    sides: dict[str, Callable[[], object]] = {n: partial(d.read, token) for n, d in decoders.items()}
    sides[f"{LABML}'s way, the whole memory projected again"] = their_way
    size = {name: bytes_read(decoder) for name, decoder in decoders.items()}
    vectors = {name: vector_products(size[name], d.model.head.weight.dtype) for name, d in decoders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    products: dict[str, list[float]] = {name: [] for name in vectors}
    bandwidth = []
    for _ in tqdm(range(rounds), desc="writing", leave=False):
        x = torch.randn(1 << 26)  # the rate at which a sum over 256 MiB reads memory
        bandwidth.append(x.nbytes / median(timed(x.sum, 9)))
        for name, side in sides.items():
            seconds[name] += timed(side, tokens)
        for name, multiply in vectors.items():
            products[name] += timed(multiply, 3)
    rates = {"seconds of torch.mv": products, "bytes": size, "bytes a second": bandwidth}
    return {"error": error, "seconds": seconds, **rates}


def long_text(tokens: int) -> Result:
    """Seconds of each token of a long text: 1,000 just after the memory is full, and the last 1,000."""
    decoder, token = Stepper(MemoryLM(CONFIG).eval(), 1), torch.zeros(1, 1, dtype=torch.long)
    seconds = in_turns({"": partial(decoder.read, token)}, tokens, "a long text")[""]
    full = min(CONFIG.longest_attention, tokens - 1)
    return {"tokens": tokens, "early": seconds[full : full + 1000], "late": seconds[-1000:]}


@torch.no_grad()
def reading(length: int, samples: int, segment_len: int = 400) -> Result:
    """Seconds a token that sees ``length`` back: with caches, by the forward pass, and without memory."""
    config = replace(CONFIG, segment_len=segment_len, mem_len=length - segment_len)
    model = MemoryLM(config).eval()
    window = MemoryLM(replace(config, model="transformer", segment_len=length)).eval()
    text = torch.randint(config.n_tokens, (length, 1))
    segment, decoder = text[:segment_len], full_decoder(model)
    memory = decoder.memory()
    return {
        "length": length,
        "cached": [t / segment_len for t in timed(lambda: decoder.read(segment), samples + 2)],
        "forward": [t / segment_len for t in timed(lambda: model(segment, memory), samples + 2)],
        "sliding": timed(lambda: window(text), samples),
    }


@torch.no_grad()
def stepping(streams: int, rounds: int) -> Result:
    """Processor seconds of a step: with keys and values kept; by nn.GRU; and of the segment again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    d_input = CORE.d_input or CORE.d_model
    core, gru = MemoryCore(CORE).eval(), nn.GRU(d_input, CORE.d_model, CORE.n_layers)
    segments = torch.randn(16, CORE.segment_len, streams, d_input)
    memory = core.initial(streams)
    for segment in segments:
        memory = core(segment, memory).memory
    stepper, state = Stepper(core, streams, memory), gru(segments[0])[1]
    first = torch.stack([stepper.step(x) for x in segments[0]])
    error = relative_error(first, core(segments[0], memory).output)
    check_errors({"outputs": error}, TOLERANCE, "reading step by step")
    stepper = Stepper(core, streams, memory)
    sides: dict[str, Callable[[], object]] = {
        "stepper": partial(stepper.step, segments[0, 0]),
        "gru": partial(gru, segments[0, :1], state),
        "segment": partial(core, segments[0], memory),
    }
    seconds = in_turns(sides, rounds, "stepping", clock=time.process_time)
    torch.set_num_threads(threads)
    return {"streams": streams, "seconds": seconds}


def measure_all(*, quick: bool = False) -> dict[str, Any]:
    machine = describe_environment(torch.device("cpu"))
    steps = [stepping(streams, rounds=8 if quick else 32) for streams in (1, 16, 64)]
    return {
        "environment": machine,
        "config": asdict(CONFIG),
        "acting": {"core": asdict(CORE), "device": machine["device"], "steps": steps},
        "writing": writing(rounds=1 if quick else 12, tokens=1 if quick else 10),
        "reading": [reading(length, samples=1 if quick else 3) for length in LENGTHS[: 1 if quick else None]],
        "long text": long_text(100 if quick else 20_000),
    }
