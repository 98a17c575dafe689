"""What tracking costs a training: time a record takes at first and after 20,000 steps, and with a
dashboard that never answers, beside the time of a real training step between two records.

Run it with ``python experiments/benchmarks/tracking.py``; it prints a table.
"""

import socket
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from memformers.data.corpora import builtin_corpus
from memformers.data.streams import training_segments
from memformers.data.tokenizers import build_tokenizer
from memformers.tracking import Tracking
from memformers.training.config import TrainConfig
from memformers.training.loop import train
from memformers.training.run import build_model, with_vocabulary

RECORD = {"tokens": 512.0, "seconds": 1.0, **{f"metric_{i}.train": 1.0 + i for i in range(10)}}


def record_times(dashboard: str, steps: int = 20_000) -> list[float]:
    """Seconds that each of ``steps`` records took."""
    times = []
    with TemporaryDirectory() as folder, Tracking(Path(folder), "benchmark", {}, dashboard) as tracking:
        for step in range(steps):
            start = time.perf_counter()
            tracking.record(RECORD | {"tokens": float(step)})
            times.append(time.perf_counter() - start)
    return times


def record_interval() -> float:
    """Seconds of default Transformer-XL training between two records."""
    text = builtin_corpus(200_000).text
    tokenizer = build_tokenizer("character", text)
    config = with_vocabulary(TrainConfig(tokens=512 * 100), tokenizer.vocab_size)
    times: list[float] = []
    train(
        build_model(config),
        training_segments(tokenizer.encode(text), config.batch_size, config.model.segment_len),
        config,
        record=lambda progress, _: times.append(progress.seconds),
        evaluate=lambda _: None,
    )
    return median(b - a for a, b in pairwise(times))


def main() -> None:
    """Measure and print."""
    interval = record_interval()
    print(f"a record every {interval * 1e3:.0f} ms of training\n")
    print("| dashboard | steps | a record, median (quartiles), µs | share of training |")
    print("| --- | --- | --- | --- |")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/api/v1/default"
        for name, url in (("none", ""), ("never answers", address)):
            times = record_times(url)
            for label, part in (("first 1,000", times[:1_000]), ("last 1,000 of 20,000", times[-1_000:])):
                low, middle, high = (1e6 * q for q in quantiles(part, n=4))
                share = middle / 1e6 / interval
                print(f"| {name} | {label} | {middle:.1f} ({low:.1f} – {high:.1f}) | {share:.4%} |")


if __name__ == "__main__":
    main()
