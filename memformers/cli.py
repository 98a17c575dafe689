"""The ``memformers`` command: train, compare, generate, evaluate, report."""

import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated

import torch
import tyro
from tqdm import tqdm

from memformers.command_line import parse_arguments, plain_errors
from memformers.comparison import CompareConfig, compare
from memformers.evaluation import evaluate, summary, with_lengths
from memformers.figures import save_loss_by_position
from memformers.files import write_json
from memformers.generation import TextStream, load_checkpoint, seeded
from memformers.report import write_report
from memformers.sampling import Sampling
from memformers.training.config import TrainConfig
from memformers.training.run import choose_device, train_run

RUNS = Path("runs")


@dataclass(frozen=True)
class Train:
    """Train one model on a text.

    Example: memformers train --model compressive --data my_book.txt
    """

    config: tyro.conf.OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    out: Path | None = None
    """Folder of the run; by default runs/, the date and the model."""
    dashboard: str = ""
    """The labml server's address, such as http://localhost:5005/api/v1/default. Empty: labml's own
    $labml_app_url, or no dashboard."""

    def folder(self) -> Path:
        """Where the run goes."""
        return self.out or new_folder(self.config.model.model)

    def run(self) -> None:
        """Train, then say where the run is."""
        print(f"run: {train_run(self.config, self.folder(), self.dashboard)}")


@dataclass(frozen=True)
class Compare:
    """Train several models alike, one after the other, and write a report.

    Example: memformers compare --scale 0.1
    """

    config: tyro.conf.OmitArgPrefixes[CompareConfig] = field(default_factory=CompareConfig)
    out: Path | None = None
    """Folder of the comparison; by default runs/, the date and "compare"."""
    dashboard: str = ""
    """The labml server's address, such as http://localhost:5005/api/v1/default. Empty: labml's own
    $labml_app_url, or no dashboard."""

    def folder(self) -> Path:
        """Where the comparison goes."""
        return self.out or new_folder("compare")

    def run(self) -> None:
        """Compare, then say where the report is."""
        report = compare(self.config, self.folder(), self.dashboard)
        print(f"report: {report}\n        {report.with_suffix('.md')}")


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
            if stream.logits is not None or not self.interactive:
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


@dataclass(frozen=True)
class Evaluate:
    """Measure how well a trained model predicts a text, read whole, with memory carried along.

    Example: memformers evaluate --checkpoint runs/… --text book.txt --mem-len 400
    """

    checkpoint: Path
    """Folder of a run, or a folder that save_pretrained wrote with its tokenizer."""
    text: str
    """A text file; - is standard input."""
    streams: int = 16
    """Parallel streams that the text is cut into; fewer are stricter and slower, since each begins with
    nothing remembered."""
    segment_len: int | None = None
    """Segment length S, where it should differ from training's."""
    mem_len: int | None = None
    """Memory length M, where it should differ from training's."""
    c_mem_len: int | None = None
    """Compressed memory length C, where it should differ from training's."""
    out: Path | None = None
    """A folder for the numbers, evaluation.json, and a figure of the loss by position."""
    device: str = "auto"
    """Where to run, such as cpu or cuda:1; auto takes a GPU if there is one."""

    def run(self) -> None:
        """Print the numbers; write them and the figure if asked to."""
        if self.streams < 1:
            raise ValueError(f"streams={self.streams} is too small; use at least 1.")
        model, tokenizer = load_checkpoint(self.checkpoint, choose_device(self.device))
        model = with_lengths(
            model, segment_len=self.segment_len, mem_len=self.mem_len, c_mem_len=self.c_mem_len
        )
        text = read_text(self.text)
        start = time.perf_counter()
        evaluation = evaluate(model, tokenizer.encode(text), self.streams)
        seconds = time.perf_counter() - start
        numbers = summary(evaluation, text)
        print(
            f"loss            {numbers['loss_nats']:.4f} ± {numbers['uncertainty_nats']:.4f} nats a token\n"
            f"per character   {numbers['bits_per_character']:.4f} bits\n"
            f"per byte        {numbers['bits_per_byte']:.4f} bits\n"
            f"per word        perplexity {numbers['word_perplexity']:,.1f}\n"
            f"accuracy        {numbers['accuracy']:.1%}\n"
            f"                {numbers['tokens']:,} tokens, {numbers['tokens'] / seconds:,.0f} a second"
        )
        if self.out:
            in_segment, by_segment = evaluation.by_position(model.config.segment_len)
            self.out.mkdir(parents=True, exist_ok=True)
            by_position = {"loss_in_segment": in_segment, "loss_by_segment": by_segment}
            write_json(self.out / "evaluation.json", {**numbers, **by_position})
            figure = self.out / "loss_by_position.png"
            save_loss_by_position(in_segment, by_segment, model.config.segment_len, figure)
            print(f"written to {self.out}")


@dataclass(frozen=True)
class Report:
    """Write the report of a run or a comparison, again or for the first time.

    Example: memformers report runs/…
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The run's folder, or the one whose sub-folders are runs."""

    def run(self) -> None:
        """Write it, then say where it is."""
        report = write_report(self.folder)
        print(f"report: {report}\n        {report.with_suffix('.md')}")


def read_text(path: str) -> str:
    """The UTF-8 text of a file, or of standard input for ``-``; ValueError where it can't be read."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read as UTF-8 text: {error}") from None


def ask() -> str:
    """The user's next line; EOFError when there is none."""
    return input("> " if sys.stdin.isatty() else "")


def new_folder(name: str) -> Path:
    """A folder under runs/ that no other run has."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    folder, n = RUNS / stem, 1
    while folder.exists():
        folder, n = RUNS / f"{stem}-{n}", n + 1
    return folder


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    with plain_errors():
        parse_arguments(Train | Compare | Generate | Evaluate | Report, arguments, prog="memformers").run()


if __name__ == "__main__":
    main()
