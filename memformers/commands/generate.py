"""``memformers generate``: text from a trained model."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from memformers.commands.trained import ModelCommand, reading_bar
from memformers.common.errors import UserError
from memformers.common.fields import NonNegativeInt
from memformers.common.machine import one_thread
from memformers.common.processes import Stopped, StopSignals
from memformers.data.corpus_reader import read_prompt
from memformers.evaluation.learning import STREAMS_OF_LEARNING, LearnConfig, learned
from memformers.generation.generate import Sampling, TextStream, make_generator

SMALL_PRODUCT = 1 << 17
"""Multiplications for a token in the largest product of a layer, up to which one thread writes a text faster
than two: by a tenth with d_model = 128, while two are faster by a sixth with d_model = 256."""


@dataclass(frozen=True)
class Generate(ModelCommand):
    """Continue a text with a trained model, token by token. Ctrl-C ends it.

    Example: memformers generate --pretrained compressive-shakespeare --prompt "ROMEO:"

    Example: memformers generate --checkpoint runs/… --prompt "ROMEO:"
    """

    prompt: str | None = None
    """The text to continue, after that of --prompt-file; by default a line break."""
    prompt_file: str = ""
    """A text to read first, of any length: a text file, a file of token ids, or - for standard input."""
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
        # Ctrl-C is how a user ends it; other signals have their exit codes.
        stream = TextStream(*self.load())
        ending: BaseException | None = None
        with StopSignals() as signals:
            try:
                self.converse(stream, signals)
            except (EOFError, Stopped) as end:
                print()
                ending = end.conventional() if isinstance(end, Stopped) else None
        if ending and not isinstance(ending, KeyboardInterrupt):
            raise ending

    def converse(self, stream: TextStream, signals: StopSignals) -> None:
        """Continue the prompt, then, if ``interactive``, each line of the user's."""
        if self.interactive and sys.stdin.isatty():
            print("Write a line for the model to continue; Ctrl-D or Ctrl-C ends.", file=sys.stderr)
        generator = make_generator(self.seed, stream.device)

        # Without any prompt, a line break is where a text begins.
        text = read_prompt(self.prompt_file, stream.tokenizer) if self.prompt_file else ""
        is_empty = self.prompt is None and not (text or self.interactive)
        prompt = stream.tokenizer.line_break if is_empty else self.prompt or ""
        with self.learning(stream, text + prompt, signals):
            # The prompt, unless the conversation begins with a line of the user's.
            self.read_prompt(stream, text + prompt, signals)
            print(prompt, end="", flush=True)
            if stream.reader.last is not None or not self.interactive:
                self.write(stream, generator, signals)

            # The conversation.
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
        config = stream.model.config
        is_small = config.d_model * config.d_ff <= SMALL_PRODUCT
        with one_thread() if is_small else nullcontext():
            for piece in stream.write(self.tokens, self.sampling, generator, self.stop):
                print(piece, end="", flush=True)
                signals.check()
        print()
