"""``memformers generate``: text from a trained model; and the options of all commands that use one."""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from memformers.common.console import Progress
from memformers.common.errors import UserError
from memformers.common.fields import Checked, NonNegativeInt
from memformers.common.machine import choose_device
from memformers.common.processes import Stopped, StopSignals
from memformers.data.corpus_reader import read_text
from memformers.data.tokenizer import Tokenizer
from memformers.evaluation.learning import STREAMS_OF_LEARNING, LearnConfig, learned
from memformers.generation.generate import Sampling, TextStream, make_generator
from memformers.models.io import packaged_names
from memformers.models.language_model import MemoryLM
from memformers.models.registry import import_memory
from memformers.runs.load import load_checkpoint, load_packaged


@dataclass(frozen=True, kw_only=True)
class CustomMemories:
    first: ClassVar = (
        "checkpoint", "pretrained", "prompt", "prompt_file", "text", "split", "tokens", "temperature",
    )  # fmt: skip
    model: tuple[str, ...] = ()
    """The custom memory that it was trained with, such as my_memory.py:Averages. A checkpoint never runs a
    file by itself."""

    def check_memories(self, trained: Collection[str]) -> None:
        """Raise UserError for a memory that no model was ``trained`` with."""
        for name in map(import_memory, self.model):
            if name not in trained:
                names = " or ".join(dict.fromkeys(trained))
                raise UserError(f"the checkpoint was trained with model={names}, not {name}.")


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Checked, CustomMemories):
    """The options of a command that uses a trained model."""

    checkpoint: Path | None = None
    """Where the model is: the folder of a run, of one of its checkpoints, of save_pretrained with a
    tokenizer.json, or of Hugging Face's Transformer-XL."""
    pretrained: str = ""
    """A model that comes with the package, in place of --checkpoint: compressive-shakespeare or
    transformer-xl-shakespeare."""
    device: str = "auto"
    """Where to run, such as cpu or cuda:1; auto uses a GPU if there is one."""

    def load(self) -> tuple[MemoryLM, Tokenizer]:
        """The model, of exactly one of ``--checkpoint`` and ``--pretrained``, and its tokenizer."""
        if (self.checkpoint is None) == (not self.pretrained):
            raise UserError(
                f"name one model: --checkpoint with the folder of a run, or --pretrained with one of "
                f"{', '.join(packaged_names())}."
            )
        device, folder = choose_device(self.device), self.checkpoint
        for name in self.model:
            import_memory(name)
        loaded = load_checkpoint(folder, device) if folder else load_packaged(self.pretrained, device)
        self.check_memories([loaded[0].config.model])
        return loaded


def reading_bar(doing: str, tokens: int, model: MemoryLM) -> Progress:
    """A bar of the ``tokens`` that a model reads, for more of them than are read in a moment."""
    is_short = tokens <= 50 * model.config.segment_len
    return Progress(total=tokens, unit="tok", unit_scale=True, desc=doing, hidden=is_short)


@dataclass(frozen=True)
class Generate(ModelCommand):
    """Continue a text with a trained model, token by token. Ctrl-C ends it.

    Example: memformers generate --pretrained compressive-shakespeare --prompt "ROMEO:"

    Example: memformers generate --checkpoint runs/… --prompt "ROMEO:"
    """

    prompt: str | None = None
    """The text to continue, after that of --prompt-file; by default a line break."""
    prompt_file: str = ""
    """A text file to read first, of any length; - is standard input."""
    tokens: NonNegativeInt = 400
    """How many tokens to generate."""
    sampling: Sampling = field(default_factory=lambda: Sampling(0.8))
    """How each token is drawn."""
    learn: bool = False
    """Whether the model first learns the prompt, by one gradient step after each segment as in evaluate
    --learn; then it reads it, and generates. The prompt needs at least 2 tokens."""
    stop: str = ""
    """Stop after this text."""
    seed: int | None = None
    """The same seed generates the same text; without it, each call differs."""
    interactive: bool = False
    """Whether to ask for more text afterwards, line by line, and to continue each line; the model's memory
    carries the whole conversation."""

    def run(self) -> None:
        stream = TextStream(*self.load())
        ending: BaseException | None = None
        with StopSignals() as signals:
            try:
                self.converse(stream, signals)
            except (EOFError, Stopped) as end:
                print()
                ending = end.conventional() if isinstance(end, Stopped) else None
        if ending and not isinstance(ending, KeyboardInterrupt):  # Ctrl-C is how a user ends it
            raise ending

    def converse(self, stream: TextStream, signals: StopSignals) -> None:
        """Continue the prompt, then, if ``interactive``, each line of the user's."""
        if self.interactive and sys.stdin.isatty():
            print("Write a line for the model to continue; Ctrl-D or Ctrl-C ends.", file=sys.stderr)
        generator = make_generator(self.seed, stream.device)
        text = read_text(self.prompt_file) if self.prompt_file else ""
        is_empty = self.prompt is None and not (text or self.interactive)
        prompt = stream.tokenizer.line_break if is_empty else self.prompt or ""
        with self.learning(stream, text + prompt, signals):
            self.read_prompt(stream, text + prompt, signals)
            print(prompt, end="", flush=True)
            if stream.reader.last is not None or not self.interactive:
                self.write(stream, generator, signals)
            while self.interactive:
                with signals.at_once():
                    line = input("> " if sys.stdin.isatty() else "")
                try:
                    stream.read(line + stream.tokenizer.line_break, lambda tokens: signals.check())
                except UserError as error:  # such as a character that the model doesn't know
                    print(f"error: {error}", file=sys.stderr)
                    continue
                self.write(stream, generator, signals)

    @contextmanager
    def learning(self, stream: TextStream, text: str, signals: StopSignals) -> Iterator[None]:
        """With ``--learn``, the model has learned the ``text`` meanwhile."""
        if not self.learn:
            yield
            return
        tokens = stream.tokenizer.encode(text)
        if len(tokens) < 2:
            raise UserError(
                f"--learn needs a prompt of at least 2 tokens, got {len(tokens)}; write a longer one, or "
                f"leave out --learn."
            )
        with reading_bar("learning", len(tokens), stream.model) as bar:

            def progress(losses: torch.Tensor) -> None:
                bar.update(len(losses))
                signals.check()

            with learned(stream.model, tokens, STREAMS_OF_LEARNING, LearnConfig(), progress=progress):
                bar.close()
                yield

    def read_prompt(self, stream: TextStream, text: str, signals: StopSignals) -> None:
        n_tokens = len(stream.tokenizer.encode(text))
        with reading_bar("prefill", n_tokens, stream.model) as bar:

            def progress(n_read: int) -> None:
                bar.update(n_read)
                signals.check()

            stream.read(text, progress)

    def write(self, stream: TextStream, generator: torch.Generator, signals: StopSignals) -> None:
        for piece in stream.write(self.tokens, self.sampling, generator, self.stop):
            print(piece, end="", flush=True)
            signals.check()
        print()
