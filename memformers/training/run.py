"""What a training is made of: its folder, text, model and initial weights, and the facts about the run."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from memformers.common.command_line import command_as_given
from memformers.common.fields import replace_nested
from memformers.common.files import check_manifest, numbered, user_path, write_json
from memformers.common.machine import choose_device, describe_environment, git_commit
from memformers.common.text import UserError
from memformers.data import VALIDATION
from memformers.data.dataset import TokenDataset
from memformers.data.sources import CorpusSpec
from memformers.data.streams import check_length
from memformers.data.tokenize_corpus import dataset_of
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import TOKENIZER, load_tokenizer, save_tokenizer
from memformers.evaluation.evaluate import LOSES_TEXT
from memformers.models.config import SHARED_SETTINGS, ModelConfig, applies_to
from memformers.models.facts import memory_facts
from memformers.models.io import packaged_names
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import CHECKPOINTS, CONFIG, FACTS, METRICS, OF_A_RUN, RESULT, refuse_overwrite
from memformers.runs.load import load_checkpoint, load_packaged
from memformers.runs.reader import read_facts
from memformers.training.checkpoints import check_apart, check_same_config, check_same_corpus
from memformers.training.config import TrainConfig, config_as_saved, unused_settings
from memformers.training.distributed import SINGLE_PROCESS, Distributed
from memformers.training.loop import TrainingState

MAY_DIFFER_FROM_INIT = {
    "segment_len", "mem_len", "c_mem_len", "same_length", "clamp_len", "dropout", "kernel", "bptt",
    "compression_loss",
}  # fmt: skip
TRAINING_LOCK = threading.Lock()
"""Held by the training of this process."""


@contextlib.contextmanager
def alone_in_this_process() -> Iterator[None]:
    """A block that trains, after which the random states are as before; UserError where another one runs."""
    if not TRAINING_LOCK.acquire(blocking=False):
        raise UserError("another training runs in this process; wait for its end, or use another process.")
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        TRAINING_LOCK.release()


def check_folder(config: TrainConfig, folder: Path, resume: bool) -> None:
    if resume and (folder / CONFIG).exists():
        check_same_config(config, folder)
    elif (folder / METRICS).exists() or numbered(folder / CHECKPOINTS):
        raise UserError(f"{folder} already holds a run; name a new folder for this one, or resume it.")
    else:
        refuse_overwrite(folder, OF_A_RUN)


def with_init(
    config: TrainConfig, init: MemoryLM | str | Path | None, folder: Path, ranks: Distributed
) -> tuple[TrainConfig, MemoryLM | None]:
    """``config`` with the network and the tokenizer of the initial weights, and their model."""
    if init is None:
        return config, None
    model, tokenizer = (init, None) if isinstance(init, MemoryLM) else load_initial(str(init))
    network = model.config if config.model == ModelConfig() else config.model
    network = replace(network, vocab_size=model.config.vocab_size)  # which the text is checked against
    names = [f.name for f in fields(ModelConfig) if f.name not in MAY_DIFFER_FROM_INIT]
    values = ((name, getattr(model.config, name), getattr(network, name)) for name in names)
    if wrong := [f"{name} {before} → {now}" for name, before, now in values if before != now]:
        raise UserError(
            f"the initial weights are those of another network: {', '.join(wrong)}; leave these settings "
            f"out. What may differ: {', '.join(sorted(MAY_DIFFER_FROM_INIT))}."
        )
    config = replace(config, model=network)
    if tokenizer is None:
        return config, model
    if config.tokenizer not in (TrainConfig().tokenizer, tokenizer.name):
        raise UserError(
            f"tokenizer={config.tokenizer!r} can't be used, since the initial weights have a tokenizer; "
            f"leave it out."
        )
    ranks.on_rank_zero(lambda: keep_tokenizer(tokenizer, folder))
    return replace(config, tokenizer=str(folder / TOKENIZER)), model


def load_initial(name: str) -> tuple[MemoryLM, Tokenizer]:
    """The model and the tokenizer in a folder, or of the package by its name; lengths without use are at
    their defaults."""
    is_packaged, cpu = name in packaged_names() and not Path(name).exists(), torch.device("cpu")
    model, tokenizer = load_packaged(name, cpu) if is_packaged else load_checkpoint(user_path(name), cpu)
    settings = (f for f in fields(model.config) if f.name in SHARED_SETTINGS)
    unused = {f.name: f.default for f in settings if not applies_to(f.name, model.config.model)}
    model.config = replace_nested(model.config, **unused)
    return model, tokenizer


def keep_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    if not (folder / TOKENIZER).exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_tokenizer(tokenizer, folder)
    elif load_tokenizer(folder).to_json() != tokenizer.to_json():
        raise UserError(f"{folder / TOKENIZER} is another tokenizer; name a new folder.")


def spec_of(config: TrainConfig) -> CorpusSpec:
    text = asdict(config.text)
    return CorpusSpec(config.data, tokenizer=config.tokenizer, vocab_size=config.model.vocab_size, **text)


def find_text(config: TrainConfig, folder: Path | None = None) -> TokenDataset:
    """The text of ``config``. The subwords of a run in ``folder`` are not learned again."""
    subwords = learned_subwords(folder) if folder and config.tokenizer == "bpe" else None
    return dataset_of(replace(spec_of(config), subwords=subwords))


def learned_subwords(folder: Path) -> Tokenizer | None:
    """The tokenizer of the newest checkpoint in ``folder`` that has an unbroken one; else None."""
    for checkpoint in numbered(folder / CHECKPOINTS):
        with contextlib.suppress(UserError, OSError):
            check_manifest(checkpoint, [TOKENIZER])
            return load_tokenizer(checkpoint)
    return None


def load_text(config: TrainConfig, folder: Path, ranks: Distributed) -> TokenDataset:
    """The text to train on, checked; a tokenizer that was not made from it is kept in ``folder``."""
    text = ranks.rank_zero_first(lambda: find_text(config, folder))
    source, tokenizer = text.info.source, text.info.tokenizer
    ranks.check_alike(
        text.info.sha256,
        f"the processes read different texts, this one {source}; name a file that all have with data.",
    )
    check_apart(folder, config.data, source)
    check_same_corpus(text.info, folder)
    if (cutoffs := config.model.adaptive.cutoffs) and tokenizer not in ("frequency", "word"):
        raise UserError(
            f"cutoffs={cutoffs} need tokens that are numbered by frequency, but tokenizer={tokenizer!r} "
            f"numbers them otherwise; use tokenizer='frequency' or 'word', or leave the cutoffs out."
        )
    if VALIDATION not in text.splits:
        raise UserError(f"{source} has no validation part; prepare it without a model's tokenizer.")
    check_length(len(text.train.tokens), config.batch_size, config.model.segment_len)
    for split, purpose in ((text.train, "train"), (text.validation, "validate")):
        if len(split.documents) and split.documents.max() < 2:
            raise UserError(
                f"{source} has only documents of a single token to {purpose} on, in which nothing can be "
                f"predicted; use longer documents."
            )
    if config.tokenizer.endswith(".json"):
        ranks.on_rank_zero(lambda: keep_tokenizer(text.tokenizer, folder))
    if text.validation.counts.is_lossy and ranks.first:
        warnings.warn(f"{LOSES_TEXT}.", stacklevel=2)
    return text


def with_vocabulary(config: TrainConfig, vocab_size: int) -> TrainConfig:
    asked = config.model.vocab_size
    if asked not in (None, vocab_size):
        raise UserError(f"vocab_size={asked}, but the text has {vocab_size}; leave vocab_size out.")
    return replace(config, model=replace(config.model, vocab_size=vocab_size))


def build_model(
    config: TrainConfig, ranks: Distributed = SINGLE_PROCESS, initial: MemoryLM | None = None
) -> MemoryLM:
    """A model on this rank's device with the weights of ``config.seed``, or of the ``initial`` model."""
    device = choose_device(ranks.device_name(config.step.device))
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
    model.transformer.activation_checkpointing = config.step.activation_checkpointing
    if initial is not None:
        try:
            model.load_state_dict(initial.state_dict())
        except RuntimeError as error:
            raise UserError(
                f"the initial weights don't fit. With positions='learned', leave segment_len, mem_len and "
                f"c_mem_len as they are. {' '.join(str(error).split())}"
            ) from None
    model.to(device)
    if ranks.size > 1:
        torch.manual_seed(config.seed + ranks.rank)
    return model


def describe_run(config: TrainConfig, text: TokenDataset, model: MemoryLM) -> dict[str, Any]:
    card, held_out = text.info, text.validation
    return {
        "corpus": {
            "name": card.name,
            "source": card.source,
            "tokenizer": card.tokenizer,
            "characters": card.total("characters"),
            **({"documents": card.documents} if card.documents else {}),
            "held_out_tokens": len(held_out.tokens) - (len(held_out.documents) or 1),
            **({"loses_text": True} if held_out.counts.is_lossy else {}),
            "sha256": card.sha256,
            "stands_in_for_tiny_shakespeare": card.is_stand_in,
        },
        **describe_model(config, model),
        "command": command_as_given(),
    }


def describe_model(config: TrainConfig, model: MemoryLM) -> dict[str, Any]:
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        **memory_facts(model.config),
        "decided": config.resolved,
        "unused": unused_settings(config),
        "environment": describe_environment(model.device),
        "commit": git_commit(),
    }


def write_run_files(config: TrainConfig, facts: dict[str, Any], folder: Path, state: TrainingState) -> None:
    """Write config and facts, which list all environments in which the training has run."""
    (folder / RESULT).unlink(missing_ok=True)  # of a training that is extended
    write_json(folder / CONFIG, config_as_saved(config))
    if state.tokens > 0 and (before := read_facts(folder)):
        environments = before.get("environments", [before["environment"]])
        if facts["environment"] not in environments:
            before["environments"] = [*environments, facts["environment"]]
        facts = before
    write_json(folder / FACTS, facts)
