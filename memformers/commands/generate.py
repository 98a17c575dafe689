"""``memformers generate``: text from a trained model."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from memformers.commands.places import read_text
from memformers.generation import TextStream, load_checkpoint
from memformers.sampling import Sampling, seeded
from memformers.training.run import choose_device


@dataclass(frozen=True)
class Generate:
    """Continue a text with a trained model, written as it comes; Ctrl-C ends it.

    Example: memformers generate --checkpoint runs/… --prompt "ROMEO:"
    """

    checkpoint: Path
    """Folder of a run, or a folder that save_pretrained wrote with its tokenizer."""
    prompt: str | None = None
    """The text to go on from, after that of --prompt-file; by default the beginning of a line."""
    prompt_file: str = ""
    """A text file to read first, as long as a book if you like; - is standard input."""
    tokens: int = 400
    """How many tokens to write."""
    temperature: float = 0.8
    """Below 1 safer, above 1 wilder; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Draw among the k likeliest tokens only."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together reach this probability."""
    stop: str = ""
    """End after this text was written."""
    seed: int | None = None
    """The same seed writes the same text; by default each call differs."""
    interactive: bool = False
    """Then ask for more text, line by line, and answer each; everything said stays in memory."""
    load_memory: Path | None = None
    """Go on from the memory that --save-memory wrote."""
    save_memory: Path | None = None
    """Write what the model remembers at the end to this file."""
    device: str = "auto"
    """Where to run, such as cpu or cuda:1; auto takes a GPU if there is one."""

    def run(self) -> None:
        """Print the prompt and what the model makes of it."""
        sampling = Sampling(self.temperature, self.top_k, self.top_p)
        model, tokenizer = load_checkpoint(self.checkpoint, choose_device(self.device))
        stream = TextStream(model, tokenizer)
        if self.load_memory:
            stream.load_memory(self.load_memory)
        generator = seeded(self.seed, stream.device)
        self.read_prompt(stream)
        try:
            if stream.reader.logits is not None or not self.interactive:
                self.write(stream, sampling, generator)
            while self.interactive:
                stream.read(ask() + "\n")
                self.write(stream, sampling, generator)
        except (EOFError, KeyboardInterrupt):
            print()
        if self.save_memory:
            stream.save_memory(self.save_memory)

    def read_prompt(self, stream: TextStream) -> None:
        """Let the model read the file and the prompt; shows the prompt, and how far a long file is."""
        text = read_text(self.prompt_file) if self.prompt_file else ""
        nothing_given = not (text or self.load_memory or self.interactive)
        prompt = "\n" if self.prompt is None and nothing_given else self.prompt or ""
        tokens = len(stream.tokenizer.encode(text + prompt))
        long = tokens > 50 * stream.model.config.segment_len
        with tqdm(total=tokens, unit="tok", unit_scale=True, desc="reading", disable=not long) as bar:
            stream.read(text + prompt, bar.update)
        print(prompt, end="", flush=True)

    def write(self, stream: TextStream, sampling: Sampling, generator: torch.Generator) -> None:
        """Print what the model writes, as it comes."""
        for piece in stream.write(self.tokens, sampling, generator, self.stop):
            print(piece, end="", flush=True)
        print()


def ask() -> str:
    """The user's next line; EOFError when there is none."""
    return input("> " if sys.stdin.isatty() else "")
