"""What learning while reading saves, and what it costs: the packaged models on the held-out tenth of Tiny
Shakespeare, as trained and with ``--learn``, in one stream.

Run it with ``python -m experiments.learning --data input.txt --out FOLDER``; without ``--data`` the text is
downloaded.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from experiments.tiny_shakespeare import load_packaged, read_shakespeare
from memformers.common.command_line import cli_errors, parse_arguments
from memformers.common.files import csv_text, write_json, write_text
from memformers.common.machine import describe_environment
from memformers.data.streams import Tokens
from memformers.evaluation.evaluate import evaluate
from memformers.evaluation.learning import STREAMS_OF_LEARNING, LearnConfig, evaluate_learning
from memformers.models.io import packaged_names
from memformers.models.language_model import MemoryLM

T = TypeVar("T")
CONFIGS = (LearnConfig(), LearnConfig(learn_step="rms"))
"""The ways to learn."""


@dataclass(frozen=True)
class Learning:
    """Measure the packaged models with and without learning, on one thread of a CPU."""

    data: str = ""
    """The file of Tiny Shakespeare; by default the one that a training run uses."""
    out: Path = Path("runs/learning")
    """The folder for results.csv and results.json."""

    def run(self) -> None:
        torch.set_num_threads(1)
        corpus = read_shakespeare(self.data)
        tokens = corpus.validation.tokens
        rows = []
        for name in packaged_names():
            model = load_packaged(name, corpus)
            for measure, value in measure_model(model, tokens, corpus.train.tokens):
                print(f"{name}: {measure}: {value:.4f}", flush=True)
                rows.append((measure, name, 0, value))
        self.out.mkdir(parents=True, exist_ok=True)
        write_text(self.out / "results.csv", csv_text(("measure", "arm", "seed", "value"), rows))
        facts = {
            "corpus": {"name": corpus.info.name, "sha256": corpus.info.sha256, "tokens": len(tokens)},
            "learn": {config.learn_step: asdict(config) for config in CONFIGS},
            "streams": STREAMS_OF_LEARNING,
            "environment": describe_environment(torch.device("cpu")),
        }
        write_json(self.out / "results.json", facts)


def measure_model(model: MemoryLM, tokens: Tokens, training: Tokens) -> Iterator[tuple[str, float]]:
    """Measures by their names: as trained, then with each way to learn."""
    static, static_seconds = timed(lambda: evaluate(model, tokens, STREAMS_OF_LEARNING))
    yield "loss (nats)", static.loss
    yield "CPU time (s)", static_seconds
    for config in CONFIGS:
        learn = partial(evaluate_learning, model, tokens, STREAMS_OF_LEARNING, config, training=training)
        learned, seconds = timed(learn)
        saved = static.minus(learned)
        # Rates were chosen on the first half, so only the second shows what they do on another text.
        _, (_, static_half) = static.over_text(2)
        _, (_, learned_half) = learned.over_text(2)
        step = config.learn_step
        yield f"{step}: loss (nats)", learned.loss
        yield f"{step}: saved (nats)", saved.mean
        yield f"{step}: saved, half width (nats)", saved.half_width
        yield f"{step}: saved in the second half (nats)", static_half - learned_half
        yield f"{step}: CPU time (s)", seconds
        yield f"{step}: CPU time, ratio", seconds / static_seconds


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What ``work`` returns, and the seconds of CPU time of this process that it took."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


if __name__ == "__main__":
    with cli_errors():
        parse_arguments(Learning).run()
