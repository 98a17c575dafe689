"""What happens between training steps: records, evaluations, checkpoints, samples."""

import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.utils import disp_trim

from memformers.common.files import numbered, sync, write_json, write_text
from memformers.common.machine import describe_environment, peak_memory
from memformers.common.processes import Stopped, StopSignals
from memformers.common.text import Progress, printable
from memformers.data.dataset import TokenDataset
from memformers.data.files import Ids
from memformers.data.streams import read_tokens
from memformers.evaluation.evaluate import Evaluation, comparable, evaluate_reading, reading_of, units
from memformers.generation.generate import Sampling, continue_text
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import CHECKPOINTS, METRICS, RESULT, SAMPLE
from memformers.training.checkpoints import keep_best_and_newest, save_checkpoint
from memformers.training.config import TrainConfig, config_as_saved
from memformers.training.distributed import SINGLE_PROCESS, Distributed
from memformers.training.loop import NotFiniteError, TrainingState

SAMPLE_CHARACTERS, GLIMPSE_CHARACTERS, PROMPT_CHARACTERS = 400, 50, 100
OPENING_TOKENS = 4096  # of the held-out text, in which the prompt of samples is looked for
SAMPLE_SEED = 0
EVALUATION_STREAMS = 16

Measured = tuple[Evaluation, dict[str, float]]
"""An evaluation, and its loss in units that can be compared between tokenizers."""


class Validation:
    """The held-out text: the evaluations of a training read its first ``evaluation_tokens`` tokens, in which
    a document may be cut, and the last one all, or the first ``final_tokens``. With several ``ranks``, each
    reads a part of the streams, or documents."""

    def __init__(self, text: TokenDataset, config: TrainConfig, ranks: Distributed = SINGLE_PROCESS):
        self.tokenizer, self.ranks = text.tokenizer, ranks
        self.tokens, self.documents = text.validation.tokens, text.validation.documents
        self.counts = text.validation.counts
        self.final = self._beginning(config.evaluation.final_tokens)
        self.first = self._beginning(config.evaluation_tokens)
        self.final_is_first = [len(self.final[0]), self.final[1]] == [len(self.first[0]), self.first[1]]
        self.predictable = len(self.tokens) - (len(self.documents) or 1)

    def _beginning(self, length: int) -> tuple[Ids, tuple[int, ...]]:
        """The first ``length`` tokens and their documents; all where nothing could be predicted."""
        lengths = np.diff(np.minimum(np.cumsum(self.documents, dtype=np.int64), length), prepend=0)
        if max(lengths.tolist() or [length]) < 2:
            return self.tokens, tuple(self.documents.tolist())
        return self.tokens[:length], tuple(lengths[lengths > 0].tolist())

    def evaluate(self, model: MemoryLM, final: bool, progress: Callable[[float], None]) -> Measured:
        """Evaluate what the ``final`` evaluation reads, or the others; ``progress`` gets the fraction that is
        done after each segment, equally often on every rank. All ranks must call this, and get the same."""
        tokens, documents = self.final if final else self.first
        reading = reading_of(len(tokens), EVALUATION_STREAMS, model.config.segment_len, documents)
        groups = (group[self.ranks.rank :: self.ranks.size] for group in reading.groups)
        local = replace(reading, groups=tuple(group for group in groups if group))
        steps, read = self.ranks.highest(len(local.steps)), itertools.count(1)
        part = evaluate_reading(model, tokens, local, lambda losses: progress(next(read) / steps))
        for _ in range(steps - len(local.steps)):  # while others read
            progress(next(read) / steps)
        total = Evaluation(reading, part.reach)
        for other in self.ranks.all_gather(part):
            total.merge(other)
        predicted = units(self.tokenizer, tokens, documents, self.counts)
        return total, comparable(total.nats, predicted, self.tokenizer)


@dataclass
class Callbacks:
    """Watches a training in a folder. Each of several ``ranks`` measures the same, and the first writes."""

    folder: Path
    config: TrainConfig
    model: MemoryLM
    text: TokenDataset
    state: TrainingState
    write: Callable[[dict[str, Any]], None]
    signals: StopSignals
    bar: Progress
    ranks: Distributed
    from_seed: bool
    """Whether the weights are those of ``config.seed``, so that no checkpoint is needed before a step."""

    def __post_init__(self) -> None:
        needs_none = self.from_seed or self.state.tokens
        self.saved = (self.state.tokens, self.state.evaluations) if needs_none else (0, -1)
        self.saved_at = time.monotonic()
        self.validation = Validation(self.text, self.config, self.ranks)
        first = torch.arange(min(len(self.text.validation.tokens), OPENING_TOKENS))
        beginning = self.text.tokenizer.bytes_of(read_tokens(self.text.validation.tokens, first))
        self.prompt = opening(beginning.decode("utf-8", errors="surrogateescape"))
        self.last: Measured | None = None
        self.last_at = 0
        train, held_out = self.text.train, self.text.validation
        self.characters_a_token = train.counts.characters / len(train.tokens)
        self.held_out_characters_a_token = held_out.counts.characters / len(held_out.tokens)
        self.unit = f"bits per {'token' if self.text.info.tokenizer == 'ids' else 'character'}"
        self.environment = describe_environment(self.model.device)

    def record(self, state: TrainingState, metrics: dict[str, float]) -> None:
        bits = metrics["loss.train"] / math.log(2)
        metrics["bits_per_character.train"] = bits / self.characters_a_token
        self._write(state, metrics)
        self.bar.show(f"{metrics['bits_per_character.train']:.3f} {self.unit}", state.tokens)

    def evaluate(self, state: TrainingState) -> None:
        """Evaluate the held-out text, and show a sample; a signal ends it, and nothing is recorded."""
        began = time.perf_counter()
        with self.signals.at_once():
            evaluation, in_units = self._evaluation(final=False)
            if not math.isfinite(evaluation.loss):
                raise NotFiniteError(f"held-out loss is {evaluation.loss} at token {state.tokens:,}.")
            glimpse = printable(self._sample(GLIMPSE_CHARACTERS).replace("\n", "⏎"))
        bits = in_units["bits_per_character"]
        if math.isnan(bits):  # of a part of a text that its tokens lose: by the mean of the whole text
            bits = evaluation.loss / math.log(2) / self.held_out_characters_a_token
        metrics = {
            "loss.valid": evaluation.loss,
            "bits_per_character.valid": bits,
            "accuracy.valid": evaluation.accuracy,
            "evaluated_tokens": evaluation.tokens,
            "evaluation_seconds": state.evaluation_seconds + time.perf_counter() - began,
        }
        if evaluation.reconstruction_loss is not None:
            metrics["reconstruction_loss.valid"] = evaluation.reconstruction_loss
        self._write(state, metrics)
        if self.last is None:
            self.bar.say(f"Evaluations during the training read {self._over(evaluation)}:")
        self.last, self.last_at = (evaluation, in_units), state.tokens
        if state.lowest_loss is None or evaluation.loss < state.lowest_loss:
            state.lowest_loss, state.evaluations_without_improvement = evaluation.loss, 0
        else:
            state.evaluations_without_improvement += 1
        line = f"{state.tokens:>13,} tokens  {bits:.4f} {self.unit}  sample: {glimpse}"
        self.bar.say(disp_trim(line, shutil.get_terminal_size().columns))
        self.bar.show(f"held out: {bits:.3f} {self.unit}")

    def maybe_checkpoint(self, state: TrainingState) -> None:
        """Save a checkpoint if it is due; raise [`Stopped`][] if a signal has come. This is called after each
        step, so it moves the bar too."""
        self.bar.move_to(state.tokens)
        tokens, evaluations = self.saved
        every, minutes = self.config.checkpoint.checkpoint_every, self.config.checkpoint.checkpoint_minutes
        due = state.evaluations > evaluations or (every and state.tokens // every > tokens // every)
        if not due and state.step % self.config.evaluation.log_every == 0:  # when the ranks ask each other
            is_old = bool(minutes) and time.monotonic() - self.saved_at >= 60 * minutes
            due = bool(self.ranks.highest(is_old))
        if due:
            self.save(state)
        self.signals.check(self.ranks.highest)

    def save(self, state: TrainingState) -> None:
        state.read_losses(self.ranks)  # a checkpoint must not contain the weights after a bad step
        if (state.tokens, state.evaluations) == self.saved:
            return
        evaluation = self.last[0] if self.last and self.last_at == state.tokens else None
        about = {
            "config": config_as_saved(self.config),
            "environment": self.environment,
            "records": state.records,
            "validation_loss": evaluation.loss if evaluation else None,
            "evaluated_tokens": evaluation.tokens if evaluation else 0,
            "peak_memory_bytes": self._peak_memory(),
        }
        checkpoints = self.folder / CHECKPOINTS
        if self.ranks.first:
            sync(self.folder / METRICS)
        new = checkpoints / f"{state.tokens:012}"
        save_checkpoint(new, self.model, self.text.tokenizer, state, about, self.ranks)
        self.saved, self.saved_at = (state.tokens, state.evaluations), time.monotonic()
        if self.ranks.first:
            keep_best_and_newest(checkpoints, self.config.checkpoint.keep_checkpoints)

    def finish(self) -> None:
        """Write the sample and the result; a signal ends it at once."""
        began, measured = time.perf_counter(), self.last
        with self.signals.at_once():
            if measured is None or not self.validation.final_is_first:
                measured = self._evaluation(final=True)
                evaluation, in_units = measured
                bits = in_units["bits_per_character"]
                loss = (
                    f"{evaluation.loss:.4f} nats per token" if math.isnan(bits) else f"{bits:.4f} {self.unit}"
                )
                self.bar.say(f"The last evaluation reads {self._over(evaluation)}: {loss}")
            sample = self._sample(SAMPLE_CHARACTERS)
        self.state.evaluation_seconds += time.perf_counter() - began
        evaluation, in_units = measured
        result: dict[str, Any] = {
            **self.state.progress,
            "loss": evaluation.loss,
            **{name: x if math.isfinite(x) else None for name, x in in_units.items()},
            "accuracy": evaluation.accuracy,
            "evaluated_tokens": evaluation.tokens,
            "held_out_tokens": self.validation.predictable,
            "reconstruction_loss": evaluation.reconstruction_loss,
            "loss_by_position": evaluation.by_position,
            "peak_memory_bytes": self._peak_memory(),
            "prompt": self.prompt,
        }
        if self.ranks.first:
            write_text(self.folder / SAMPLE, sample + "\n")
            write_json(self.folder / RESULT, result)

    @contextmanager
    def report_exit(self) -> Iterator[None]:
        """A block that trains: stopped, it saves a checkpoint; failed, it names the newest one."""
        try:
            try:
                yield
            except Stopped as stopped:
                self.save(self.state)
                self.bar.say(f"{stopped} at token {self.state.tokens:,}; the run is kept in {self.folder}.")
                raise stopped.conventional() from None
        except (NotFiniteError, OSError) as error:
            newest = "No checkpoint was made yet."
            for kept in numbered(self.folder / CHECKPOINTS)[:1]:
                newest = f"The checkpoint of token {int(kept.name):,} is kept: {kept}"
            if isinstance(error, OSError):
                raise OSError(f"{self.folder} can't be written: {error}. {newest}") from None
            raise NotFiniteError(f"{error} {newest}") from None

    def _write(self, state: TrainingState, metrics: dict[str, float]) -> None:
        self.write({"tokens": state.tokens, "seconds": state.seconds, **metrics})
        state.records += 1

    def _evaluation(self, final: bool) -> Measured:
        def progress(fraction: float) -> None:
            self.signals.check(self.ranks.highest)
            self.bar.show(f"evaluating, {fraction:.0%}")

        return self.validation.evaluate(self.model, final, progress)

    def _over(self, evaluation: Evaluation) -> str:
        n, whole = evaluation.tokens, self.validation.predictable
        return f"{'all' if n == whole else f'the first {n:,} of'} {whole:,} held-out tokens"

    def _peak_memory(self) -> int | None:
        """Of any process of the run, so every rank must ask; None where the system doesn't report it."""
        now = self.ranks.highest(peak_memory(self.model.device) or 0)
        self.state.peak_memory_bytes = max(now, self.state.peak_memory_bytes)
        return self.state.peak_memory_bytes or None

    def _sample(self, characters: int) -> str:
        self.bar.show("writing a sample")
        tokenizer, how = self.text.tokenizer, Sampling(0.8)
        return continue_text(self.model, tokenizer, self.prompt, characters, how, seed=SAMPLE_SEED)


def opening(text: str) -> str:
    """The ``text``, which may start within a line, to the end of its first line with a letter or digit."""
    at = next((i for i, character in enumerate(text) if character.isalnum()), 0)
    end = text.find("\n", at) + 1
    return (text[:end] if end else text)[-PROMPT_CHARACTERS:]
