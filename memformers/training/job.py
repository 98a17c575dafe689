"""A job, everything that a training needs: [`resolve`][] checks the user's settings and leaves nothing
open."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from memformers.common.command_line import command_as_given
from memformers.common.errors import UserError
from memformers.common.fields import replace_nested
from memformers.common.files import check_manifest, numbered, user_path, write_json
from memformers.common.machine import choose_device, describe_environment, git_commit
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
from memformers.models.hub import is_hub_name
from memformers.models.io import packaged_names
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import CHECKPOINTS, CONFIG, FACTS, METRICS, OF_A_RUN, RESULT, refuse_overwrite
from memformers.runs.load import load_checkpoint, load_pretrained
from memformers.runs.reader import read_facts
from memformers.training.checkpoints import (
    check_apart,
    check_same_config,
    check_same_corpus,
    is_finished,
)
from memformers.training.config import TrainConfig, config_as_saved, read_train_config, unused_settings
from memformers.training.distributed import SINGLE_PROCESS, Distributed, with_precision
from memformers.training.state import TrainingState

MAY_DIFFER_FROM_INIT = {
    "segment_len", "mem_len", "c_mem_len", "same_length", "clamp_len", "dropout", "kernel", "bptt",
    "compression_loss",
}  # fmt: skip
"""Settings of a network that its weights don't depend on."""
TRAINING_LOCK = threading.Lock()
"""Held by the training of this process."""
COMPILER_MESSAGE_CHARACTERS = 300
"""How much of a compiler's error is shown; all of it may be pages."""


@dataclass(frozen=True)
class Job:
    """A training on a text, in which nothing is left open: no "auto", no size or name to look up."""

    config: TrainConfig
    folder: Path
    text: TokenDataset
    model: MemoryLM
    """On its device, with its initial weights."""
    facts: dict[str, Any]
    """The facts for ``run.json``."""
    ranks: Distributed
    from_seed: bool
    """Whether the weights are those of ``config.seed``."""
    resume: bool
    """Whether the folder may hold checkpoints to continue from."""


def resolve(
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    init: MemoryLM | str | Path | None = None,
    previous: TrainConfig | None = None,
    ranks: Distributed = SINGLE_PROCESS,
) -> Job | None:
    """The training that ``config`` asks for in ``folder``; None if it is finished already.

    ``previous`` is the config of the run in ``folder``, if that was read already.

    Raises:
        ValueError: If the settings can't be trained. Later, a training raises no error about settings.
    """
    # The folder
    if resume and previous is None and (folder / CONFIG).exists():
        previous = read_train_config(folder)
    ranks.on_rank_zero(lambda: check_folder(config, folder, previous))
    has_tokenizer = (folder / TOKENIZER).exists()

    # The settings that the initial weights or the run before decide
    config, weights = with_init(config, init, folder, ranks)
    if previous and config.step.precision == "auto":
        config = replace_nested(config, precision=previous.step.precision)
    if previous and ranks.all_gather(is_finished(config, previous, folder))[0]:
        if (config.data, config.text) != (previous.data, previous.text):  # another text is refused
            load_text(config, folder, ranks)
        return None

    # The text
    try:
        text = load_text(config, folder, ranks)
    except UserError:
        if ranks.first and not has_tokenizer:  # no run has begun that needs it
            (folder / TOKENIZER).unlink(missing_ok=True)
        raise

    # The settings that the text and the device decide
    config = with_vocabulary(config, text.tokenizer.vocab_size)
    config = with_precision(config, choose_device(ranks.device_name(config.step.device)), ranks)

    # The model
    model = build_model(config, ranks, weights)
    return Job(
        config,
        folder,
        text,
        model,
        facts=describe_run(config, text, model),
        ranks=ranks,
        from_seed=weights is None,
        resume=resume,
    )


@contextlib.contextmanager
def alone_in_this_process() -> Iterator[None]:
    """A block that trains, after which the global random states are restored; UserError if another one is
    active."""
    if not TRAINING_LOCK.acquire(blocking=False):
        raise UserError(
            "another training run is active in this process; wait until it finishes, or start a new process."
        )
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        TRAINING_LOCK.release()


def check_folder(config: TrainConfig, folder: Path, previous: TrainConfig | None) -> None:
    """Raise UserError if ``folder`` holds a run that is not the ``previous`` one, or other files of a run."""
    if previous:
        check_same_config(config, previous, folder)
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
    tokenizer = None
    if isinstance(init, MemoryLM):
        model = init
    else:
        model, tokenizer = load_initial(str(init))

    network = model.config if config.model == ModelConfig() else config.model
    network = replace(network, vocab_size=model.config.vocab_size)  # which the text is checked against
    check_same_network(network, model.config)
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


def check_same_network(network: ModelConfig, initial: ModelConfig) -> None:
    """Raise UserError if the weights of the ``initial`` network don't fit ``network``."""
    differences = []
    for setting in fields(ModelConfig):
        theirs = getattr(initial, setting.name)
        ours = getattr(network, setting.name)
        if setting.name not in MAY_DIFFER_FROM_INIT and theirs != ours:
            differences.append(f"{setting.name} {theirs} → {ours}")
    if differences:
        raise UserError(
            f"the initial weights come from a network with other settings ({', '.join(differences)}). Leave "
            f"these options out; only {', '.join(sorted(MAY_DIFFER_FROM_INIT))} may change."
        )


def load_initial(name: str) -> tuple[MemoryLM, Tokenizer]:
    """The model and the tokenizer from a folder, or by name from the package or the hub. Unused lengths have
    their defaults."""
    cpu = torch.device("cpu")
    is_packaged = name in packaged_names() and not Path(name).exists()
    if is_packaged or is_hub_name(name):
        model, tokenizer = load_pretrained(name, cpu)
    else:
        model, tokenizer = load_checkpoint(user_path(name), cpu)
    unused = {}
    for setting in fields(model.config):
        if setting.name in SHARED_SETTINGS and not applies_to(setting.name, model.config.model):
            unused[setting.name] = setting.default
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
    source = text.info.source
    ranks.check_alike(
        text.info.sha256,
        f"the processes read different texts, this one {source}; name a file that all have with data.",
    )
    check_apart(folder, config.data, source)
    check_same_corpus(text.info, folder)
    check_text(text, config)
    if config.tokenizer.endswith(".json"):
        ranks.on_rank_zero(lambda: keep_tokenizer(text.tokenizer, folder))
    if text.validation.counts.is_lossy and ranks.first:
        warnings.warn(f"{LOSES_TEXT}.", stacklevel=2)
    return text


def check_text(text: TokenDataset, config: TrainConfig) -> None:
    """Raise UserError if ``text`` can't be trained or validated on as ``config`` says."""
    source = text.info.source
    tokenizer = text.info.tokenizer
    cutoffs = config.model.adaptive.cutoffs
    if cutoffs and tokenizer not in ("frequency", "word"):
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


def with_vocabulary(config: TrainConfig, vocab_size: int) -> TrainConfig:
    requested = config.model.vocab_size
    if requested not in (None, vocab_size):
        raise UserError(f"vocab_size={requested}, but the text has {vocab_size}; leave vocab_size out.")
    return replace(config, model=replace(config.model, vocab_size=vocab_size))


def build_model(
    config: TrainConfig, ranks: Distributed = SINGLE_PROCESS, initial: MemoryLM | None = None
) -> MemoryLM:
    """A model on this rank's device with the weights of ``config.seed``, or of the ``initial`` model."""
    device = choose_device(ranks.device_name(config.step.device))
    if config.step.compile:
        check_compiler(device)
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
    if ranks.size > 1:  # each rank has its own dropout
        torch.manual_seed(config.seed + ranks.rank)
    return model


def check_compiler(device: torch.device) -> None:
    """Raise UserError if torch.compile has no compiler on ``device``, such as one for C++ on a CPU."""
    try:
        torch.compile(torch.exp)(torch.zeros(2, device=device))
    except Exception as error:  # any error of a compiler or linker, or of a missing one
        message = " ".join(str(error).split())[:COMPILER_MESSAGE_CHARACTERS]
        raise UserError(
            f"compile=True can't be used here; leave it out. torch.compile says: {message}"
        ) from None


def describe_run(config: TrainConfig, text: TokenDataset, model: MemoryLM) -> dict[str, Any]:
    info = text.info
    held_out = text.validation
    corpus: dict[str, Any] = {
        "name": info.name,
        "source": info.source,
        "tokenizer": info.tokenizer,
        "characters": info.total("characters"),
    }
    if info.documents:
        corpus["documents"] = info.documents
    corpus["held_out_tokens"] = len(held_out.tokens) - (len(held_out.documents) or 1)
    if held_out.counts.is_lossy:
        corpus["loses_text"] = True
    corpus["sha256"] = info.sha256
    corpus["stands_in_for_tiny_shakespeare"] = info.is_stand_in
    return {"corpus": corpus, **describe_model(config, model), "command": command_as_given()}


def describe_model(config: TrainConfig, model: MemoryLM) -> dict[str, Any]:
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        **memory_facts(model.config),
        "resolved_settings": config.resolved,
        "unused": unused_settings(config),
        "environment": describe_environment(model.device),
        "commit": git_commit(),
    }


def write_run_files(job: Job, state: TrainingState) -> None:
    """Write config and facts, which list all environments in which the training has run."""
    (job.folder / RESULT).unlink(missing_ok=True)  # of a training that is extended
    write_json(job.folder / CONFIG, config_as_saved(job.config))
    facts = job.facts
    before = read_facts(job.folder) if state.tokens > 0 else None
    if before:
        environments = before.get("environments", [before["environment"]])
        if facts["environment"] not in environments:
            before["environments"] = [*environments, facts["environment"]]
        facts = before
    write_json(job.folder / FACTS, facts)
