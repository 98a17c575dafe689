"""What a training is made of: its folder, its text, its model, and the facts that are written down."""

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memformers.common.atomic_dir import numbered
from memformers.common.command_line import command_as_given
from memformers.common.errors import UserError
from memformers.common.fields import changed
from memformers.common.files import write_json
from memformers.common.machine import choose_device, describe_environment, git_commit
from memformers.data.dataset import TokenDataset
from memformers.models.base import memory_facts
from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import (
    CHECKPOINTS,
    CONFIG,
    FACTS,
    METRICS,
    OF_A_RUN,
    RESULT,
    check_named,
    check_nothing_is_lost,
)
from memformers.runs.reader import read_facts
from memformers.training.config import TrainConfig, read_train_config, unused_settings
from memformers.training.data_module import check_long_enough, find_text
from memformers.training.distributed import SINGLE_PROCESS, Distributed
from memformers.training.initial import copy_weights, freeze
from memformers.training.resume import check_same_config, check_same_corpus
from memformers.training.state import random_states, set_random_states

TRAINING = threading.Lock()
"""Held by the training of this process."""


@contextlib.contextmanager
def alone_in_this_process() -> Iterator[None]:
    """A block that trains, after which the random states are as before; UserError where another thread
    trains, which would draw from the same random numbers."""
    if not TRAINING.acquire(blocking=False):
        raise UserError("another training runs in this process; wait for its end, or use another process.")
    before = random_states()
    try:
        yield
    finally:
        set_random_states(before)
        TRAINING.release()


def check_folder(config: TrainConfig, folder: Path, resume: bool) -> None:
    """Raise UserError for a folder that is in use, belongs to another training, or contains other files."""
    check_named(folder)
    is_its_own = False  # as a comparison, or a start that failed, may have left it
    with contextlib.suppress(ValueError):
        saved, size = read_train_config(folder), config.model.vocab_size  # which depends on the text
        precision = "auto" if config.step.precision == "auto" else saved.step.precision
        model = replace(saved.model, vocab_size=size)
        is_its_own = changed(saved, model=model, precision=precision) == config
    if resume and (folder / CONFIG).exists():
        check_same_config(config, folder)
    elif (folder / METRICS).exists() or numbered(folder / CHECKPOINTS):
        raise UserError(f"{folder} already holds a run; name a new folder for this one, or resume it.")
    elif not is_its_own:
        check_nothing_is_lost(folder, OF_A_RUN)


def read_text(config: TrainConfig, folder: Path, ranks: Distributed) -> TokenDataset:
    """The text to train on. Raises ValueError unless it is the same on all ``ranks``, and that of the run in
    ``folder`` if there is one."""
    text = ranks.rank_zero_first(lambda: find_text(config))
    ranks.check_alike(
        text.info.sha256,
        f"the processes read different texts, this one {text.info.source}; name a file that all have with "
        f"data.",
    )
    check_same_corpus(text.info, folder)
    check_long_enough(text, config)
    return text


def with_vocabulary(config: TrainConfig, vocab_size: int) -> TrainConfig:
    """The config for a text of ``vocab_size`` different tokens; ValueError if it asks for another number."""
    asked = config.model.vocab_size
    if asked not in (ModelConfig().vocab_size, vocab_size):
        raise UserError(f"vocab_size={asked}, but the text has {vocab_size}; leave vocab_size out.")
    return replace(config, model=replace(config.model, vocab_size=vocab_size))


def build_model(
    config: TrainConfig, ranks: Distributed = SINGLE_PROCESS, initial: MemoryLM | None = None
) -> MemoryLM:
    """A model on this rank's device with the weights of ``config.seed``, whatever random numbers were drawn
    before, or of the ``initial`` model. From then on, each rank draws its own random numbers."""
    device = choose_device(ranks.device_name(config.step.device))
    if device.type == "mps":
        raise UserError("device='mps' has no float64, in which a training sums its losses; use device='cpu'.")
    if config.step.compile:  # which needs a C++ compiler on a CPU
        try:
            torch.compile(torch.exp)(torch.zeros(2, device=device))
        except Exception as error:  # any error of a compiler or linker, or of a missing one
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"compile=True can't be used here; leave it out. torch.compile says: {reason}"
            ) from None
    model = MemoryLM(config.model)
    torch.manual_seed(config.seed)
    model.reset_parameters()
    model.transformer.recompute = config.step.activation_checkpointing
    if initial is not None:
        copy_weights(initial, model)
    freeze(model, config.optim.freeze)
    ranks.place(model, device)
    own_seed = config.seed + ranks.rank
    random.seed(own_seed)  # which a user's module may draw from, as from NumPy's
    np.random.seed(own_seed % 2**32)
    if ranks.size > 1:
        torch.manual_seed(own_seed)
    return model


def describe_run(config: TrainConfig, text: TokenDataset, model: MemoryLM) -> dict[str, Any]:
    """The facts of ``run.json``."""
    card, held_out = text.info, text.validation
    return {
        "corpus": {
            "name": card.name,
            "source": card.source,
            "tokenizer": card.tokenizer,
            "characters": card.total("characters"),
            **({"documents": card.documents} if card.documents else {}),
            "held_out_tokens": len(held_out.tokens) - (len(held_out.documents) or 1),
            "sha256": card.sha256,
            "stands_in_for_tiny_shakespeare": card.is_stand_in,
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        **memory_facts(model.config),
        "decided": config.decided,
        "unused": unused_settings(config),
        "environment": describe_environment(model.device),
        "command": command_as_given(),
        "commit": git_commit(),
    }


def write_down(config: TrainConfig, facts: dict[str, Any], folder: Path, goes_on: bool) -> None:
    """Write the config and the facts; if a training goes on on another machine or with other versions, the
    facts list all of its environments."""
    (folder / RESULT).unlink(missing_ok=True)  # of a training that goes on
    write_json(folder / CONFIG, asdict(config))
    if goes_on and (before := read_facts(folder)):
        environments = before.get("environments", [before["environment"]])
        if facts["environment"] not in environments:
            before["environments"] = [*environments, facts["environment"]]
        facts = before
    write_json(folder / FACTS, facts)
