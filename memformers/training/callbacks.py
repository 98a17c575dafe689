"""What happens between training steps: records, evaluations, checkpoints, samples."""

import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from memformers.common.atomic_dir import numbered
from memformers.common.files import sync, write_json, write_text
from memformers.common.machine import describe_environment, peak_memory
from memformers.common.progress import Progress
from memformers.common.text_format import duration, fitting, printable
from memformers.data.dataset import TokenDataset
from memformers.data.streams import read_tokens
from memformers.evaluation.evaluate import Evaluation
from memformers.generation.sampling import Sampling
from memformers.generation.text import continue_text
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import CHECKPOINTS, METRICS, RESULT, SAMPLE
from memformers.training.checkpoints import About, keep_best_and_newest, save_checkpoint, usable_about
from memformers.training.config import TrainConfig
from memformers.training.data_module import Validation
from memformers.training.distributed import Distributed, summon_full_params
from memformers.training.loop import NotFiniteError, flush_metrics
from memformers.training.memory_growth import share_of_memory
from memformers.training.signals import Stopped, StopSignals
from memformers.training.state import TrainingState

SAMPLE_CHARACTERS, GLIMPSE_CHARACTERS, PROMPT_CHARACTERS = 400, 50, 100
OPENING_TOKENS = 4096
"""How many tokens of the held-out text samples may begin with."""
SAMPLE_SEED = 0
SHORT_SECONDS = 5
"""A training that takes no longer doesn't say how long it takes."""


@dataclass
class Callbacks:
    """Watches a training in a folder. With several ``ranks``, each measures the same, and the first writes
    files."""

    folder: Path
    config: TrainConfig
    model: MemoryLM
    text: TokenDataset
    state: TrainingState
    records: int
    """How many lines of metrics are written."""
    write: Callable[[dict[str, Any]], None]
    """Records metrics."""
    signals: StopSignals
    bar: Progress
    ranks: Distributed
    begins_anew: bool = True
    """Whether the weights are those of ``config.seed``, so that no checkpoint is needed before a step."""

    def __post_init__(self) -> None:
        """Begin where the training begins."""
        needs_none = self.begins_anew or self.state.tokens
        self.saved = (self.state.tokens, self.state.evaluations) if needs_none else (0, -1)
        self.saved_at = time.monotonic()
        self.validation = Validation(self.text, self.config, self.ranks)
        first = torch.arange(min(len(self.text.validation.tokens), OPENING_TOKENS))
        held_out = self.text.tokenizer.bytes_of(read_tokens(self.text.validation.tokens, first))
        self.prompt = opening(held_out.decode("utf-8", errors="surrogateescape"))
        self.evaluation: Evaluation | None = None
        """The last one."""
        self.evaluated = 0
        """Tokens seen before it."""
        self.characters_a_token = self.text.train.counts.characters / len(self.text.train.tokens)
        self.unit = f"bits per {'token' if self.text.info.tokenizer == 'ids' else 'character'}"
        newest = numbered(self.folder / CHECKPOINTS)[:1] if self.ranks.first else []
        abouts = [about for folder in newest if (about := usable_about(folder))]
        self.peak_before = max((about.peak_memory_bytes or 0 for about in abouts), default=0)
        """The most bytes that the processes which trained here before have held."""
        self.recorded, self.shown = 0, ""
        self.time_left: TimeLeft | None = None

    def record(self, state: TrainingState, metrics: dict[str, float]) -> None:
        """Track training metrics, and show them."""
        bits = metrics["loss.train"] / math.log(2)
        metrics["bits_per_character.train"] = bits / self.characters_a_token
        self._write(state, metrics)
        self.shown = f"{metrics['bits_per_character.train']:.3f} {self.unit}"
        speed = metrics["tokens_per_second"]
        self.recorded += 1
        if self.recorded == 2:  # the first steps are slow
            self._estimate(state, speed)
        if self.time_left:
            self.shown += f", about {duration(sum(self.time_left.seconds(state, speed)))} left"
        self.bar.show(self.shown, state.tokens)

    def evaluate(self, state: TrainingState) -> None:
        """Evaluate the held-out text, and show the beginning of a sample; a signal ends it at once, and
        nothing is recorded. Every record is over the same tokens."""
        begun = time.perf_counter()
        with self.signals.at_once(), summon_full_params(self.model):
            found = self._evaluation(whole=False)
            if not math.isfinite(found.loss):
                raise NotFiniteError(f"held-out loss is {found.loss} at token {state.tokens:,}.")
            glimpse = in_one_line(self._sample(GLIMPSE_CHARACTERS))
        bits = self.validation.comparable(found, whole=False)["bits_per_character"]
        metrics = {
            "loss.valid": found.loss,
            "bits_per_character.valid": bits,
            "accuracy.valid": found.accuracy,
            "evaluated_tokens": found.tokens,
            "evaluation_seconds": state.evaluation_seconds + time.perf_counter() - begun,
        }
        if found.reconstruction_loss is not None:
            metrics["reconstruction_loss.valid"] = found.reconstruction_loss
        self._write(state, metrics)
        if self.evaluation is None:
            self.bar.say(f"Evaluations during the training read {self._over(found)}:")
        self.evaluation, self.evaluated = found, state.tokens
        gained = state.lowest_loss is None or found.loss < state.lowest_loss
        state.lowest_loss = found.loss if gained else state.lowest_loss
        state.without_gain = 0 if gained else state.without_gain + 1
        line = f"{state.tokens:>13,} tokens  {bits:.4f} {self.unit}  sample: {glimpse}"
        self.bar.say(fitting(line, shutil.get_terminal_size().columns))
        self.bar.show(self.shown)

    def maybe_checkpoint(self, state: TrainingState) -> None:
        """Save a checkpoint if it is due; raise [`Stopped`][] if a signal has come."""
        tokens, evaluations = self.saved
        every, minutes = self.config.checkpoint.checkpoint_every, self.config.checkpoint.checkpoint_minutes
        due = state.evaluations > evaluations or (every and state.tokens // every > tokens // every)
        if not due and state.step % self.config.evaluation.log_every == 0:  # when the ranks ask each other
            is_old = bool(minutes) and time.monotonic() - self.saved_at >= 60 * minutes
            due = bool(self.ranks.highest(is_old))
        if due:
            self.save(state)
        self.signals.check(self.ranks)

    def save(self, state: TrainingState) -> None:
        """Save a checkpoint of ``state`` if it isn't saved already."""
        flush_metrics(state, self.config)
        if (state.tokens, state.evaluations) == self.saved:
            return
        found = self.evaluation if self.evaluated == state.tokens else None
        about = About(
            config=asdict(self.config),
            corpus_sha256=self.text.info.sha256,
            environment=describe_environment(self.model.device),
            records=self.records,
            validation_loss=found.loss if found else None,
            peak_memory_bytes=self._peak_memory(),
        )
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
        begun, found = time.perf_counter(), self.evaluation
        with self.signals.at_once(), summon_full_params(self.model):
            tokens, documents = self.validation.all
            if found is None or found.tokens < len(tokens) - (len(documents) or 1):
                found = self._evaluation(whole=True)
            sample = self._sample(SAMPLE_CHARACTERS)
        self.state.evaluation_seconds += time.perf_counter() - begun
        in_units = self.validation.comparable(found, whole=True)
        if found is not self.evaluation:
            bits = in_units["bits_per_character"]
            self.bar.say(f"The last evaluation reads {self._over(found)}: {bits:.4f} {self.unit}")
        result: dict[str, Any] = {
            **self.state.progress,
            "loss": found.loss,
            **{name: x if math.isfinite(x) else None for name, x in in_units.items()},
            "accuracy": found.accuracy,
            "evaluated_tokens": found.tokens,
            "held_out_tokens": self.validation.predictable,
            "reconstruction_loss": found.reconstruction_loss,
            "loss_by_position": found.by_position,
            "peak_memory_bytes": self._peak_memory(),
            "prompt": self.prompt,
        }
        if self.ranks.first:
            write_text(self.folder / SAMPLE, sample + "\n")
            write_json(self.folder / RESULT, result)

    @contextmanager
    def plain_endings(self) -> Iterator[None]:
        """A block that trains: one that is stopped keeps a checkpoint, and every way to end early says which
        checkpoint there is."""
        try:
            try:
                yield
            except Stopped as stopped:
                self.save(self.state)
                self.bar.say(f"{stopped} at token {self.state.tokens:,}; continue with --resume.")
                raise stopped.conventional() from None
        except (NotFiniteError, OSError) as error:
            newest = "No checkpoint was made yet."
            for kept in numbered(self.folder / CHECKPOINTS)[:1]:
                newest = f"The checkpoint of token {int(kept.name):,} is kept: {kept}"
            if isinstance(error, OSError):
                raise OSError(f"{self.folder} can't be written: {error}. {newest}") from None
            raise NotFiniteError(f"{error} {newest}") from None

    def _estimate(self, state: TrainingState, speed: float) -> None:
        """Measure evaluations, and say how long the training takes with them, unless it ends in a moment."""
        if self.ranks.highest(int((self.config.tokens - state.tokens) / speed)) < SHORT_SECONDS:
            return
        with summon_full_params(self.model):
            without, full = self.validation.speed(self.model)
            begun = time.perf_counter()
            self._sample(GLIMPSE_CHARACTERS)
            sample = time.perf_counter() - begun
        first, whole = (
            len(tokens) * full / self.ranks.size for tokens, _ in (self.validation.first, self.validation.all)
        )
        ending = SAMPLE_CHARACTERS / GLIMPSE_CHARACTERS * sample + whole * (whole > first)
        self.time_left = TimeLeft(self.config, first + sample, ending, full / without)
        training, evaluations = self.time_left.seconds(state, speed)
        total = duration(training + evaluations)
        self.bar.say(f"about {total}, of which {duration(evaluations)} are evaluations")

    def _write(self, state: TrainingState, metrics: dict[str, float]) -> None:
        self.write({"tokens": state.tokens, "seconds": state.seconds, **metrics})
        self.records += 1

    def _evaluation(self, whole: bool) -> Evaluation:
        def done(fraction: float) -> None:
            self.signals.check(self.ranks)
            self.bar.show(f"evaluating, {fraction:.0%}")

        return self.validation.evaluate(self.model, whole, done)

    def _over(self, evaluation: Evaluation) -> str:
        n, whole = evaluation.tokens, self.validation.predictable
        return f"{'all' if n == whole else f'the first {n:,} of'} {whole:,} held-out tokens"

    def _peak_memory(self) -> int | None:
        """The most bytes that any process of the run has held, on any rank and before a resume; every rank
        must ask. None where the system doesn't tell."""
        return max(self.ranks.highest(peak_memory(self.model.device) or 0), self.peak_before) or None

    def _sample(self, characters: int) -> str:
        self.bar.show("writing a sample")
        tokenizer, how = self.text.tokenizer, Sampling(0.8)
        return continue_text(self.model, tokenizer, self.prompt, characters, how, seed=SAMPLE_SEED)


@dataclass(frozen=True)
class TimeLeft:
    """How long a training takes, by what was measured at its beginning, in seconds."""

    config: TrainConfig
    evaluation: float
    """Of an evaluation while training, with its sample."""
    ending: float
    """Of the evaluation and the sample after the last step."""
    growth: float
    """How many times as long a segment takes with a full memory as without one."""

    def seconds(self, state: TrainingState, tokens_per_second: float) -> tuple[float, float]:
        """About how long the steps after ``state`` take, of which those before it took as long as this speed
        says, and the evaluations. Steps take longer while the memory grows."""
        left, grown = self.config.tokens - state.tokens, self.config.memory_growth * self.config.tokens
        share = 1.0 if state.begun else share_of_memory(state.tokens, self.config)
        growing = (grown - state.tokens) / max(left, 1) if share < 1 else 0.0
        later = 1 - growing * (1 - share) / 2
        slower = (1 + (self.growth - 1) * later) / (1 + (self.growth - 1) * share)
        training = max(left, 0) / tokens_per_second * slower
        evaluations = (self.config.evaluation.evaluations - state.evaluations) * self.evaluation + self.ending
        return training, evaluations


def opening(text: str) -> str:
    """What samples go on from: the held-out ``text`` up to the end of the first line with a letter or digit,
    at most the last part of it. The text is cut within a line, of which Tiny Shakespeare's rest is "?"."""
    at = next((i for i, character in enumerate(text) if character.isalnum()), 0)
    end = text.find("\n", at) + 1
    return (text[:end] if end else text)[-PROMPT_CHARACTERS:]


def in_one_line(text: str) -> str:
    """``text`` as one line for a terminal: without line breaks and control characters."""
    return printable(text.replace("\n", "⏎"))
