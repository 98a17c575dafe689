"""A run: one training in a folder that holds everything about it.

config.json      the TrainConfig
run.json         corpus, parameters, hardware, versions
metrics.jsonl    every record, as it came
checkpoint/      weights, model config and tokenizer of the newest evaluation
sample.txt       text written at the end
result.json      the last evaluation, recall by distance, time and peak memory
"""

import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from memformers.data.corpora import Corpus, load_corpus
from memformers.data.streams import check_length, training_segments
from memformers.data.tokenizers import Tokenizer, build_tokenizer, save_tokenizer
from memformers.environment import describe_environment, peak_memory
from memformers.evaluation import Evaluation, evaluate
from memformers.files import write_json, write_text
from memformers.generation import continue_text
from memformers.language_model import MemoryLM, ModelConfig
from memformers.recall import measure_recall
from memformers.tracking import Tracking, find_dashboard
from memformers.training.config import TrainConfig
from memformers.training.loop import NotFiniteError, Progress, train

EVALUATION_STREAMS = 16
SAMPLE_CHARACTERS, GLIMPSE_CHARACTERS = 400, 80
PROMPT_CHARACTERS = 100
SAMPLE_SEED = 0


def train_run(config: TrainConfig, folder: Path, dashboard: str = "") -> Path:
    """Train as ``config`` says into ``folder``, which must not hold a run yet; returns the folder.

    ``dashboard`` is a labml server's address; empty, labml's own ``$labml_app_url`` counts. Raises
    ValueError for a corpus or config that doesn't work, and for a folder in use;
    :class:`NotFiniteError` for a training that diverged, with the last good checkpoint kept.
    """
    if (folder / "metrics.jsonl").exists():
        raise ValueError(f"{folder} already holds a run; name a new folder for this one.")
    find_dashboard(dashboard)
    corpus = load_corpus(config.data)
    text = prepare(corpus, config)
    device = choose_device(config.device)
    if config.compile:
        check_compiler(device)
    config = with_vocabulary(config, text.tokenizer.vocab_size)
    model = build_model(config).to(device)

    folder.mkdir(parents=True, exist_ok=True)
    facts = describe_run(corpus, model, device)
    write_json(folder / "config.json", asdict(config))
    write_json(folder / "run.json", facts)
    announce(corpus, config, model, folder)
    labml_config = {**asdict(config), **facts}
    with Tracking(folder, config.model.model, labml_config, dashboard) as tracking:
        with tqdm(total=config.tokens, unit="tok", unit_scale=True, desc=config.model.model) as bar:
            run = Run(folder, model, text, tracking.record, bar)
            try:
                progress = train(
                    model,
                    training_segments(text.train, config.batch_size, config.model.segment_len),
                    config,
                    record=run.record,
                    evaluate=run.evaluate,
                )
            except NotFiniteError as error:
                raise NotFiniteError(f"{error} {run.last_checkpoint()}") from None
        run.finish(progress)
    return folder


@dataclass(frozen=True)
class Text:
    """A corpus as tokens."""

    corpus: Corpus
    tokenizer: Tokenizer
    train: Tensor
    validation: Tensor


def prepare(corpus: Corpus, config: TrainConfig) -> Text:
    """The corpus as tokens, long enough for ``config`` to train and validate on; else ValueError."""
    tokenizer = build_tokenizer(config.tokenizer, corpus.text)
    train_tokens = tokenizer.encode(corpus.train_text)
    validation = tokenizer.encode(corpus.validation_text)
    check_length(len(train_tokens), config.batch_size, config.model.segment_len)
    if len(validation) < 2:
        raise ValueError(f"{corpus.source} leaves {len(validation)} tokens to validate on.")
    return Text(corpus, tokenizer, train_tokens, validation)


def with_vocabulary(config: TrainConfig, vocab_size: int) -> TrainConfig:
    """The config for a text of so many different tokens; ValueError where it asks for others."""
    asked = config.model.vocab_size
    if asked not in (ModelConfig().vocab_size, vocab_size):
        raise ValueError(f"vocab_size={asked}, but the text has {vocab_size}; leave vocab_size out.")
    return replace(config, model=replace(config.model, vocab_size=vocab_size))


def build_model(config: TrainConfig) -> MemoryLM:
    """A model whose weights are those of ``config.seed``, whatever was drawn before."""
    model = MemoryLM(config.model)
    torch.manual_seed(config.seed)
    model.reset_parameters()
    return model


def choose_device(name: str) -> torch.device:
    """The device called ``name``, checked by using it; ``auto`` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(f"device={name!r} can't be used here: {first_line}") from None


def check_compiler(device: torch.device) -> None:
    """Raise ValueError where torch.compile can't compile; on CPU it needs a C++ compiler."""
    try:
        torch.compile(torch.exp)(torch.zeros(2, device=device))
    except Exception as error:  # whatever a compiler, a linker or a missing one may end in
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"compile=True can't be used here; leave it out. torch.compile says: {reason}"
        ) from None


class Run:
    """What happens beside the training steps: records, evaluations, checkpoints, samples."""

    def __init__(
        self,
        folder: Path,
        model: MemoryLM,
        text: Text,
        write: Callable[[dict[str, Any]], None],
        bar: "tqdm[Any]",
    ):
        self.folder = folder
        self.model = model
        self.text = text
        self.write = write
        self.bar = bar
        self.checkpoint_tokens: int | None = None
        self.evaluation: Evaluation | None = None

    def record(self, progress: Progress, metrics: dict[str, float]) -> None:
        """Track training metrics, and show them."""
        metrics["bits_per_character.train"] = self._bits_per_character(metrics["loss.train"])
        self._write(progress, metrics)
        self.bar.update(progress.tokens - self.bar.n)
        self.bar.set_postfix_str(f"loss {metrics['loss.train']:.3f} nats", refresh=False)

    def evaluate(self, progress: Progress) -> None:
        """Evaluate the whole validation text, keep a checkpoint, and show a glimpse of a sample."""
        self.evaluation = result = evaluate(self.model, self.text.validation, EVALUATION_STREAMS)
        bits = result.bits_per_character(len(self.text.corpus.validation_text))
        metrics = {
            "loss.valid": result.loss,
            "bits_per_character.valid": bits,
            "accuracy.valid": result.accuracy,
        }
        if result.reconstruction_loss is not None:
            metrics["reconstruction_loss.valid"] = result.reconstruction_loss
        if not math.isfinite(result.loss):
            raise NotFiniteError(f"validation loss is {result.loss} at token {progress.tokens:,}.")
        self._write(progress, metrics)
        self.model.save_pretrained(self.folder / "checkpoint")
        save_tokenizer(self.text.tokenizer, self.folder / "checkpoint")
        self.checkpoint_tokens = progress.tokens
        glimpse = self._sample(GLIMPSE_CHARACTERS).replace("\n", "⏎")
        self.bar.write(
            f"{progress.tokens:>12,} tokens  validation {result.loss:.4f} nats, {bits:.4f} bits a "
            f"character  │ {glimpse}",
            file=sys.stderr,
        )

    def finish(self, progress: Progress) -> None:
        """Write the sample and the result."""
        assert self.evaluation is not None
        write_text(self.folder / "sample.txt", self._sample(SAMPLE_CHARACTERS) + "\n")
        repeats = self.text.corpus.validation_repeats
        result: dict[str, Any] = {
            **asdict(progress),
            "loss": self.evaluation.loss,
            "bits_per_character": self.evaluation.bits_per_character(len(self.text.corpus.validation_text)),
            "accuracy": self.evaluation.accuracy,
            "reconstruction_loss": self.evaluation.reconstruction_loss,
            "peak_memory_bytes": peak_memory(self.model.head.weight.device),
            "recall": asdict(measure_recall(self.evaluation, repeats)) if repeats else None,
        }
        write_json(self.folder / "result.json", result)

    def last_checkpoint(self) -> str:
        """Where the newest checkpoint is, in words."""
        if self.checkpoint_tokens is None:
            return "No checkpoint was made yet."
        return f"The checkpoint of token {self.checkpoint_tokens:,} is kept: {self.folder}/checkpoint"

    def _write(self, progress: Progress, metrics: dict[str, float]) -> None:
        self.write({"tokens": progress.tokens, "seconds": progress.seconds, **metrics})

    def _bits_per_character(self, loss: float) -> float:
        characters_a_token = len(self.text.corpus.train_text) / len(self.text.train)
        return loss / math.log(2) / characters_a_token

    def _sample(self, characters: int) -> str:
        first_line, newline, _ = self.text.corpus.validation_text.partition("\n")
        prompt = (first_line + newline)[-PROMPT_CHARACTERS:]
        return continue_text(
            self.model, self.text.tokenizer, prompt, characters, temperature=0.8, seed=SAMPLE_SEED
        )


def describe_run(corpus: Corpus, model: MemoryLM, device: torch.device) -> dict[str, Any]:
    """The facts of ``run.json``."""
    return {
        "corpus": {
            "name": corpus.name,
            "source": corpus.source,
            "characters": len(corpus.text),
            "sha256": corpus.sha256,
            "stands_in_for_tiny_shakespeare": corpus.is_stand_in,
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        "memory": {
            "one_layer": model.config.remembered_positions,
            "all_layers": model.config.remembered_positions * model.config.n_layers,
        },
        "environment": describe_environment(device),
    }


def announce(corpus: Corpus, config: TrainConfig, model: MemoryLM, folder: Path) -> None:
    """Say on the screen what is about to be trained, on what, and where it is kept."""
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{config.model.model}: {parameters:,} parameters, {config.tokens:,} tokens → {folder}")
    print(f"corpus: {corpus.name} ({corpus.source})")
