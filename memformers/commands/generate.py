"""``memformers generate``: text from a trained model."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from memformers.commands.options import ModelCommand, reading_bar
from memformers.common.errors import UserError
from memformers.common.fields import NonNegativeInt
from memformers.data.corpus_reader import read_text
from memformers.data.utf8 import text_of
from memformers.generation.generate import Sampling, TextStream, make_generator
from memformers.generation.memory_file import check_target, load_memory, save_memory
from memformers.training.signals import Stopped, StopSignals


@dataclass(frozen=True)
class Generate(ModelCommand):
    """Continue a text with a trained model, token by token; Ctrl-C ends it.

    Example: memformers generate --pretrained compressive-shakespeare --prompt "ROMEO:"

    Example: memformers generate --checkpoint runs/… --prompt "ROMEO:"
    """

    prompt: str | None = None
    """The text to continue, after that of --prompt-file; by default a line break."""
    prompt_file: str = ""
    """A text file to read first, of any length; - is standard input."""
    tokens: NonNegativeInt = 400
    """How many tokens to write."""
    sampling: Sampling = field(default_factory=lambda: Sampling(0.8))
    stop: str = ""
    """Stop after this text was written."""
    seed: int | None = None
    """The same seed generates the same text; without it, each call generates another text."""
    interactive: bool = False
    """Whether to ask for more text afterwards, line by line, and to answer each line; the whole conversation
    stays in memory."""
    load_memory: Path | None = None
    """Continue from the memory that --save-memory wrote to this file."""
    save_memory: Path | None = None
    """Save the model's memory to this file at the end."""

    def run(self) -> None:
        """Print the prompt and what the model makes of it. However it ends, the memory is saved if that was
        asked for."""
        model, tokenizer = self.load()
        if self.save_memory:
            check_target(model, self.save_memory)
        stream = TextStream(model, tokenizer)
        if self.load_memory:
            stream.reader = load_memory(model, self.load_memory)
        ending: BaseException | None = None
        with StopSignals() as signals:
            try:
                self.converse(stream, signals)
            except BrokenPipeError as end:
                ending = end
            except (EOFError, Stopped) as end:
                print()
                ending = end.conventional() if isinstance(end, Stopped) else None
            finally:
                if self.save_memory and stream.reader.last is not None:
                    save_memory(stream.reader, self.save_memory)
        if ending and not isinstance(ending, KeyboardInterrupt):  # which is how a user ends it
            raise ending

    def converse(self, stream: TextStream, signals: StopSignals) -> None:
        """Read the prompt and write on; then, if ``interactive``, answer each line of the user's. A signal
        ends it between two tokens, or while it waits for a line."""
        if self.interactive and sys.stdin.isatty():
            print("Write a line for the model to continue; Ctrl-D or Ctrl-C ends.", file=sys.stderr)
        generator = make_generator(self.seed, stream.device)
        self.read_prompt(stream, signals)
        if stream.reader.last is not None or not self.interactive:
            self.write(stream, generator, signals)
        while self.interactive:
            with signals.at_once():
                line = ask()
            try:
                stream.read(line + stream.tokenizer.line_break, lambda tokens: signals.check())
            except UserError as error:  # such as a character that the model doesn't know
                print(f"error: {error}", file=sys.stderr)
                continue
            self.write(stream, generator, signals)

    def read_prompt(self, stream: TextStream, signals: StopSignals) -> None:
        """Let the model read the file and the prompt; shows the prompt, and how far a long file is."""
        text = read_text(self.prompt_file) if self.prompt_file else ""
        nothing_given = not (text or self.load_memory or self.interactive)
        prompt = stream.tokenizer.line_break if self.prompt is None and nothing_given else self.prompt or ""
        tokens = len(stream.tokenizer.encode(text + prompt))
        with reading_bar("prefill", tokens, stream.model) as bar:

            def progress(tokens: int) -> None:
                bar.update(tokens)
                signals.check()

            stream.read(text + prompt, progress)
        print(prompt, end="", flush=True)

    def write(self, stream: TextStream, generator: torch.Generator, signals: StopSignals) -> None:
        """Print what the model writes, as it comes."""
        for piece in stream.write(self.tokens, self.sampling, generator, self.stop):
            print(piece, end="", flush=True)
            signals.check()
        print()


def ask() -> str:
    """The user's next line, without its end; EOFError when there is none."""
    if sys.stdin.isatty():
        return input("> ")
    if not (line := sys.stdin.buffer.readline()):
        raise EOFError
    return text_of(line).rstrip("\r\n")
