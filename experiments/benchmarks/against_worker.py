"""What ``against`` runs in each checkout. A line of standard input is a case to build, or only a number of
steps; for each, it prints the seconds of a step and a checksum of what was computed.

It runs in the other checkout too, so it imports nothing of these experiments.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers import CoreConfig, MemoryCore, MemoryLM, ModelConfig, Stepper
from memformers.evaluation.evaluate import evaluate

N_BATCHES = 4
FILLING_SEGMENTS = 40
"""Segments that fill the memory before decoding."""
EVALUATED_SEGMENTS = 16
"""Segments of each stream in a step of evaluation, the first of which fill the memory."""

Step = Callable[[], Iterable[Tensor]]
"""Takes a step, and returns the numbers that are compared."""


def agent_step(config: dict[str, Any], n_streams: int) -> Step:
    stepper = Stepper(MemoryCore(CoreConfig(**config)).eval(), n_streams)
    features = torch.randn(n_streams, config["d_input"])
    return lambda: [stepper.step(features)]


def decoding_step(config: dict[str, Any], n_streams: int) -> Step:
    model = MemoryLM(ModelConfig(**config))
    segment = draw_batches(model, n_streams)[0]
    stepper = Stepper(model, n_streams)
    for _ in range(FILLING_SEGMENTS):
        stepper.read(segment)
    return lambda: [stepper.read(segment[:1])]


def evaluation_step(config: dict[str, Any], n_streams: int) -> Step:
    model = MemoryLM(ModelConfig(**config))
    n_tokens = EVALUATED_SEGMENTS * model.config.segment_len * n_streams
    tokens = torch.randint(model.config.n_tokens, (n_tokens,))
    return lambda: [torch.tensor(evaluate(model, tokens, n_streams).nats, dtype=torch.float64)]


def training_step(config: dict[str, Any], n_streams: int) -> Step:
    model = MemoryLM(ModelConfig(**config))
    batches = draw_batches(model, n_streams)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    numbers = count()
    memory = None

    def step() -> Iterable[Tensor]:
        nonlocal memory
        tokens = batches[next(numbers) % N_BATCHES]
        logits, memory, auxiliary_loss = model(tokens, memory)
        optimizer.zero_grad()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + auxiliary_loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return model.parameters()

    return step


def draw_batches(model: MemoryLM, n_streams: int) -> Tensor:
    shape = (N_BATCHES, model.config.segment_len, n_streams)
    return torch.randint(model.config.n_tokens, shape)


def checksum_of(tensors: Iterable[Tensor]) -> str:
    checksum = hashlib.sha256()
    for tensor in tensors:
        checksum.update(tensor.detach().numpy().tobytes())
    return checksum.hexdigest()


def main() -> None:
    builders = {
        "agent": agent_step,
        "decoding": decoding_step,
        "evaluation": evaluation_step,
        "training": training_step,
    }
    step: Step | None = None
    for line in sys.stdin:
        request = json.loads(line)
        # A case to build; its first steps fill the memory, and their seconds are of no interest.
        if "config" in request:
            torch.manual_seed(0)
            # JSON has no tuples, which lengths by layer are.
            config = {}
            for name, value in request["config"].items():
                config[name] = tuple(value) if isinstance(value, list) else value
            step = builders[request["kind"]](config, request["n_streams"])
        assert step
        start = time.perf_counter()
        for _ in range(request["steps"]):
            numbers = step()
        seconds = (time.perf_counter() - start) / request["steps"]
        print(json.dumps([seconds, checksum_of(numbers)]), flush=True)


if __name__ == "__main__":
    main()
