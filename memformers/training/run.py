"""A run: one training, from its config to its folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from memformers.data.corpora import Corpus, load_corpus
from memformers.data.streams import training_segments
from memformers.environment import describe_environment
from memformers.files import write_json
from memformers.language_model import MemoryLM, ModelConfig
from memformers.run_folder import CHECKPOINTS, CONFIG, FACTS, METRICS, RESULT
from memformers.sealed import numbered
from memformers.tracking import Tracking, find_dashboard
from memformers.training.config import TrainConfig
from memformers.training.loop import build_optimizer, train
from memformers.training.observer import Observer
from memformers.training.randomness import seed_python_and_numpy
from memformers.training.ranks import Ranks, joined, shard
from memformers.training.resume import alone_in, check_same_config, check_same_corpus, go_on
from memformers.training.signals import StopSignals
from memformers.training.state import TrainingState
from memformers.training.text import prepare


def train_run(config: TrainConfig, folder: Path, dashboard: str = "", *, resume: bool = False) -> Path:
    """Train as ``config`` says into ``folder``, which must not hold a run yet; returns the folder.

    With ``resume``, a run in ``folder`` goes on from its newest checkpoint, as if it had never stopped; one
    that is finished is left alone, and where there is none, one begins. ``dashboard`` is a labml server's
    address; empty, labml's own ``$labml_app_url`` counts.

    SIGINT and SIGTERM end it after the step, with a checkpoint, by KeyboardInterrupt and SystemExit(143).
    Raises ValueError for a corpus or config that doesn't work, and for a folder in use or of another
    training; :class:`memformers.training.loop.NotFiniteError` for a training that diverged, OSError where
    the folder can't be written, both with the last good checkpoint kept.
    """
    with joined(config) as ranks:
        return train_on(ranks, config, folder, dashboard, resume)


def train_on(ranks: Ranks, config: TrainConfig, folder: Path, dashboard: str, resume: bool) -> Path:
    """What :func:`train_run` does on each of ``ranks``."""
    folder = ranks.everyones(folder)[0]
    if ranks.first:
        check_folder(config, folder, resume)
    ranks.wait()
    if resume and ranks.everyones((folder / RESULT).exists())[0]:
        if ranks.first:
            print(f"{folder} is finished; nothing is left to train.")
        return folder
    find_dashboard(dashboard)
    corpus = ranks.in_turn(lambda: load_corpus(config.data))
    ranks.check_alike(
        corpus.sha256,
        f"the processes read different texts, this one {corpus.source}; name a file that all have with data.",
    )
    if resume:
        check_same_corpus(corpus, folder)
    text = prepare(corpus, config)
    device = choose_device(ranks.device_name(config.device))
    if config.compile:
        check_compiler(device)
    config = with_vocabulary(config, text.tokenizer.vocab_size)
    model = build_model(config).to(device)
    if config.parallel == "fsdp":
        shard(model, device)
    seed_python_and_numpy(config.seed + ranks.rank)
    if ranks.size > 1:
        torch.manual_seed(config.seed + ranks.rank)  # each drops out its own
    state, records = TrainingState(build_optimizer(model, config)), 0

    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder) if ranks.first else nullcontext(), StopSignals(ranks.size == 1) as signals:
        facts = describe_run(corpus, model, device)
        if ranks.first:
            announce(corpus, config, model, folder)
        if resume:
            state, records = go_on(folder, model, state, config, corpus, ranks)
        if ranks.first:
            write_json(folder / CONFIG, asdict(config))
            if not state.tokens:
                write_json(folder / FACTS, facts)
        ranks.wait()
        with (
            recorder(ranks, folder, config, facts, dashboard) as write,
            progress_bar(config, state, ranks) as bar,
        ):
            observer = Observer(folder, config, model, text, state, records, write, signals, bar, ranks)
            with observer.plain_endings(state):
                progress = train(
                    model,
                    training_segments(
                        text.train, config.batch_size, config.model.segment_len, state.position
                    ),
                    config,
                    record=observer.record,
                    evaluate=observer.evaluate,
                    state=state,
                    between_steps=observer.between_steps,
                    ranks=ranks,
                )
                observer.finish(progress)
        ranks.wait()  # until all is written
    return folder


def check_folder(config: TrainConfig, folder: Path, resume: bool) -> None:
    """Raise ValueError for a folder in use, or of another training."""
    if resume:
        check_same_config(config, folder)
    elif (folder / METRICS).exists() or numbered(folder / CHECKPOINTS):
        raise ValueError(f"{folder} already holds a run; name a new folder for this one, or resume it.")


@contextmanager
def recorder(
    ranks: Ranks, folder: Path, config: TrainConfig, facts: dict[str, Any], dashboard: str
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What takes the records of a training: the first rank's go to its folder and to labml."""
    if ranks.first:
        with Tracking(folder, config.model.model, {**asdict(config), **facts}, dashboard) as tracking:
            yield tracking.record
    else:
        yield lambda record: None


def progress_bar(config: TrainConfig, state: TrainingState, ranks: Ranks) -> "tqdm[Any]":
    """A bar that shows the tokens seen."""
    return tqdm(
        total=config.tokens,
        initial=state.tokens,
        unit="tok",
        unit_scale=True,
        desc=config.model.model,
        disable=not ranks.first,
    )


def with_vocabulary(config: TrainConfig, vocab_size: int) -> TrainConfig:
    """The config for a text of so many different tokens; ValueError where it asks for others."""
    asked = config.model.vocab_size
    if asked not in (ModelConfig().vocab_size, vocab_size):
        raise ValueError(f"vocab_size={asked}, but the text has {vocab_size}; leave vocab_size out.")
    return replace(config, model=replace(config.model, vocab_size=vocab_size))


def build_model(config: TrainConfig) -> MemoryLM:
    """A model whose weights are those of ``config.seed``, whatever was drawn before."""
    model = MemoryLM(config.model)
    torch.manual_seed(config.seed)
    model.reset_parameters()
    model.transformer.recompute = config.activation_checkpointing
    return model


def choose_device(name: str) -> torch.device:
    """The device called ``name``, checked by using it; ``auto`` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(f"device={name!r} can't be used here: {first_line}") from None


def check_compiler(device: torch.device) -> None:
    """Raise ValueError where torch.compile can't compile; on CPU it needs a C++ compiler."""
    try:
        torch.compile(torch.exp)(torch.zeros(2, device=device))
    except Exception as error:  # whatever a compiler, a linker or a missing one may end in
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"compile=True can't be used here; leave it out. torch.compile says: {reason}"
        ) from None


def describe_run(corpus: Corpus, model: MemoryLM, device: torch.device) -> dict[str, Any]:
    """The facts of ``run.json``."""
    return {
        "corpus": {
            "name": corpus.name,
            "source": corpus.source,
            "characters": len(corpus.text),
            "sha256": corpus.sha256,
            "stands_in_for_tiny_shakespeare": corpus.is_stand_in,
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        "memory": {
            "one_layer": model.config.remembered_positions,
            "all_layers": model.config.remembered_positions * model.config.n_layers,
        },
        "environment": describe_environment(device),
    }


def announce(corpus: Corpus, config: TrainConfig, model: MemoryLM, folder: Path) -> None:
    """Say on the screen what is about to be trained, on what, and where it is kept."""
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{config.model.model}: {parameters:,} parameters, {config.tokens:,} tokens → {folder}")
    print(f"corpus: {corpus.name} ({corpus.source})")
