"""One recipe: its speed and its loss."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.recipes.candidates import CANDIDATES
from experiments.recipes.figure import DRAWN
from memformers.common.files import write_json
from memformers.common.machine import keep_freed_memory
from memformers.data.corpora import load_corpus
from memformers.data.streams import training_segments
from memformers.evaluation.evaluate import evaluate
from memformers.training.config import TrainConfig
from memformers.training.loop import train
from memformers.training.run import build_model, with_vocabulary
from memformers.training.state import Progress, TrainingState
from memformers.training.text import prepare

TIMED_STEPS, WARM_UP = 32, 3
EVALUATION_STREAMS = 16
EVALUATIONS_DRAWN = 10
"""The number of evaluations of the recipes whose loss is drawn against seconds."""


class Enough(Exception):
    """Enough steps are timed."""


def speed(name: str, data: str) -> float:
    """Tokens a second by this recipe, over a training of few steps, in which the memory grows as it does in a
    long one."""
    times: list[float] = []

    def look(state: TrainingState) -> None:
        times.append(time.perf_counter())
        if state.step == WARM_UP + TIMED_STEPS:
            raise Enough

    config = CANDIDATES[name].config(tokens=10**9, seed=0, data=data)
    tokens = config.tokens_a_step * (WARM_UP + TIMED_STEPS + 1)  # so it stops before it evaluates, at its end
    config = replace(config, tokens=tokens, evaluations=1)
    keep_freed_memory()
    try:
        trained(config, maybe_checkpoint=look)
    except Enough:
        seconds = times[-1] - times[WARM_UP - 1]
    return config.tokens_a_step * TIMED_STEPS / seconds


def train_one(folder: Path, data: str, name: str, seed: int, tokens: int, threads: int) -> str:
    """Train by the recipe called ``name``, in a separate process, and save the result in ``folder``.
    Returns a line that describes it."""
    keep_freed_memory()
    torch.set_num_threads(threads)
    config = CANDIDATES[name].config(tokens, seed, data)
    drawn = name in DRAWN and seed == 0
    losses = trained(replace(config, evaluations=EVALUATIONS_DRAWN if drawn else 1))
    result = {"recipe": name, "seed": seed, "tokens": tokens, "loss": losses[-1][1], "losses": losses}
    write_json(result_of(folder, name, seed), result)
    return f"{name}, seed {seed}: {losses[-1][1]:.4f} nats after {tokens:,} tokens"


def trained(config: TrainConfig, **hooks: Any) -> list[tuple[int, float]]:
    """Train as ``config`` says. Returns pairs of a number of tokens seen and the loss on the whole held-out
    text after them, in nats a token; the last pair is the end."""
    text = prepare(load_corpus(config.data), config)
    config = with_vocabulary(config, text.tokenizer.vocab_size)
    model = build_model(config)
    segments = training_segments(
        text.train, config.batch_size, config.model.segment_len, chunk_len=config.chunk_len, seed=config.seed
    )
    losses = []

    def look(progress: Progress) -> None:
        losses.append((progress.tokens, evaluate(model, text.validation, EVALUATION_STREAMS).loss))

    train(model, segments, config, record=lambda *_: None, evaluate=look, **hooks)
    return losses


def result_of(folder: Path, name: str, seed: int) -> Path:
    """The file of a training's result."""
    return folder / f"{name.replace(' ', '_').replace(',', '')}.{seed}.json"
