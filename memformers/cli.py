"""The ``memformers`` command: train, compare, generate, evaluate, probe, report, dashboard."""

import math
import sys
import time
from dataclasses import dataclass, field, replace
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
from memformers.files import config_from_dict, read_json, write_json
from memformers.generation import TextStream, load_checkpoint
from memformers.probing.probe import ProbeConfig, probe
from memformers.processes import is_first
from memformers.report import write_report
from memformers.sampling import Sampling, seeded
from memformers.sealed import is_sealed
from memformers.training.config import TrainConfig
from memformers.training.run import choose_device, train_run

RUNS = Path("runs")


@dataclass(frozen=True)
class Train:
    """Train one model on a text.

    Example: memformers train --model compressive --data my_book.txt
    Example: memformers train --resume
    """

    config: tyro.conf.OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    out: Path | None = None
    """Folder of the run; by default runs/, the date and the model."""
    resume: Annotated[tuple[Path, ...] | None, tyro.conf.arg(metavar="[FOLDER]")] = None
    """Go on with a run that was stopped, from its newest checkpoint and with its settings: the one in this
    folder, else in --out, else the newest in runs/. With --out, a run begins there if there is none."""
    dashboard: str = ""
    """Where to show it live: the address of a labml server, such as http://localhost:5005/api/v1/default,
    or off. Empty: labml's own $labml_app_url, else a dashboard that runs on this machine, if one does."""

    def folder(self) -> Path:
        """Where the run goes, or is."""
        if self.resume is None:
            return self.out or new_folder(self.config.model.model)
        if len(self.resume) + (self.out is not None) > 1:
            raise ValueError("name one run to resume, after --resume or as --out.")
        return resumable(self.resume[0]) if self.resume else self.out or newest_run()

    def train(self) -> Path:
        """Train; returns the run's folder."""
        return train_run(self.config, self.folder(), self.dashboard, resume=self.resume is not None)

    def run(self) -> None:
        """Train, then say where the run is."""
        folder = self.train()
        if is_first():
            print(f"run: {folder}")


@dataclass(frozen=True)
class Compare:
    """Train several models alike, one after the other, and write a report.

    Example: memformers compare --scale 0.1
    """

    config: tyro.conf.OmitArgPrefixes[CompareConfig] = field(default_factory=CompareConfig)
    out: Path | None = None
    """Folder of the comparison; by default runs/, the date and "compare"."""
    resume: bool = False
    """Go on with the comparison in --out, of the same settings: finish what was stopped."""
    dashboard: str = ""
    """Where to show it live: the address of a labml server, such as http://localhost:5005/api/v1/default,
    or off. Empty: labml's own $labml_app_url, else a dashboard that runs on this machine, if one does."""

    def folder(self) -> Path:
        """Where the comparison goes, or is."""
        if self.resume and self.out is None:
            raise ValueError("name the comparison to resume as --out.")
        return self.out or new_folder("compare")

    def compare(self) -> Path:
        """Compare; returns the report's page."""
        return compare(self.config, self.folder(), self.dashboard, resume=self.resume)

    def run(self) -> None:
        """Compare, then say where the report is."""
        say_report(self.compare())


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
            in_segment = evaluation.by_position(model.config.segment_len)
            by_memory = evaluation.by_memory(model.config.segment_len, model.config.remembered_positions)
            self.out.mkdir(parents=True, exist_ok=True)
            details = {
                "loss_in_segment": in_segment,
                "loss_by_memory": [
                    {"positions_before": before, "loss": loss, "uncertainty": or_none(uncertainty)}
                    for before, loss, uncertainty in by_memory
                ],
            }
            finite = {name: or_none(value) for name, value in numbers.items()}
            write_json(self.out / "evaluation.json", {**finite, **details})
            save_loss_by_position(in_segment, by_memory, self.out / "loss_by_position.png")
            print(f"written to {self.out}")


@dataclass(frozen=True)
class Probe:
    """Measure what context and memory are worth to trained models, and add it to their report.

    Example: memformers probe runs/…
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A run's folder, or a comparison's."""
    config: tyro.conf.OmitArgPrefixes[ProbeConfig] = field(default_factory=ProbeConfig)
    device: str = "auto"
    """Where to run, such as cpu or cuda:1; auto takes a GPU if there is one."""

    def run(self) -> None:
        """Measure, write the report again, say where it is."""
        probe(self.folder, self.config, choose_device(self.device))
        say_report(write_report(self.folder))


@dataclass(frozen=True)
class Report:
    """Write the report of a run or a comparison, again or for the first time.

    Example: memformers report runs/…
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The run's folder, or the one whose sub-folders are runs."""

    def run(self) -> None:
        """Write it, then say where it is."""
        say_report(write_report(self.folder))


def or_none(value: float) -> float | None:
    """The value, or None for one that JSON doesn't know."""
    return value if math.isfinite(value) else None


def say_report(page: Path) -> None:
    """Print where a report is."""
    print(f"report: {page}\n        {page.with_suffix('.md')}")


@dataclass(frozen=True)
class Dashboard:
    """Watch runs in a browser: labml's dashboard, with nothing to set up. Ctrl-C ends it.

    Example: memformers dashboard --open
    """

    folder: Path | None = None
    """Where its records are kept; by default in the user's folder for data."""
    host: str = "127.0.0.1"
    """The address to listen on. It has no login: beyond this machine, whoever reaches it sees all."""
    port: int = 5005
    """The port to listen on; 0 is any that is free."""
    mongo: str = ""
    """Keep the records in the MongoDB at this host, or mongodb:// address, instead of files."""
    import_: Annotated[tuple[Path, ...], tyro.conf.arg(name="import", metavar="RUNS")] = ()
    """Folders of runs, comparisons, or of these, to bring in: what was trained while no dashboard ran."""
    open: bool = False
    """Whether to open it in the browser."""
    fetch_page: bool = False
    """Get local copies, with npm, of what the page loads from public servers; then end."""

    def run(self) -> None:
        """Start it, and stay until it is ended."""
        try:
            from memformers.dashboard.page import fetch_copies
            from memformers.dashboard.server import Settings, default_folder, serve
        except ImportError as error:  # fcntl, on Windows
            raise ValueError(
                f"the dashboard needs Linux or macOS: this Python has no {error.name}."
            ) from None
        if self.fetch_page:
            print(f"the page's files are in {fetch_copies()}")
            return
        folder = self.folder or default_folder()
        serve(Settings(folder, self.host, self.port, self.mongo, self.import_, self.open))


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


def newest_run() -> Path:
    """The run under runs/ that was begun or resumed last; ValueError if there is none."""
    configs = list(RUNS.glob("*/config.json"))
    if not configs:
        raise ValueError(f"{RUNS} holds no run to resume; name its folder after --resume.")
    return max(configs, key=lambda path: path.stat().st_mtime).parent


def resumable(folder: Path) -> Path:
    """The folder, if a run was begun in it; else ValueError."""
    if not (folder / "config.json").is_file() or is_sealed(folder):
        raise ValueError(f"{folder} is no run's folder; name one to resume.")
    return folder


def parse_train(arguments: list[str], default: Train, prog: str | None = None) -> Train:
    """The arguments of a training, on top of ``default``; where it resumes a run, on top of that run's
    config, so that only what is named can differ from it."""
    train: Train = parse_arguments(Train, arguments, prog=prog, default=default)
    if train.resume is None or not (train.folder() / "config.json").exists():
        return train
    folder = train.folder()
    config = config_from_dict(TrainConfig, read_json(folder / "config.json"), f"{folder / 'config.json'}")
    resumed: Train = parse_arguments(Train, arguments, prog=prog, default=replace(train, config=config))
    return replace(resumed, out=folder, resume=())


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    given = sys.argv[1:] if arguments is None else arguments
    with plain_errors():
        kinds = Train | Compare | Generate | Evaluate | Probe | Report | Dashboard
        command = parse_arguments(kinds, given, prog="memformers")
        if isinstance(command, Train):
            command = parse_train(given[1:], Train(), prog="memformers train")
        command.run()


if __name__ == "__main__":
    main()
