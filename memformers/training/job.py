"""A job, everything that a training needs: [`resolve`][] checks the user's settings and leaves nothing
open."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from memformers.common.command_line import command_as_given
from memformers.common.errors import UserError
from memformers.common.fields import replace_nested
from memformers.common.files import numbered, write_json
from memformers.common.machine import choose_device, describe_environment, git_commit
from memformers.data.dataset import TokenDataset
from memformers.data.tokenizers import TOKENIZER
from memformers.models.config import reject_unused
from memformers.models.facts import memory_facts
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import CHECKPOINTS, CONFIG, FACTS, METRICS, OF_A_RUN, RESULT, refuse_overwrite
from memformers.runs.reader import read_facts
from memformers.training.config import TrainConfig, describe_settings, read_train_config
from memformers.training.distributed import Distributed, with_precision
from memformers.training.initial_weights import with_init
from memformers.training.resuming import check_same_config, is_finished
from memformers.training.state import TrainingState
from memformers.training.text import describe_corpus, keep_tokenizer, load_text

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
    resume: bool,
    init: MemoryLM | str | Path | None,
    previous: TrainConfig | None,
    ranks: Distributed,
) -> Job | None:
    """The training that ``config`` asks for in ``folder``; None if it is finished already.

    ``previous`` is the config of the run in ``folder``, if that was read already.

    Raises:
        ValueError: If the settings can't be trained. Later, a training raises no error about settings.
    """
    # An arm of an experiment, which resumes, may have lengths without use.
    if not resume:
        for part in (config, config.model):
            reject_unused(part, config.model.model, lengths=True)

    # The settings that the initial weights decide
    weights = None
    tokenizer = None
    if init is not None:
        config, weights, tokenizer = with_init(config, init, folder)

    # The folder
    if resume and previous is None and (folder / CONFIG).exists():
        previous = read_train_config(folder)
    has_tokenizer = (folder / TOKENIZER).exists()
    if ranks.first:  # for which the others wait before they read the text
        if previous:
            check_same_config(config, previous, folder)
        elif (folder / METRICS).exists() or numbered(folder / CHECKPOINTS):
            raise UserError(f"{folder} already holds a run; name a new folder for this one, or resume it.")
        else:
            refuse_overwrite(folder, OF_A_RUN)
        if tokenizer is not None:
            keep_tokenizer(tokenizer, folder)

    # What the run before decides
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

    # The settings that the text decides
    decided: dict[str, Any] = {"vocab_size": text.tokenizer.vocab_size}
    if config.tokenizer.endswith(".json"):  # of which the run has a copy, and its folder may be moved
        decided["tokenizer"] = TOKENIZER
    config = replace_nested(config, **decided)

    # The model, and the precision of its device
    model = build_model(config, weights)
    config = with_precision(config, model.device, ranks)
    if ranks.size > 1:  # each rank has its own dropout
        torch.manual_seed(config.seed + ranks.rank)

    # The facts about text and model
    facts = {
        "corpus": describe_corpus(text),
        **describe_model(config, model),
        "command": command_as_given(),
    }
    return Job(
        config,
        folder,
        text,
        model,
        facts,
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


def build_model(config: TrainConfig, initial: MemoryLM | None = None) -> MemoryLM:
    """A model on its device with the weights of ``config.seed``, or of the ``initial`` model."""
    device = choose_device(config.step.device)
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
    return model.to(device)


def check_compiler(device: torch.device) -> None:
    """Raise UserError if torch.compile has no compiler on ``device``, such as one for C++ on a CPU."""
    try:
        torch.compile(torch.exp)(torch.zeros(2, device=device))
    except Exception as error:  # any error of a compiler or linker, or of a missing one
        message = " ".join(str(error).split())[:COMPILER_MESSAGE_CHARACTERS]
        raise UserError(
            f"compile=True can't be used here; leave it out. torch.compile says: {message}"
        ) from None


def describe_model(config: TrainConfig, model: MemoryLM) -> dict[str, Any]:
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        **memory_facts(model.config),
        **describe_settings(config),
        "environment": describe_environment(model.device),
        "commit": git_commit(),
    }


def write_run_files(job: Job, state: TrainingState) -> None:
    """Write config and facts, which list all environments in which the training has run."""
    (job.folder / RESULT).unlink(missing_ok=True)  # of a training that is extended
    write_json(job.folder / CONFIG, asdict(job.config))
    facts = job.facts
    previous_facts = read_facts(job.folder) if state.tokens > 0 else None
    if previous_facts:
        environments = previous_facts.get("environments", [previous_facts["environment"]])
        if facts["environment"] not in environments:
            previous_facts["environments"] = [*environments, facts["environment"]]
        facts = previous_facts
    write_json(job.folder / FACTS, facts)
