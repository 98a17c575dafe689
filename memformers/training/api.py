"""Training and evaluation from Python, in one call each, for notebooks and other programs."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memformers.common.fields import Count, check_arguments, replace_nested
from memformers.common.files import read_json, user_path
from memformers.common.machine import choose_device
from memformers.common.processes import StopSignals
from memformers.common.text import Progress, UserError, counted
from memformers.data.kept_text import count_texts
from memformers.data.streams import training_segments
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import TOKENIZER
from memformers.evaluation.evaluate import LOSES_TEXT, summary, units
from memformers.evaluation.evaluate import evaluate as evaluate_tokens
from memformers.evaluation.learning import LearnConfig, evaluate_learning, learning_columns, usual_streams
from memformers.models.language_model import MemoryLM
from memformers.models.registry import short_name
from memformers.runs.folder import CONFIG, RESULT, alone_in, check_named, new_folder, read_metrics
from memformers.runs.load import load_checkpoint
from memformers.tracking.discovery import find_dashboard
from memformers.tracking.recorder import Tracking
from memformers.training.callbacks import Callbacks
from memformers.training.checkpoints import is_finished, restore_newest
from memformers.training.config import TrainConfig, check_all_used, read_train_config
from memformers.training.distributed import process_group, with_precision
from memformers.training.loop import TrainingState, train_steps
from memformers.training.optimizers import build_optimizers
from memformers.training.run import (
    alone_in_this_process,
    build_model,
    check_folder,
    describe_run,
    load_text,
    with_init,
    with_vocabulary,
    write_run_files,
)


@dataclass(frozen=True)
class TrainedModel:
    """What [`train`][memformers.training.api.train] returns: a model, and what its training measured.

    Examples:
        >>> from memformers import ModelConfig, TrainConfig, generate, train
        >>> network = ModelConfig(d_model=32, n_layers=1, segment_len=16, mem_len=16)
        >>> config = TrainConfig(model=network, data="builtin", max_tokens=1_000, batch_size=8)
        >>> run = train(config, "runs/small")  # doctest: +ELLIPSIS
        transformer-xl: ...
        >>> tokens = run.tokenizer.encode("ROMEO:")[:, None]  # [P, 1]
        >>> len(list(generate(run.model, tokens, max_new_tokens=20)))
        20
    """

    folder: Path
    """The folder of the run, which the commands take too, as in ``memformers report FOLDER``."""
    device: str = "auto"
    """Where the model is loaded to; auto takes a GPU if there is one."""

    @cached_property
    def loaded(self) -> tuple[MemoryLM, Tokenizer]:
        """The model and its tokenizer."""
        return load_checkpoint(self.folder, choose_device(self.device))

    @property
    def model(self) -> MemoryLM:
        """The model of the newest checkpoint, in eval mode."""
        return self.loaded[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """``encode`` gives the tokens of a text, ``decode`` the text of tokens."""
        return self.loaded[1]

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """Every record, in order: ``tokens``, ``seconds``, ``loss.train`` or ``loss.valid`` in nats, …"""
        return read_metrics(self.folder)

    @cached_property
    def result(self) -> dict[str, Any]:
        """The last evaluation of the held-out text: ``loss`` in nats per token, ``bits_per_character``,
        ``accuracy`` and more, as in ``result.json``."""
        return read_json(self.folder / RESULT)


@check_arguments
def train(
    config: TrainConfig,
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    init: MemoryLM | str | Path | None = None,
    dashboard: str = "",
) -> TrainedModel:
    """Train a model on a text, as ``memformers train`` does, with its checkpoints, records and dashboard. The
    command has a token shift by default; here, it is ``ModelConfig(token_shift=True)``.

    Ctrl-C, the stop button of a notebook, SIGTERM and SIGHUP end the training after the current step and its
    checkpoint, by KeyboardInterrupt or SystemExit. Afterwards, the process's random states are as before.

    Args:
        config: What to train, on which text and for how long.
        folder: The folder of the run; by default a new one in ``runs/``.
        resume: Whether a run in ``folder`` continues from its newest checkpoint, as if it had never stopped.
            A finished run is only loaded, unless ``config`` asks for more tokens than it has seen: then it
            is extended. If there is no run, a new one starts.
        init: The initial weights, with a fresh optimizer: a model whose tokens are those of ``config``; or a
            folder or name as ``--init-from`` takes it, which has its tokenizer. Leave ``config.model`` at its
            default, or repeat the model's settings; the lengths of segments and memories, dropout and others
            that don't change the weights may differ.
        dashboard: The address of a labml server, or off; by default one that runs on this machine.

    Returns:
        The trained model with its tokenizer and what was measured.

    Raises:
        ValueError: For a text, config or folder that can't be used, another training in this process, and
            divergence ([`memformers.training.loop.NotFiniteError`][]).
        OSError: If the folder can't be written.

    Examples:
        >>> from memformers import ModelConfig, TrainConfig, train
        >>> network = ModelConfig(model="compressive", d_model=32, n_layers=2, segment_len=16, mem_len=16)
        >>> config = TrainConfig(model=network, data="builtin", max_tokens=5_000, batch_size=8)
        >>> run = train(config, "runs/first")  # doctest: +ELLIPSIS
        compressive: ... parameters, 5,000 tokens → runs/first
        corpus: ...
        >>> sorted(run.result)[:3]
        ['accuracy', 'bits_per_byte', 'bits_per_character']
    """
    if not resume:  # an arm of an experiment may have lengths without use
        check_all_used(config)
    folder = new_folder(short_name(config.model.model)) if folder is None else user_path(folder)
    check_named(folder)
    find_dashboard(dashboard)
    with alone_in_this_process(), process_group(config) as ranks:
        folder = ranks.all_gather(folder)[0]
        ranks.on_rank_zero(lambda: check_folder(config, folder, resume))
        has_tokenizer = (folder / TOKENIZER).exists()
        config, weights = with_init(config, init, folder, ranks)
        before = read_train_config(folder) if resume and (folder / CONFIG).exists() else None
        if before and config.step.precision == "auto":
            config = replace_nested(config, precision=before.step.precision)
        if before and ranks.all_gather(is_finished(config, folder))[0]:
            if (config.data, config.text) != (before.data, before.text):  # another text is refused
                load_text(config, folder, ranks)
            ranks.say(f"{folder} is already finished; nothing is left to train.")
            return TrainedModel(folder, config.step.device)
        try:
            text = load_text(config, folder, ranks)
        except UserError:
            if ranks.first and not has_tokenizer:  # no run has begun that needs it
                (folder / TOKENIZER).unlink(missing_ok=True)
            raise
        config = with_vocabulary(config, text.tokenizer.vocab_size)
        config = with_precision(config, choose_device(ranks.device_name(config.step.device)), ranks)
        model = build_model(config, ranks, weights)
        with alone_in(folder) if ranks.first else nullcontext(), StopSignals(ranks.size == 1) as signals:
            name, facts = short_name(config.model.model), describe_run(config, text, model)
            documents = f", {counted(n, 'document')}" if (n := text.info.documents) else ""
            ranks.say(f"{name}: {facts['parameters']:,} parameters, {config.max_tokens:,} tokens → {folder}")
            ranks.say(f"corpus: {text.info.name} ({text.info.source}){documents}")
            state = TrainingState(build_optimizers(model, config))
            if resume:
                state = restore_newest(folder, model, state, config, ranks)
            ranks.on_rank_zero(lambda: write_run_files(config, facts, folder, state))
            tracking = Tracking(folder, name, asdict(config) | facts, dashboard)
            begun = min(state.tokens, config.max_tokens)
            with (
                tracking if ranks.first else nullcontext(),
                Progress(
                    desc=name, total=config.max_tokens, initial=begun, unit="tok", unit_scale=True,
                    hidden=not ranks.first,
                ) as bar,
            ):  # fmt: skip
                write = tracking.record if ranks.first else lambda record: None
                callbacks = Callbacks(
                    folder, config, model, text, state, write, signals, bar, ranks, weights is None
                )
                segments = training_segments(
                    text.train.tokens, config.batch_size, config.model.segment_len,
                    (state.epoch, state.position), chunk_len=config.chunk_len, seed=config.seed,
                    documents=torch.from_numpy(text.train.documents),
                )  # fmt: skip
                with callbacks.report_exit():
                    train_steps(
                        model, segments, config, record=callbacks.record, evaluate=callbacks.evaluate,
                        maybe_checkpoint=callbacks.maybe_checkpoint, state=state, ranks=ranks,
                    )  # fmt: skip
                    callbacks.finish()
            ranks.barrier()  # until all is written
    return TrainedModel(folder, config.step.device)


@check_arguments
def evaluate(
    model: MemoryLM,
    tokenizer: Tokenizer,
    text: str | Sequence[str],
    *,
    streams: Count | None = None,
    learn: LearnConfig | None = None,
    learn_text: str = "",
) -> dict[str, float]:
    """Measure how well a model predicts a text, from start to end, with the memory carried along.

    Args:
        model: The model, whose segment and memories are as long as in training.
        tokenizer: Its tokenizer.
        text: A text; or several documents, each of which is read from an empty memory.
        streams: The number of parallel streams into which a text is cut; by default 16, or 1 with ``learn``.
            Each starts with an empty memory; with fewer, more tokens are predicted with a full memory, and
            the evaluation is slower. Of documents, how many are read in parallel, with the same result.
        learn: How a second evaluation learns: it takes a gradient step on each segment once it has predicted
            it (dynamic evaluation; Krause et al. 2019, arXiv 1904.08378), from all streams together, so that
            their number changes the result. The model has its weights back afterwards. None for no learning.
        learn_text: A part of the text that the model was trained on, which ``LearnConfig(learn_step="rms")``
            needs.

    Returns:
        ``loss_nats`` per token and ``uncertainty_nats``, half of its 95 % confidence interval;
        ``bits_per_character`` and ``bits_per_byte`` of ``text``; ``perplexity``, per token, where tokens are
        words, and ``word_perplexity`` where they are subwords, else NaN; ``accuracy``, and the number of
        predicted ``tokens``. With ``learn``, the same numbers of the evaluation that learns, with
        ``learning_`` before their names; and ``learning_saves_nats``, by how much its loss is below
        ``loss_nats``, with ``learning_saves_uncertainty_nats``. Warns if the tokenizer loses a part of the
        text.

    Raises:
        ValueError: For a text that the tokenizer can't encode, or in which nothing can be predicted; for
            learning that diverges, and for weights to learn that the model doesn't have.

    Examples:
        >>> from memformers import ByteTokenizer, MemoryLM, ModelConfig, evaluate
        >>> model = MemoryLM(ModelConfig(vocab_size=256, d_model=32, n_layers=2))
        >>> numbers = evaluate(model, ByteTokenizer(), "To be, or not to be. " * 50)
        >>> numbers["tokens"]
        1049
    """
    if tokenizer.vocab_size != model.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model {model.vocab_size}; use its own."
        )
    texts = [text] if isinstance(text, str) else text
    parts = [tokenizer.ids(tokenizer.terminate(t)) for t in texts]
    tokens = np.concatenate(parts or [np.zeros(0, np.int64)])
    documents = () if isinstance(text, str) else tuple(map(len, parts))
    if streams is None:
        streams = usual_streams(learn)
    measured = evaluate_tokens(model, tokens, streams, documents=documents)
    counts = count_texts(tokenizer, texts, parts)
    if counts.is_lossy:
        warnings.warn(f"{LOSES_TEXT}.", stacklevel=2)
    text_units = units(tokenizer, tokens, documents, counts)
    numbers = summary(measured, tokenizer, text_units)
    if learn is not None:
        training = tokenizer.ids(learn_text) if learn_text else None
        learning = evaluate_learning(model, tokens, streams, learn, documents=documents, training=training)
        numbers |= learning_columns(measured, learning, tokenizer, text_units)
    return numbers
