"""What happens beside the training steps: records, evaluations, checkpoints, samples."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from memformers.common.environment import describe_environment, peak_memory
from memformers.common.files import sync, write_json, write_text
from memformers.evaluation.evaluate import Evaluation, evaluate
from memformers.evaluation.recall import measure_recall
from memformers.generation.sampling import Sampling
from memformers.generation.text import continue_text
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import CHECKPOINTS, METRICS, RESULT, SAMPLE
from memformers.runs.sealed import numbered
from memformers.training.checkpoints import About, keep_best_and_newest, save_checkpoint
from memformers.training.config import TrainConfig
from memformers.training.loop import NotFiniteError
from memformers.training.ranks import Ranks, unsharded
from memformers.training.signals import Stopped, StopSignals
from memformers.training.state import Progress, TrainingState
from memformers.training.text import Text

EVALUATION_STREAMS = 16
SAMPLE_CHARACTERS, GLIMPSE_CHARACTERS = 400, 80
PROMPT_CHARACTERS = 100
SAMPLE_SEED = 0


class Observer:
    """Watches the training of ``model`` in ``folder``, which has written ``records`` lines of metrics and
    stands at ``state``; what ``write`` gets is recorded, and ``signals`` stop it. Of several ``ranks``,
    each has one that measures the same, and the first one's writes files."""

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        model: MemoryLM,
        text: Text,
        state: TrainingState,
        records: int,
        write: Callable[[dict[str, Any]], None],
        signals: StopSignals,
        bar: "tqdm[Any]",
        ranks: Ranks,
    ):
        self.folder = folder
        self.config = config
        self.model = model
        self.text = text
        self.records = records
        self.write = write
        self.signals = signals
        self.bar = bar
        self.ranks = ranks
        self.saved, self.saved_at = (state.tokens, state.evaluations), time.monotonic()
        self.evaluation: Evaluation | None = None
        self.characters_a_token = len(text.corpus.train_text) / len(text.train)
        self.evaluated = 0
        """Tokens seen before [`evaluation`][]."""

    def record(self, progress: Progress, metrics: dict[str, float]) -> None:
        """Track training metrics, and show them."""
        metrics["bits_per_character.train"] = self._bits_per_character(metrics["loss.train"])
        self._write(progress, metrics)
        self.bar.update(progress.tokens - self.bar.n)
        self.bar.set_postfix_str(f"loss {metrics['loss.train']:.3f} nats", refresh=False)

    def evaluate(self, progress: Progress) -> None:
        """Evaluate the whole validation text, and show a glimpse of a sample; a signal ends it at once,
        with nothing recorded."""
        with self.signals.at_once(), unsharded(self.model):
            result = self._evaluation()
            if not math.isfinite(result.loss):
                raise NotFiniteError(f"validation loss is {result.loss} at token {progress.tokens:,}.")
            glimpse = in_one_line(self._sample(GLIMPSE_CHARACTERS))
        bits = self._bits_of(result)
        metrics = {
            "loss.valid": result.loss,
            "bits_per_character.valid": bits,
            "accuracy.valid": result.accuracy,
        }
        if result.reconstruction_loss is not None:
            metrics["reconstruction_loss.valid"] = result.reconstruction_loss
        self._write(progress, metrics)
        self.evaluation, self.evaluated = result, progress.tokens
        if not self.ranks.first:
            return
        self.bar.write(
            f"{progress.tokens:>12,} tokens  validation {result.loss:.4f} nats, {bits:.4f} bits a "
            f"character  │ {glimpse}",
            file=sys.stderr,
        )

    def maybe_checkpoint(self, state: TrainingState) -> None:
        """Keep a checkpoint if it is time; raise [`Stopped`][] if a signal has come."""
        tokens, evaluations = self.saved
        every = self.config.checkpoint_every
        due = state.evaluations > evaluations or (every and state.tokens // every > tokens // every)
        if due or self._is_long_ago(state):
            self.save(state)
        self.signals.check(self.ranks)

    def save(self, state: TrainingState) -> None:
        """Keep a checkpoint of ``state``, if it isn't kept already."""
        if (state.tokens, state.evaluations) == self.saved:
            return
        evaluated = self.evaluation if self.evaluated == state.tokens else None
        about = About(
            config=asdict(self.config),
            corpus_sha256=self.text.corpus.sha256,
            environment=describe_environment(self.model.device),
            records=self.records,
            validation_loss=evaluated.loss if evaluated else None,
        )
        checkpoints = self.folder / CHECKPOINTS
        if self.ranks.first:
            sync(self.folder / METRICS)
        new = checkpoints / f"{state.tokens:012}"
        save_checkpoint(new, self.model, self.text.tokenizer, state, about, self.ranks)
        self.saved, self.saved_at = (state.tokens, state.evaluations), time.monotonic()
        if self.ranks.first:
            keep_best_and_newest(checkpoints, self.config.keep_checkpoints)

    def finish(self, progress: Progress) -> None:
        """Write the sample and the result; a signal ends it at once."""
        with self.signals.at_once(), unsharded(self.model):
            evaluation = self.evaluation or self._evaluation()
            sample = self._sample(SAMPLE_CHARACTERS)
            repeats = self.text.corpus.validation_repeats
            recall = asdict(measure_recall(evaluation, repeats)) if repeats else None
        result: dict[str, Any] = {
            **asdict(progress),
            "loss": evaluation.loss,
            "bits_per_character": self._bits_of(evaluation),
            "accuracy": evaluation.accuracy,
            "reconstruction_loss": evaluation.reconstruction_loss,
            "peak_memory_bytes": peak_memory(self.model.device),
            "recall": recall,
        }
        if self.ranks.first:
            write_text(self.folder / SAMPLE, sample + "\n")
            write_json(self.folder / RESULT, result)

    @contextmanager
    def plain_endings(self, state: TrainingState) -> Iterator[None]:
        """A block in which ``state`` is trained: one that is stopped keeps a checkpoint, and every way to
        end early says which checkpoint there is."""
        try:
            try:
                yield
            except Stopped as stopped:
                self.save(state)
                if self.ranks.first:
                    said = f"{stopped} at token {state.tokens:,}; --resume goes on."
                    self.bar.write(said, file=sys.stderr)
                raise stopped.conventional() from None
        except NotFiniteError as error:
            raise NotFiniteError(f"{error} {self._newest_checkpoint()}") from None
        except OSError as error:
            raise OSError(f"{self.folder} can't be written: {error}. {self._newest_checkpoint()}") from None

    def _is_long_ago(self, state: TrainingState) -> bool:
        """Whether the last checkpoint is older than wanted, on any rank; they ask each other now and then."""
        minutes = (time.monotonic() - self.saved_at) / 60
        wanted = self.config.checkpoint_minutes
        due = bool(wanted) and minutes >= wanted
        return state.step % self.config.log_every == 0 and bool(self.ranks.highest(due))

    def _newest_checkpoint(self) -> str:
        kept = numbered(self.folder / CHECKPOINTS)
        if not kept:
            return "No checkpoint was made yet."
        return f"The checkpoint of token {int(kept[0].name):,} is kept: {kept[0]}"

    def _write(self, progress: Progress, metrics: dict[str, float]) -> None:
        self.write({"tokens": progress.tokens, "seconds": progress.seconds, **metrics})
        self.records += 1

    def _evaluation(self) -> Evaluation:
        return evaluate(
            self.model,
            self.text.validation,
            EVALUATION_STREAMS,
            between_segments=lambda: self.signals.check(self.ranks),
        )

    def _bits_of(self, evaluation: Evaluation) -> float:
        """Bits per character of the held-out text, whose first one isn't predicted."""
        return evaluation.bits_per_character(max(len(self.text.corpus.validation_text) - 1, 1))

    def _bits_per_character(self, loss: float) -> float:
        return loss / math.log(2) / self.characters_a_token

    def _sample(self, characters: int) -> str:
        first_line, newline, _ = self.text.corpus.validation_text.partition("\n")
        prompt = (first_line + newline)[-PROMPT_CHARACTERS:]
        return continue_text(
            self.model, self.text.tokenizer, prompt, characters, Sampling(0.8), seed=SAMPLE_SEED
        )


def in_one_line(text: str) -> str:
    """``text`` as a terminal can show it in a line: no line breaks, and nothing that would move its cursor,
    ring its bell or change its colours."""
    text = text.replace("\n", "⏎")
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
