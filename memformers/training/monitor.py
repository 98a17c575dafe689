"""What happens between the steps of a training on a text: records, evaluations, samples, checkpoints."""

import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from tqdm.utils import disp_trim

from memformers.common.console import Progress, printable
from memformers.common.files import numbered, sync, write_json, write_text
from memformers.common.machine import peak_memory
from memformers.common.processes import Stopped, StopSignals
from memformers.data.streams import read_tokens
from memformers.generation.generate import Sampling, continue_text
from memformers.models.stack import eval_mode
from memformers.runs.folder import CHECKPOINTS, METRICS, RESULT, SAMPLE
from memformers.training.checkpoints import keep_best_and_newest, save_checkpoint
from memformers.training.job import Job
from memformers.training.state import NotFiniteError, TrainingState
from memformers.training.trainer import Monitor
from memformers.training.validation import Measurement, Validation

SAMPLE_CHARACTERS = 400
"""The length of the sample that a run keeps."""
SHORT_SAMPLE_CHARACTERS = 50
"""The length of the sample that is shown with an evaluation: the rest of a line."""
PROMPT_CHARACTERS = 100
PROMPT_TOKENS = 4096
"""How much of the held-out text is searched for the prompt of samples."""
SAMPLE_SEED = 0
SAMPLING = Sampling(temperature=0.8)

Record = Callable[[dict[str, Any]], None]


class RunMonitor(Monitor):
    """Watches a training in a folder. Each of several ranks measures the same, and the first one writes.

    Args:
        job: The training.
        state: Where it begins or continues.
        write: Writes a line of the run's metrics.
        signals: The signals that stop it.
        bar: Its progress bar.
    """

    def __init__(self, job: Job, state: TrainingState, write: Record, signals: StopSignals, bar: Progress):
        self.job = job
        self.config = job.config
        self.model = job.model
        self.ranks = job.ranks
        self.state = state
        self.write = write
        self.signals = signals
        self.bar = bar
        self.validation = Validation(job.text, job.config, job.ranks)

        # Losses are shown in bits per character.
        train = job.text.train
        held_out = job.text.validation
        self.characters_per_token = train.counts.characters / len(train.tokens)
        self.held_out_characters_per_token = held_out.counts.characters / len(held_out.tokens)
        self.unit = f"bits per {'token' if job.text.info.tokenizer == 'ids' else 'character'}"

        # Initial weights from the seed need no checkpoint.
        needs_no_checkpoint = job.from_seed or state.tokens > 0
        self.saved_progress = (state.tokens, state.evaluations) if needs_no_checkpoint else (0, -1)
        """The tokens and the evaluations at the newest checkpoint."""
        self.saved_time = time.monotonic()
        self.last_measurement: Measurement | None = None
        self.measured_tokens = 0
        """The training's tokens at the last measurement."""

    def record(self, state: TrainingState, metrics: dict[str, float]) -> None:
        bits = metrics["loss.train"] / math.log(2)
        metrics["bits_per_character.train"] = bits / self.characters_per_token
        self.write_record(state, metrics)
        self.bar.show(f"{metrics['bits_per_character.train']:.3f} {self.unit}", state.tokens)

    def evaluate(self, state: TrainingState) -> None:
        """Evaluate the held-out text, and show a sample; a signal ends it, and nothing is recorded."""
        began = time.perf_counter()
        with self.signals.at_once():
            measurement = self.measure(final=False)
            evaluation = measurement.evaluation
            if not math.isfinite(evaluation.loss):
                raise NotFiniteError(f"held-out loss is {evaluation.loss} at token {state.tokens:,}.")
            sample = printable(self.sample(SHORT_SAMPLE_CHARACTERS).replace("\n", "⏎"))

        # Record it
        bits = measurement.in_units["bits_per_character"]
        if math.isnan(bits):  # of a part of a text that its tokens lose: by the mean of the whole text
            bits = evaluation.loss / math.log(2) / self.held_out_characters_per_token
        metrics = {
            "loss.valid": evaluation.loss,
            "bits_per_character.valid": bits,
            "accuracy.valid": evaluation.accuracy,
            "evaluated_tokens": evaluation.tokens,
            "evaluation_seconds": state.evaluation_seconds + time.perf_counter() - began,
        }
        if evaluation.reconstruction_loss is not None:
            metrics["reconstruction_loss.valid"] = evaluation.reconstruction_loss
        self.write_record(state, metrics)

        # Is it the best so far?
        if state.lowest_loss is None or evaluation.loss < state.lowest_loss:
            state.lowest_loss = evaluation.loss
            state.evaluations_without_improvement = 0
        else:
            state.evaluations_without_improvement += 1

        # Show it
        if self.last_measurement is None:
            tokens = self.validation.describe_tokens(evaluation)
            self.bar.say(f"Evaluations during the training read {tokens}:")
        self.last_measurement = measurement
        self.measured_tokens = state.tokens
        line = f"{state.tokens:>13,} tokens  {bits:.4f} {self.unit}  sample: {sample}"
        self.bar.say(disp_trim(line, shutil.get_terminal_size().columns))
        self.bar.show(f"held out: {bits:.3f} {self.unit}")

    def checkpoint(self, state: TrainingState) -> None:
        """Save a checkpoint if it is due; raise [`Stopped`][] if a signal has come. This is called after each
        step, so it moves the bar too."""
        self.bar.move_to(state.tokens)
        if self.is_checkpoint_due(state):
            self.save(state)
        self.signals.check(self.ranks.highest)

    def is_checkpoint_due(self, state: TrainingState) -> bool:
        saved_tokens, saved_evaluations = self.saved_progress
        if state.evaluations > saved_evaluations:
            return True
        every = self.config.checkpoint.checkpoint_every
        if every and state.tokens // every > saved_tokens // every:
            return True
        if state.step % self.config.evaluation.log_every == 0:  # ranks synchronize here
            minutes = self.config.checkpoint.checkpoint_minutes
            is_old = minutes > 0 and time.monotonic() - self.saved_time >= 60 * minutes
            return bool(self.ranks.highest(is_old))
        return False

    def save(self, state: TrainingState) -> None:
        """Save a checkpoint, unless there is one of this state already."""
        state.read_pending(self.ranks)  # a checkpoint must not contain the weights after a bad step
        progress = (state.tokens, state.evaluations)
        if progress == self.saved_progress:
            return
        evaluation = None
        if self.last_measurement and self.measured_tokens == state.tokens:
            evaluation = self.last_measurement.evaluation
        about = {
            "config": asdict(self.config),
            "environment": self.job.facts["environment"],
            "records": state.records,
            "validation_loss": evaluation.loss if evaluation else None,
            "evaluated_tokens": evaluation.tokens if evaluation else 0,
            "peak_memory_bytes": self.peak_memory(),
        }
        checkpoints = self.job.folder / CHECKPOINTS
        if self.ranks.first:
            sync(self.job.folder / METRICS)
        folder = checkpoints / f"{state.tokens:012}"
        save_checkpoint(folder, self.model, self.job.text.tokenizer, state, about, self.ranks)
        self.saved_progress = progress
        self.saved_time = time.monotonic()
        if self.ranks.first:
            keep_best_and_newest(checkpoints, self.config.checkpoint.keep_checkpoints)

    def finish(self) -> None:
        """Write the sample and the result; a signal ends it at once."""
        began = time.perf_counter()
        measurement = self.last_measurement
        with self.signals.at_once():
            if measurement is None or not self.validation.final_is_usual:
                measurement = self.measure(final=True)
                self.show_final(measurement)
            sample = self.sample(SAMPLE_CHARACTERS)
        self.state.evaluation_seconds += time.perf_counter() - began

        evaluation = measurement.evaluation
        result: dict[str, Any] = {**self.state.progress, "loss": evaluation.loss}
        for name, value in measurement.in_units.items():
            result[name] = value if math.isfinite(value) else None
        result |= {
            "accuracy": evaluation.accuracy,
            "evaluated_tokens": evaluation.tokens,
            "held_out_tokens": self.validation.n_predictable,
            "reconstruction_loss": evaluation.reconstruction_loss,
            "loss_by_position": evaluation.by_position,
            "peak_memory_bytes": self.peak_memory(),
            "prompt": self.prompt,
        }
        if self.ranks.first:
            write_text(self.job.folder / SAMPLE, sample + "\n")
            write_json(self.job.folder / RESULT, result)

    def show_final(self, measurement: Measurement) -> None:
        bits = measurement.in_units["bits_per_character"]
        loss = f"{bits:.4f} {self.unit}"
        if math.isnan(bits):
            loss = f"{measurement.evaluation.loss:.4f} nats per token"
        tokens = self.validation.describe_tokens(measurement.evaluation)
        self.bar.say(f"The last evaluation reads {tokens}: {loss}")

    @contextmanager
    def report_exit(self) -> Iterator[None]:
        """A block that trains: stopped, it saves a checkpoint; failed, it names the newest one."""
        folder = self.job.folder
        try:
            try:
                yield
            except Stopped as stopped:
                self.save(self.state)
                self.bar.say(f"{stopped} at token {self.state.tokens:,}; the run is kept in {folder}.")
                raise stopped.conventional() from None
        except (NotFiniteError, OSError) as error:
            newest = "No checkpoint was made yet."
            checkpoints = numbered(folder / CHECKPOINTS)
            if checkpoints:
                newest = f"The checkpoint of token {int(checkpoints[0].name):,} is kept: {checkpoints[0]}"
            if isinstance(error, OSError):
                raise OSError(f"{folder} can't be written: {error}. {newest}") from None
            raise NotFiniteError(f"{error} {newest}") from None

    def write_record(self, state: TrainingState, metrics: dict[str, float]) -> None:
        self.write({"tokens": state.tokens, "seconds": state.seconds, **metrics})
        state.records += 1

    def measure(self, final: bool) -> Measurement:
        def progress(fraction: float) -> None:
            self.signals.check(self.ranks.highest)
            self.bar.show(f"evaluating, {fraction:.0%}")

        return self.validation.evaluate(self.model, final, progress)

    def peak_memory(self) -> int | None:
        """The most memory that any process of the run has used, so every rank must ask; None where the system
        doesn't report it."""
        highest = self.ranks.highest(peak_memory(self.model.device) or 0)
        self.state.peak_memory_bytes = max(highest, self.state.peak_memory_bytes)
        return self.state.peak_memory_bytes or None

    @cached_property
    def prompt(self) -> str:
        """The beginning of the held-out text, which samples continue."""
        held_out = self.job.text.validation.tokens
        first = torch.arange(min(len(held_out), PROMPT_TOKENS))
        beginning = self.job.text.tokenizer.bytes_of(read_tokens(held_out, first))
        return default_prompt(beginning.decode("utf-8", errors="surrogateescape"))

    def sample(self, characters: int) -> str:
        self.bar.show("writing a sample")
        tokenizer = self.job.text.tokenizer
        # Else each token would switch all modules to eval mode and back.
        with eval_mode(self.model):
            return continue_text(self.model, tokenizer, self.prompt, characters, SAMPLING, seed=SAMPLE_SEED)


def default_prompt(text: str) -> str:
    """The ``text``, which may start within a line, to the end of its first line with a letter or digit."""
    first = 0
    for i, character in enumerate(text):
        if character.isalnum():
            first = i
            break
    end = text.find("\n", first) + 1
    prompt = text[:end] if end else text
    return prompt[-PROMPT_CHARACTERS:]
