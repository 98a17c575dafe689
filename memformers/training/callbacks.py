"""What happens between training steps: records, evaluations, checkpoints, samples."""

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memformers.common.atomic_dir import numbered
from memformers.common.files import sync, write_json, write_text
from memformers.common.machine import describe_environment, peak_memory
from memformers.common.progress import Progress
from memformers.common.text_format import fitting, printable
from memformers.data.dataset import TokenDataset
from memformers.evaluation.evaluate import Evaluation
from memformers.generation.sampling import Sampling
from memformers.generation.text import continue_text
from memformers.models.language_model import MemoryLM
from memformers.models.registry import short_name
from memformers.runs.folder import CHECKPOINTS, METRICS, RESULT, SAMPLE
from memformers.training.checkpoints import About, keep_best_and_newest, save_checkpoint, usable_about
from memformers.training.config import TrainConfig
from memformers.training.data_module import Validation, held_out_beginning
from memformers.training.distributed import Distributed, summon_full_params
from memformers.training.loop import NotFiniteError, flush_metrics
from memformers.training.signals import Stopped, StopSignals
from memformers.training.state import TrainingState

SAMPLE_CHARACTERS, GLIMPSE_CHARACTERS = 400, 50
PROMPT_CHARACTERS = 100
SAMPLE_SEED = 0


class Bar:
    """A progress bar of the tokens of ``config``, of which ``tokens`` have been seen. Its time, and so its
    speed, is that of training steps only. Nothing is printed unless it is ``shown``."""

    def __init__(self, config: TrainConfig, tokens: int = 0, shown: bool = True):
        self.shown, self.total = shown, config.tokens
        name = short_name(config.model.model)
        self.tqdm = Progress(desc=name, total=self.total, initial=min(tokens, self.total),
                         unit="tok", unit_scale=True, disable=not shown)  # fmt: skip
        self.training = ""
        """What stands behind the bar while steps are taken."""

    def close(self) -> None:
        """End the bar, where it stands."""
        self.tqdm.close()

    def show(self, tokens: int, loss: float) -> None:
        """Show how many ``tokens`` have been seen, and the training's loss in nats."""
        self.training = f"loss {loss:.3f} nats"
        self.tqdm.set_postfix_str(self.training, refresh=False)
        self.tqdm.update(min(tokens, self.total) - self.tqdm.n)  # the last step may go beyond

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self.shown:
            self.tqdm.write(line, file=sys.stderr)

    @contextmanager
    def standing(self) -> Iterator[Callable[[str], None]]:
        """A block whose time doesn't count as training time. It gives a function that shows, a few times a
        second, what is being done."""
        if not self.shown:
            yield lambda doing: None
            return
        stood, said = time.time(), 0.0

        def stand() -> None:
            nonlocal stood
            now = time.time()
            self.tqdm.start_t += now - stood
            self.tqdm.last_print_t += now - stood
            stood = now

        def say(doing: str) -> None:
            nonlocal said
            stand()
            if stood - said >= self.tqdm.mininterval:
                self.tqdm.set_postfix_str(doing)
                said = stood

        try:
            yield say
        finally:
            stand()
            self.tqdm.set_postfix_str(self.training, refresh=False)


@dataclass
class Callbacks:
    """Watches a training in a folder. With several ``ranks``, each has an callbacks that measures the same,
    and only that of the first rank writes files."""

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
    bar: Bar
    ranks: Distributed

    begins_anew: bool = True
    """Whether the weights are those of ``config.seed``, so that no checkpoint is needed before a step."""

    def __post_init__(self) -> None:
        """Begin where the training begins."""
        self._is_saved(self.state)
        if not self.begins_anew and not self.state.tokens:
            self.saved = 0, -1
        self.validation = Validation(self.text, self.config, self.ranks)
        self.evaluation: Evaluation | None = None
        """The last one."""
        self.validation_loss: float | None = None
        """In nats per token, over the tokens that every evaluation reads."""
        self.characters_a_token = self.text.train.counts.characters / len(self.text.train.tokens)
        self.unit = f"bits per {'token' if self.text.info.tokenizer == 'ids' else 'character'}"
        self.evaluated = 0
        """Tokens seen before [`validation_loss`][] was measured."""
        newest = numbered(self.folder / CHECKPOINTS)[:1] if self.ranks.first else []
        abouts = [about for folder in newest if (about := usable_about(folder))]
        self.peak_before = max((about.peak_memory_bytes or 0 for about in abouts), default=0)
        """The most bytes that the processes which trained here before have held."""

    def record(self, state: TrainingState, metrics: dict[str, float]) -> None:
        """Track training metrics, and show them."""
        bits = metrics["loss.train"] / math.log(2)
        metrics["bits_per_character.train"] = bits / self.characters_a_token
        self._write(state, metrics)
        self.bar.show(state.tokens, metrics["loss.train"])

    def evaluate(self, state: TrainingState) -> None:
        """Evaluate the held-out text, and show the beginning of a sample; a signal ends it at once, and
        nothing is recorded. Every record is over the same tokens."""
        begun = time.perf_counter()
        with self.signals.at_once(), summon_full_params(self.model):
            result = self._evaluation(whole=False)
            if not math.isfinite(result.loss):
                raise NotFiniteError(f"validation loss is {result.loss} at token {state.tokens:,}.")
            glimpse = in_one_line(self._sample(GLIMPSE_CHARACTERS))
        metrics = self.validation.metrics(result)
        seconds = state.evaluation_seconds + time.perf_counter() - begun
        self._write(state, {**metrics, "evaluation_seconds": seconds})
        if self.evaluation is None:
            self.bar.say(f"{self._over(result)}:")
        self.evaluation, self.validation_loss, self.evaluated = result, result.loss, state.tokens
        gained = state.lowest_loss is None or result.loss < state.lowest_loss
        state.lowest_loss = result.loss if gained else state.lowest_loss
        state.without_gain = 0 if gained else state.without_gain + 1
        bits = f"{metrics['bits_per_character.valid']:.4f} {self.unit}"
        line = f"{state.tokens:>13,} tokens  {bits}  │ {glimpse}"
        self.bar.say(fitting(line, shutil.get_terminal_size().columns))

    def maybe_checkpoint(self, state: TrainingState) -> None:
        """Save a checkpoint if it is due; raise [`Stopped`][] if a signal has come."""
        tokens, evaluations = self.saved
        every = self.config.checkpoint.checkpoint_every
        due = state.evaluations > evaluations or (every and state.tokens // every > tokens // every)
        if due or self._is_long_ago(state):
            self.save(state)
        self.signals.check(self.ranks)

    def save(self, state: TrainingState) -> None:
        """Save a checkpoint of ``state`` if it isn't saved already."""
        flush_metrics(state, self.config)
        if (state.tokens, state.evaluations) == self.saved:
            return
        about = About(
            config=asdict(self.config),
            corpus_sha256=self.text.info.sha256,
            environment=describe_environment(self.model.device),
            records=self.records,
            validation_loss=self.validation_loss if self.evaluated == state.tokens else None,
            peak_memory_bytes=self._peak_memory(),
        )
        checkpoints = self.folder / CHECKPOINTS
        if self.ranks.first:
            sync(self.folder / METRICS)
        new = checkpoints / f"{state.tokens:012}"
        with self.bar.standing():
            save_checkpoint(new, self.model, self.text.tokenizer, state, about, self.ranks)
        self._is_saved(state)
        if self.ranks.first:
            keep_best_and_newest(checkpoints, self.config.checkpoint.keep_checkpoints)

    def finish(self) -> None:
        """Write the sample and the result; a signal ends it at once."""
        begun, evaluation = time.perf_counter(), self.evaluation
        with self.signals.at_once(), summon_full_params(self.model):
            if evaluation is None or evaluation.tokens < self.validation.predictable:
                evaluation = self._evaluation(whole=True)
            sample = self._sample(SAMPLE_CHARACTERS)
        self.state.evaluation_seconds += time.perf_counter() - begun
        in_units = self.validation.comparable(evaluation)
        if evaluation is not self.evaluation:
            self.bar.say(f"{self._over(evaluation)}: {in_units['bits_per_character']:.4f} {self.unit}")
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
            "prompt": opening(held_out_beginning(self.text)),
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
        except NotFiniteError as error:
            raise NotFiniteError(f"{error} {self._newest_checkpoint()}") from None
        except OSError as error:
            raise OSError(f"{self.folder} can't be written: {error}. {self._newest_checkpoint()}") from None

    def _is_saved(self, state: TrainingState) -> None:
        """Note that ``state`` needs no checkpoint any more."""
        self.saved, self.saved_at = (state.tokens, state.evaluations), time.monotonic()

    def _is_long_ago(self, state: TrainingState) -> bool:
        """Whether the last checkpoint is older than wanted, on any rank; they ask each other now and then."""
        minutes = (time.monotonic() - self.saved_at) / 60
        wanted = self.config.checkpoint.checkpoint_minutes
        due = bool(wanted) and minutes >= wanted
        return state.step % self.config.evaluation.log_every == 0 and bool(self.ranks.highest(due))

    def _newest_checkpoint(self) -> str:
        kept = numbered(self.folder / CHECKPOINTS)
        if not kept:
            return "No checkpoint was made yet."
        return f"The checkpoint of token {int(kept[0].name):,} is kept: {kept[0]}"

    def _write(self, state: TrainingState, metrics: dict[str, float]) -> None:
        self.write({"tokens": state.tokens, "seconds": state.seconds, **metrics})
        self.records += 1

    def _evaluation(self, whole: bool) -> Evaluation:
        with self.bar.standing() as show:

            def done(fraction: float) -> None:
                self.signals.check(self.ranks)
                show(f"evaluating, {fraction:.0%}")

            return self.validation.evaluate(self.model, whole, done)

    def _over(self, evaluation: Evaluation) -> str:
        n, whole = evaluation.tokens, self.validation.predictable
        return f"over {f'all {n:,}' if n == whole else f'{n:,} of {whole:,}'} held-out tokens"

    def _peak_memory(self) -> int | None:
        """The most bytes that any process of the run has held, on any rank and before a resume; every rank
        must ask. None where the system doesn't tell."""
        return max(self.ranks.highest(peak_memory(self.model.device) or 0), self.peak_before) or None

    def _sample(self, characters: int) -> str:
        with self.bar.standing() as show:
            show("writing a sample")
            prompt, how = opening(held_out_beginning(self.text)), Sampling(0.8)
            return continue_text(self.model, self.text.tokenizer, prompt, characters, how, seed=SAMPLE_SEED)


def opening(text: str) -> str:
    """What samples go on from: the beginning of the held-out ``text``, up to the end of the first line with a
    letter or a digit, or the last part of this if it is long. The first line alone would not do: the text is
    cut in the middle of a line, of which Tiny Shakespeare's rest is "?"."""
    at = next((i for i, character in enumerate(text) if character.isalnum()), 0)
    end = text.find("\n", at) + 1
    return (text[:end] if end else text)[-PROMPT_CHARACTERS:]


def in_one_line(text: str) -> str:
    """``text`` as one line for a terminal: without line breaks and control characters."""
    return printable(text.replace("\n", "⏎"))
