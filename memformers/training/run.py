"""A run: one training, from its config to the files in its folder."""

import contextlib
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memformers.common.atomic_dir import numbered
from memformers.common.command_line import command_as_given
from memformers.common.errors import UserError
from memformers.common.files import write_json
from memformers.common.machine import choose_device, describe_environment, git_commit, keep_freed_memory
from memformers.common.words import counted
from memformers.data.dataset import TokenDataset
from memformers.data.streams import training_segments
from memformers.models.base import memory_facts
from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM
from memformers.models.registry import short_name
from memformers.runs.folder import (
    CHECKPOINTS,
    CONFIG,
    FACTS,
    METRICS,
    OF_A_RUN,
    RESULT,
    check_named,
    check_nothing_is_lost,
    flatten,
)
from memformers.runs.reader import read_facts
from memformers.tracking.discovery import find_dashboard
from memformers.tracking.recorder import Tracking
from memformers.training.config import TrainConfig, read_train_config
from memformers.training.distributed import ALONE, Distributed, joined, with_precision
from memformers.training.loop import train
from memformers.training.observer import Bar, Observer
from memformers.training.optimizers import build_optimizers
from memformers.training.resume import alone_in, check_same_config, check_same_corpus, restore_newest
from memformers.training.signals import StopSignals
from memformers.training.state import TrainingState
from memformers.training.text import check_long_enough, find_text


def train_run(config: TrainConfig, folder: Path, dashboard: str = "", *, resume: bool = False) -> Path:
    """Train as ``config`` says in ``folder``, which must not contain a run yet; returns the folder.

    With ``resume``, a run in ``folder`` continues from its newest checkpoint, as if it had never stopped. A
    finished run is not changed, and if there is no run, one begins. ``dashboard`` is the address of a labml
    server; if it is empty, labml's own ``$labml_app_url`` is used.

    SIGINT and SIGTERM end the training after the current step and its checkpoint, by KeyboardInterrupt and
    SystemExit(143). Raises ValueError for a corpus or config that can't be used, and for a folder that is in
    use or belongs to another training; [`memformers.training.loop.NotFiniteError`][] for a training that
    diverged; OSError if the folder can't be written. The last good checkpoint is kept.
    """
    keep_freed_memory()
    find_dashboard(dashboard)
    with joined(config) as ranks:
        folder = ranks.all_gather(folder)[0]
        config = in_its_precision(config, folder)
        ranks.first_alone(lambda: check_folder(config, folder, resume))
        if resume and ranks.all_gather((folder / RESULT).exists())[0]:
            ranks.say(f"{folder} is finished; nothing is left to train.")
            return folder
        text = read_text(config, folder, ranks)
        config = with_vocabulary(config, text.tokenizer.vocab_size)
        config = with_precision(config, choose_device(ranks.device_name(config.device)), ranks)
        model = build_model(config, ranks)
        state, records = TrainingState(build_optimizers(model, config)), 0

        with alone_in(folder, ranks), StopSignals(alone=ranks.size == 1) as signals:
            facts = describe_run(config, text, model)
            network, read = short_name(config.model.model), facts["corpus"]
            ranks.say(f"{network}: {facts['parameters']:,} parameters, {config.tokens:,} tokens → {folder}")
            documents = f", {counted(read['documents'], 'document')}" if "documents" in read else ""
            ranks.say(f"corpus: {read['name']} ({read['source']}){documents}")
            if resume:
                state, records = restore_newest(
                    folder, model, state, config, text.info, ranks, text.tokenizer
                )
            ranks.first_alone(lambda: write_down(config, facts, folder, state))
            settings = {**asdict(config), **facts}
            with (
                Tracking(folder, network, settings, dashboard, chosen_settings(config))
                if ranks.first
                else contextlib.nullcontext() as tracking,
                contextlib.closing(Bar(config, state.tokens, shown=ranks.first)) as bar,
            ):
                write = tracking.record if tracking else lambda record: None
                observer = Observer(folder, config, model, text, state, records, write, signals, bar, ranks)
                segments = training_segments(
                    text.train.tokens,
                    config.batch_size,
                    config.model.segment_len,
                    (state.epoch, state.position),
                    chunk_len=config.chunk_len,
                    seed=config.seed,
                    documents=torch.from_numpy(text.train.documents),
                )
                with observer.plain_endings():
                    train(model, segments, config, record=observer.record, evaluate=observer.evaluate,
                          maybe_checkpoint=observer.maybe_checkpoint, state=state, ranks=ranks)  # fmt: skip
                    observer.finish()
            ranks.barrier()  # until all is written
    return folder


def check_folder(config: TrainConfig, folder: Path, resume: bool) -> None:
    """Raise UserError for a folder that is in use, belongs to another training, or contains other files."""
    check_named(folder)
    if resume and (folder / CONFIG).exists():
        check_same_config(config, folder)
    elif (folder / METRICS).exists() or numbered(folder / CHECKPOINTS):
        raise UserError(f"{folder} already holds a run; name a new folder for this one, or resume it.")
    elif not is_config_of(config, folder):  # which a comparison, or a start that failed, may have written
        check_nothing_is_lost(folder, OF_A_RUN)


def is_config_of(config: TrainConfig, folder: Path) -> bool:
    """Whether ``folder`` has the config of this training, except the vocabulary, which depends on the
    text."""
    with contextlib.suppress(ValueError):
        saved = read_train_config(folder)
        size = config.model.vocab_size
        return replace(saved, model=replace(saved.model, vocab_size=size)) == config
    return False


def in_its_precision(config: TrainConfig, folder: Path) -> TrainConfig:
    """``config`` with the precision of the run in ``folder``, if there is one and ``config`` chooses none."""
    with contextlib.suppress(ValueError):  # which is reported when the run is resumed
        if config.precision == "auto" and (folder / CONFIG).exists():
            return replace(config, precision=read_train_config(folder).precision)
    return config


def read_text(config: TrainConfig, folder: Path, ranks: Distributed) -> TokenDataset:
    """The text to train on. Raises ValueError unless it is the same on all ``ranks``, and that of the run in
    ``folder`` if there is one."""
    text = ranks.in_turn(lambda: find_text(config))
    info = text.info
    ranks.check_alike(
        info.sha256,
        f"the processes read different texts, this one {info.source}; name a file that all have with data.",
    )
    check_same_corpus(info, folder)
    check_long_enough(text, config)
    return text


def with_vocabulary(config: TrainConfig, vocab_size: int) -> TrainConfig:
    """The config for a text of ``vocab_size`` different tokens; ValueError if it asks for another number."""
    asked = config.model.vocab_size
    if asked not in (ModelConfig().vocab_size, vocab_size):
        raise UserError(f"vocab_size={asked}, but the text has {vocab_size}; leave vocab_size out.")
    return replace(config, model=replace(config.model, vocab_size=vocab_size))


def build_model(config: TrainConfig, ranks: Distributed = ALONE) -> MemoryLM:
    """A model on this rank's device with the weights of ``config.seed``, whatever random numbers were drawn
    before. From then on, each rank draws its own random numbers."""
    device = choose_device(ranks.device_name(config.device))
    if config.compile:
        check_compiler(device)
    model = MemoryLM(config.model)
    torch.manual_seed(config.seed)
    model.reset_parameters()
    model.transformer.recompute = config.activation_checkpointing
    ranks.place(model, device)
    own_seed = config.seed + ranks.rank
    random.seed(own_seed)  # which a user's module may draw from, as from NumPy's
    np.random.seed(own_seed % 2**32)
    if ranks.size > 1:
        torch.manual_seed(own_seed)
    return model


def check_compiler(device: torch.device) -> None:
    """Raise ValueError if torch.compile can't compile; on CPU it needs a C++ compiler."""
    try:
        torch.compile(torch.exp)(torch.zeros(2, device=device))
    except Exception as error:  # any error of a compiler or linker, or of a missing one
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"compile=True can't be used here; leave it out. torch.compile says: {reason}"
        ) from None


def describe_run(config: TrainConfig, text: TokenDataset, model: MemoryLM) -> dict[str, Any]:
    """The facts of ``run.json``."""
    card = text.info
    return {
        "corpus": {
            "name": card.name,
            "source": card.source,
            "tokenizer": card.tokenizer,
            "characters": card.total("characters"),
            **({"documents": card.documents} if card.documents else {}),
            "sha256": card.sha256,
            "stands_in_for_tiny_shakespeare": card.is_stand_in,
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        **memory_facts(model.config),
        "decided": config.decided,
        "environment": describe_environment(model.device),
        "command": command_as_given(),
        "commit": git_commit(),
    }


def write_down(config: TrainConfig, facts: dict[str, Any], folder: Path, state: TrainingState) -> None:
    """Write the config and the facts; if a training continues on another machine or with other versions, the
    facts list all of its environments."""
    write_json(folder / CONFIG, asdict(config))
    if state.tokens and (before := read_facts(folder)):
        environments = before.get("environments", [before["environment"]])
        if facts["environment"] not in environments:
            before["environments"] = [*environments, facts["environment"]]
        facts = before
    write_json(folder / FACTS, facts)


def chosen_settings(config: TrainConfig) -> list[str]:
    """The dotted names of the settings that are not the defaults, except those that the text and the device
    determine."""
    usual = dict(flatten(asdict(TrainConfig())))
    decided = {"model.vocab_size", *(["precision"] if usual["precision"] == "auto" else [])}
    settings = dict(flatten(asdict(config)))
    return [n for n, value in settings.items() if value != usual.get(n) and n not in decided]
