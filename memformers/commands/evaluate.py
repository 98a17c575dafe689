"""``memformers evaluate``: how well a trained model predicts a text."""

import math
import time
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from memformers.commands.trained import ModelCommand, MovedText, reading_bar
from memformers.common.console import counted
from memformers.common.errors import UserError
from memformers.common.fields import Count, NonNegativeInt
from memformers.common.files import read_json, write_json
from memformers.data import TEST, TRAIN, VALIDATION
from memformers.data.dataset import Split, TokenDataset
from memformers.data.sources import CorpusSpec
from memformers.data.streams import Tokens
from memformers.data.tables import TEXT_FIELD
from memformers.data.tokenize_corpus import dataset_of
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import OWN
from memformers.evaluation.evaluate import Evaluation, evaluate, summary, with_lengths
from memformers.evaluation.learning import LearnConfig, evaluate_learning, learning_columns, usual_streams
from memformers.evaluation.probe import common_corpus
from memformers.evaluation.units import LOSES_TEXT, predicted_units
from memformers.models.config import Lengths
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import FACTS, refuse_overwrite
from memformers.runs.reader import read_runs

# The files that --out gets.
NUMBERS = "evaluation.json"
FIGURE = "loss_by_position.png"
FIGURE_OF_LEARNING = "loss_over_text.png"
N_POINTS = 50
"""Of that figure: parts of the text, each long enough for a mean."""


@dataclass(frozen=True)
class Evaluate(ModelCommand, MovedText):
    """Measure how well a trained model predicts a whole text, with the memory carried along.

    Example: memformers evaluate --checkpoint runs/… --text book.txt --mem-len 400

    Example: memformers evaluate --checkpoint runs/… --split test

    Example: memformers evaluate --checkpoint runs/… --text book.txt --learn
    """

    text: str = ""
    """A text file; - is standard input. Or documents: a folder of texts, a .jsonl file, or a .parquet or .csv
    table; each document starts with an empty memory. Or token ids, or a folder of tokens. Empty: the text of
    the run."""
    split: Literal["", "train", "validation", "test"] = ""
    """Which split of the text; empty: the test part, or the validation part if there is none."""
    text_field: str = TEXT_FIELD
    """Which field of a line of JSON, or which column of a table, is the text; for --text."""
    document_separator: str = ""
    """The text between the documents of a text file, for --text; empty: the file is one text."""
    document_end: NonNegativeInt | None = None
    """The token id that ends each document, for --text as a file of token ids."""
    streams: Count | None = None
    """The number of parallel streams into which the text is cut; by default 16, or 1 with --learn. Each
    starts with an empty memory; with fewer streams, more tokens are predicted with a full memory, and the
    evaluation is slower. For documents, how many are read in parallel, which changes the result only with
    --learn."""
    segment_len: int | None = None
    """Segment length S, if not that of the training."""
    mem_len: Lengths | None = None
    """Memory length M, if not that of the training; one number for all layers, or one for each."""
    c_mem_len: Lengths | None = None
    """Compressed memory length C, if not that of the training; one number for all layers, or one for each."""
    learn: bool = False
    """Whether to measure, beside this, a model that learns while it reads: it predicts a segment, then takes
    a gradient step on it. The model itself stays as it is."""
    learning: LearnConfig = field(default_factory=LearnConfig)
    """How it learns with --learn."""
    learn_text: str = ""
    """A text that the model was trained on, for --learn-step rms; empty: the training part of the run's
    text."""
    out: Path | None = None
    """A folder for the numbers, evaluation.json, and figures of the loss by position and, with --learn, over
    the text."""

    def run(self) -> None:
        if not self.learn and (self.learning != LearnConfig() or self.learn_text):
            raise UserError("the options that begin with --learn- are for --learn; add it.")
        model, tokenizer = self.load()
        model = with_lengths(
            model, segment_len=self.segment_len, mem_len=self.mem_len, c_mem_len=self.c_mem_len
        )
        if self.out:  # before a long text is read
            self.out.mkdir(parents=True, exist_ok=True)
            try:
                read_json(self.out / NUMBERS, {"loss_nats": float, "loss_in_segment": list[float]})
            except UserError:  # no evaluation wrote it
                refuse_overwrite(self.out, (NUMBERS, FIGURE, FIGURE_OF_LEARNING))
        self.measure(model, tokenizer, self.read(tokenizer))

    def read(self, tokenizer: Tokenizer) -> Split:
        # A text that is named, or that of the run.
        if self.text and any(self.moved.values()):
            raise UserError("--text names another text than the run's; leave out --data and the like.")
        if self.text:
            corpus = self.read_text(self.text, tokenizer)
        elif self.document_separator or self.text_field != TEXT_FIELD or self.document_end is not None:
            raise UserError(
                "text_field, document_separator and document_end are for the file of --text; name it, too."
            )
        elif self.checkpoint and (self.checkpoint / FACTS).is_file():
            corpus = common_corpus(read_runs(self.checkpoint), tokenizer, **self.moved)
            if corpus.tokenizer.to_json() != tokenizer.to_json():
                raise UserError(
                    f"{corpus.info.source} has other tokens than in the training; name a text with --text."
                )
        else:
            raise UserError("name a text with --text; only a run knows what it was trained on.")

        # Its split; documents without names get numbers.
        name = self.split or (TEST if TEST in corpus.splits else VALIDATION)
        if name not in corpus.splits:
            raise UserError(f"{corpus.info.source} has no {name} part, but {', '.join(corpus.splits)}.")
        split = corpus.splits[name]
        return replace(split, names=split.names or [f"{name}:{n + 1}" for n in range(len(split.documents))])

    def read_text(self, text: str, tokenizer: Tokenizer) -> TokenDataset:
        name = tokenizer.name if tokenizer.name in OWN else "bpe"
        spec = CorpusSpec(
            text,
            document_separator=self.document_separator,
            text_field=self.text_field,
            document_end=self.document_end,
            tokenizer=name,
        )
        return dataset_of(spec, tokenizer)

    def read_training(self, tokenizer: Tokenizer) -> Tokens | None:
        """What ``--learn-step rms`` knows of the training; None if no text of it is named or known."""
        if self.learning.learn_step != "rms":
            return None
        if self.learn_text:
            corpus = self.read_text(self.learn_text, tokenizer)
        elif self.checkpoint and (self.checkpoint / FACTS).is_file():
            corpus = common_corpus(read_runs(self.checkpoint), tokenizer, **self.moved)
        else:
            return None
        # Of a text without splits, all is one.
        name = TRAIN if TRAIN in corpus.splits else next(iter(corpus.splits))
        return corpus.splits[name].tokens

    def measure(self, model: MemoryLM, tokenizer: Tokenizer, split: Split) -> None:
        lengths = tuple(split.documents.tolist())
        learn = self.learning if self.learn else None
        streams = usual_streams(learn) if self.streams is None else self.streams
        n_predicted = len(split.tokens) - (len(lengths) or 1)

        # The trained model, then, if asked for, one that learns.
        start = time.perf_counter()
        with reading_bar("evaluating", n_predicted, model) as bar:
            evaluation = evaluate(
                model, split.tokens, streams, documents=lengths, progress=lambda x: bar.update(len(x))
            )
        seconds = [time.perf_counter() - start]
        learned = None
        if learn is not None:
            training = self.read_training(tokenizer)
            start = time.perf_counter()
            with reading_bar("learning", n_predicted, model) as bar:
                learned = evaluate_learning(
                    model, split.tokens, streams, learn, documents=lengths, training=training,
                    progress=lambda x: bar.update(len(x)),
                )  # fmt: skip
            seconds.append(time.perf_counter() - start)

        # Their numbers.
        text_units = predicted_units(tokenizer, split.tokens, lengths, split.counts)
        columns = [summary(e, tokenizer, text_units) for e in (evaluation, learned) if e is not None]
        numbers = dict(columns[0])
        if learned is not None:
            numbers |= learning_columns(evaluation, learned, tokenizer, text_units)
        if split.counts.is_lossy:
            warnings.warn(f"{LOSES_TEXT}.", stacklevel=2)
        for line in shown_numbers(columns, seconds, tokenizer, len(lengths)):
            print(line)
        if learned is not None:
            saved = numbers["learning_saves_nats"]
            width = numbers["learning_saves_uncertainty_nats"]
            print(f"{'learning saves':<15} {with_width(saved, width)} nats per token")
        if self.out:
            self.write(self.out, numbers, evaluation, learned, split)

    def write(
        self,
        out: Path,
        numbers: dict[str, float],
        evaluation: Evaluation,
        learned: Evaluation | None,
        split: Split,
    ) -> None:
        from memformers.report.plotting import (  # not above: it takes 30 MiB
            save_loss_by_position,
            save_loss_over_text,
        )

        # By position, and by how much is remembered.
        in_segment = evaluation.by_position
        by_memory = evaluation.by_memory
        details: dict[str, Any] = {name: or_none(value) for name, value in numbers.items()}
        details["loss_in_segment"] = in_segment
        details["loss_by_memory"] = [
            {"positions_before": n_positions, "loss": loss, "uncertainty": or_none(uncertainty)}
            for n_positions, loss, uncertainty in by_memory
        ]

        # Of each document.
        if len(split.documents):
            rows = zip(split.names, evaluation.lengths.tolist(), evaluation.document_losses, strict=True)
            details["documents"] = [{"name": n, "tokens": k, "loss": or_none(x)} for n, k, x in rows]

        # Of the model that learns.
        over_text: list[tuple[float, float, float]] = []
        if learned is not None:
            details["learn"] = asdict(self.learning)
            for document, loss in zip(details.get("documents", ()), learned.document_losses, strict=False):
                document["learning_loss"] = or_none(loss)
            of_parts = zip(evaluation.over_text(N_POINTS), learned.over_text(N_POINTS), strict=True)
            over_text = [(middle, loss, learned_loss) for (middle, loss), (_, learned_loss) in of_parts]
            details["loss_over_text"] = [
                {"middle": middle, "loss": loss, "learning_loss": learned_loss}
                for middle, loss, learned_loss in over_text
            ]
        write_json(out / NUMBERS, details)
        save_loss_by_position(in_segment, by_memory, out / FIGURE)
        if over_text:
            save_loss_over_text(over_text, out / FIGURE_OF_LEARNING)
        print(f"written to {out}")


def shown_numbers(
    columns: list[dict[str, float]], seconds: list[float], tokenizer: Tokenizer, n_documents: int
) -> list[str]:
    """The lines of a terminal: a row for each measure, and a column for the trained model and, if there are
    two, for one that learns."""
    unit = "per token" if tokenizer.name == "ids" else "per character"
    shown = (
        (unit, "bits_per_character", "{:.4f} bits"),
        ("per byte", "bits_per_byte", "{:.4f} bits"),
        ("perplexity", "perplexity", "{:,.1f} per token, ends of lines included"),
        ("per word", "word_perplexity", "perplexity {:,.1f}"),
        ("accuracy", "accuracy", "{:.1%}"),
    )
    losses = [with_width(numbers["loss_nats"], numbers["uncertainty_nats"]) for numbers in columns]
    rows = [("loss", [f"{loss} nats per token" for loss in losses])]
    for label, name, form in shown:
        if not math.isnan(columns[0][name]):  # NaN is what doesn't apply to these tokens
            rows.append((label, [form.format(numbers[name]) for numbers in columns]))
    documents = f", in {counted(n_documents, 'document')}" if n_documents else ""
    tokens = columns[0]["tokens"]
    speeds = [f"{tokens / time_taken:,.0f} per second" for time_taken in seconds]
    rows.append(("", [f"{tokens:,} tokens, {speeds[0]}{documents}", *speeds[1:]]))
    if columns[1:]:
        rows.insert(0, ("", ["as trained", "learning"]))

    # The first column is as wide as its widest cell.
    width = max(len(cells[0]) for _, cells in rows)
    lines = []
    for label, cells in rows:
        padded = [cell.ljust(width) for cell in cells]
        lines.append(f"{label:<15} {'   '.join(padded)}".rstrip())
    return lines


def with_width(value: float, half_width: float) -> str:
    return f"{value:.4f}" if math.isnan(half_width) else f"{value:.4f} ± {half_width:.4f}"


def or_none(value: float) -> float | None:
    """The value, or None for NaN and infinity, which JSON doesn't have."""
    return value if math.isfinite(value) else None
