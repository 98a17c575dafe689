"""Writing and reading long texts with cached keys and values, beside doing without them."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from experiments.benchmarks.measuring import Result, check_errors, in_turns, one_thread, relative_error, timed
from experiments.benchmarks.peers import LABML, two_alike
from memformers import CoreConfig, MemoryCore, MemoryLM, ModelConfig, Stepper
from memformers.common.machine import describe_environment
from memformers.models.memory import LayerMemory, Memory

CONFIG = ModelConfig(
    vocab_size=65, d_model=512, n_heads=8, d_ff=2048, n_layers=6, segment_len=64, mem_len=2048
)
LENGTHS = (800, 1800, 2800, 3800)
"""How far back a prediction sees, as in the Transformer-XL paper."""
CORE = CoreConfig("compressive", d_input=32, mem_len=64, c_mem_len=64)
"""The core of an agent."""
TOLERANCE = 1e-4
"""The largest relative RMS error of logits from caches."""
SUMMED = 1 << 26
"""Numbers of a sum that measures how fast RAM is read: 256 MiB, more than caches hold."""


def full_decoder(model: MemoryLM) -> Stepper:
    """A decoder of one stream whose memory is full of random inputs."""
    config = model.config
    weight = model.transformer.weight
    layers = []
    for size in config.memory_sizes:
        mem = torch.randn(size.mem_len, 1, config.d_model).to(weight)  # its dtype
        layers.append(LayerMemory(mem, mem[:0]))
    return Stepper(model, 1, Memory(tuple(layers)))


def bytes_read(decoder: Stepper) -> int:
    """Bytes that a token needs: weights but for the embedding, keys, values and position vectors."""
    model = decoder.model
    config = model.config
    n_weights = 0
    for name, parameter in model.named_parameters():
        if not name.endswith(("self_attn.r", ".position.weight")):
            n_weights += parameter.numel()
    n_embedding = sum(parameter.numel() for parameter in model.embed.parameters())
    n_cached = 3 * config.n_layers * config.longest_attention * config.d_model
    return (n_weights - n_embedding + n_cached) * model.head.weight.element_size()


def vector_products(n_bytes: int, dtype: torch.dtype) -> Callable[[], object]:
    """``torch.mv`` with matrices ``[4·D, D]`` of ``n_bytes`` together, as a function."""
    vector = torch.randn(CONFIG.d_model).to(dtype)
    matrix = torch.randn(CONFIG.d_ff, CONFIG.d_model).to(dtype)
    matrices = [matrix.clone() for _ in range(round(n_bytes / matrix.nbytes))]
    return lambda: [torch.mv(one, vector) for one in matrices]


@torch.no_grad()
def writing(rounds: int, tokens: int) -> Result:
    """Seconds of a token by each of our models and labml-nn's, and what bounds them."""
    torch.manual_seed(0)
    learned, theirs = two_alike(replace(CONFIG, positions="learned"))
    learned.eval()
    theirs.eval()
    sinusoidal = MemoryLM(CONFIG).eval()
    half = MemoryLM(CONFIG).eval().to(torch.bfloat16)
    token = torch.randint(CONFIG.n_tokens, (1, 1))
    decoders = {
        "float32, learned positions": full_decoder(learned),
        "float32, sinusoidal": full_decoder(sinusoidal),
        "bfloat16, sinusoidal": full_decoder(half),
    }

    # With the same memory, labml-nn's model has the same logits.
    memory = decoders["float32, learned positions"].memory()
    their_memory: tuple[list[Tensor], list[Tensor]] = ([layer.mem for layer in memory.layers], [])
    their_step = partial(theirs, token, their_memory)
    their_logits, _, _ = their_step()
    error = relative_error(Stepper(learned, 1, memory).read(token)[-1], their_logits[-1])
    check_errors({"logits": error}, TOLERANCE, "decoding with caches")

    # What is measured in turns: steps, and products with vectors that read the same number of bytes.
    sides: dict[str, Callable[[], object]] = {}
    n_bytes = {}
    products = {}
    for name, decoder in decoders.items():
        sides[name] = partial(decoder.read, token)
        n_bytes[name] = bytes_read(decoder)
        products[name] = vector_products(n_bytes[name], decoder.model.head.weight.dtype)
    sides[f"{LABML}'s way, the whole memory projected again"] = their_step
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    product_seconds: dict[str, list[float]] = {name: [] for name in products}
    bandwidth = []
    for _ in tqdm(range(rounds), desc="writing", leave=False):
        x = torch.randn(SUMMED)
        bandwidth.append(x.nbytes / median(timed(x.sum, 9)))
        for name, step in sides.items():
            seconds[name] += timed(step, tokens)
        for name, multiply in products.items():
            product_seconds[name] += timed(multiply, 3)
    return {
        "error": error,
        "seconds": seconds,
        "seconds of torch.mv": product_seconds,
        "bytes": n_bytes,
        "bytes a second": bandwidth,
    }


def long_text(tokens: int) -> Result:
    """Seconds of each token of a long text: 1,000 just after the memory is full, and the last 1,000."""
    decoder = Stepper(MemoryLM(CONFIG).eval(), 1)
    token = torch.zeros(1, 1, dtype=torch.long)
    seconds = in_turns({"": partial(decoder.read, token)}, tokens, "a long text")[""]
    n_filling = min(CONFIG.longest_attention, tokens - 1)
    return {"tokens": tokens, "early": seconds[n_filling : n_filling + 1000], "late": seconds[-1000:]}


@torch.no_grad()
def reading(length: int, samples: int, segment_len: int = 400) -> Result:
    """Seconds a token that sees ``length`` back: with caches, by the forward pass, and without memory."""
    config = replace(CONFIG, segment_len=segment_len, mem_len=length - segment_len)
    model = MemoryLM(config).eval()
    window = MemoryLM(replace(config, model="transformer", segment_len=length)).eval()
    text = torch.randint(config.n_tokens, (length, 1))
    segment = text[:segment_len]
    decoder = full_decoder(model)
    memory = decoder.memory()
    cached = timed(lambda: decoder.read(segment), samples + 2)
    forward = timed(lambda: model(segment, memory), samples + 2)
    return {
        "length": length,
        "cached": [seconds / segment_len for seconds in cached],
        "forward": [seconds / segment_len for seconds in forward],
        "sliding": timed(lambda: window(text), samples),
    }


@torch.no_grad()
def stepping(streams: int, rounds: int, tolerance: float = TOLERANCE) -> Result:
    """Processor seconds of a step: with keys and values kept; by nn.GRU; and of the segment again."""
    d_input = CORE.d_input or CORE.d_model
    with one_thread():
        core = MemoryCore(CORE).eval()
        gru = nn.GRU(d_input, CORE.d_model, CORE.n_layers)
        segments = torch.randn(16, CORE.segment_len, streams, d_input)
        segment = segments[0]

        # Full memories, from which both ways compute the same.
        memory = core.initial(streams)
        for past_segment in segments:
            memory = core(past_segment, memory).memory
        stepper = Stepper(core, streams, memory)
        _, state = gru(segment)
        outputs = torch.stack([stepper.step(x) for x in segment])
        error = relative_error(outputs, core(segment, memory).output)
        check_errors({"outputs": error}, tolerance, "reading step by step")

        stepper = Stepper(core, streams, memory)
        sides: dict[str, Callable[[], object]] = {
            "stepper": partial(stepper.step, segment[0]),
            "gru": partial(gru, segment[:1], state),
            "segment": partial(core, segment, memory),
        }
        seconds = in_turns(sides, rounds, "stepping", clock=time.process_time)
    return {"streams": streams, "seconds": seconds}


def measure_all(*, quick: bool = False) -> dict[str, Any]:
    environment = describe_environment(torch.device("cpu"))
    steps = [stepping(streams, rounds=8 if quick else 32) for streams in (1, 16, 64)]
    lengths = LENGTHS[:1] if quick else LENGTHS
    samples = 1 if quick else 3
    return {
        "environment": environment,
        "config": asdict(CONFIG),
        "acting": {"core": asdict(CORE), "device": environment["device"], "steps": steps},
        "writing": writing(rounds=1 if quick else 12, tokens=1 if quick else 10),
        "reading": [reading(length, samples) for length in lengths],
        "long text": long_text(100 if quick else 20_000),
    }
