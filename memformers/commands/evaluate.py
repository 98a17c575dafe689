"""``memformers evaluate``: how well a trained model predicts a text; ``memformers probe``: what context and
memory are worth to it."""

import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from torch import Tensor

from memformers.commands.options import ModelCommand, OwnCode, reading_bar, say_report
from memformers.common.errors import UserError
from memformers.common.fields import Count
from memformers.common.files import read_json, write_json
from memformers.common.intervals import Mean
from memformers.common.machine import choose_device
from memformers.common.words import counted
from memformers.data.gathering import Recipe, gather
from memformers.data.preparing import BIG, prepare
from memformers.data.store import TEST, VALIDATION, TokenStore, is_store, open_store
from memformers.data.streams import Tokens
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import OWN
from memformers.evaluation.evaluate import evaluate, summary, with_lengths
from memformers.evaluation.probe import ProbeConfig, probe
from memformers.evaluation.units import Units, encoded_with_units, units
from memformers.models.language_model import MemoryLM
from memformers.models.memory_sizes import ByLayer
from memformers.report.curves import save_loss_by_position
from memformers.report.document import write_report
from memformers.report.markdown import number
from memformers.runs.folder import check_nothing_is_lost

NUMBERS, FIGURE = "evaluation.json", "loss_by_position.png"


@dataclass(frozen=True)
class Evaluate(ModelCommand):
    """Measure how well a trained model predicts a whole text, with the memory carried along.

    Example: memformers evaluate --checkpoint runs/… --text book.txt --mem-len 400
    """

    text: str
    """A text file; - is standard input. Or documents: a folder of texts, or a .jsonl file with a "text" in
    each line; each document starts with an empty memory. Or a folder of tokens, of which the test part is
    read, or the validation part if there is none."""
    document_separator: str = ""
    """The text between the documents of a text file; empty: the file is one text."""
    streams: Count = 16
    """The number of parallel streams into which the text is cut. Each starts with an empty memory, so fewer
    streams are stricter, and slower. For documents, how many are read in parallel, which doesn't change the
    result."""
    segment_len: int | None = None
    """Segment length S, if it should differ from that of the training."""
    mem_len: ByLayer | None = None
    """Memory length M, if it should differ from that of the training; one number for all layers, or one for
    each."""
    c_mem_len: ByLayer | None = None
    """Compressed memory length C, if it should differ from that of the training; one number for all layers,
    or one for each."""
    out: Path | None = None
    """A folder for the numbers, evaluation.json, and a figure of the loss by position."""

    def run(self) -> None:
        """Print the numbers; write them and the figure if asked to."""
        if self.out == Path():
            raise UserError("out='' is the current folder; name a folder for the numbers and the figure.")
        if self.out:
            check_only_ours(self.out)
        model, tokenizer = self.load()
        model = with_lengths(
            model, segment_len=self.segment_len, mem_len=self.mem_len, c_mem_len=self.c_mem_len
        )
        if self.out:  # before a long text is read
            self.out.mkdir(parents=True, exist_ok=True)
        with self.tokens(tokenizer) as (tokens, documents, of):
            self.measure(model, tokens, documents, of)

    @contextmanager
    def tokens(self, tokenizer: Tokenizer) -> Iterator[tuple[Tokens, list[tuple[str, int]], Units]]:
        """The tokens of the text ``[n]``, the name and the number of tokens of each document, and what they
        are; a large text is on the disk meanwhile."""
        path = Path(self.text)
        name = tokenizer.name if tokenizer.name in OWN else "bpe"
        if is_store(path):
            store = open_store(path)
            if store.tokenizer.saved() != tokenizer.saved():
                raise UserError(f"{path} has the tokens of another tokenizer than the model; name the text.")
            yield stored(store, TEST if TEST in store.splits else VALIDATION)
        elif path.exists() and Recipe(path).text_size >= BIG:
            recipe = Recipe(path, document_separator=self.document_separator, tokenizer=name)
            with tempfile.TemporaryDirectory(prefix="memformers-") as folder:
                yield stored(open_store(prepare(recipe, Path(folder) / "tokens", tokenizer)), TEST)
        else:
            found = gather(Recipe(path, "", self.document_separator, name))
            tokens, lengths, of = encoded_with_units(
                tokenizer, [text for _, text in found.documents] or [found.text]
            )
            yield tokens, list(zip(found.names, lengths, strict=False)), of

    def measure(self, model: MemoryLM, tokens: Tokens, documents: list[tuple[str, int]], of: Units) -> None:
        """Evaluate ``tokens [n]``, of ``documents`` if there are any, print the numbers and write them."""
        start = time.perf_counter()
        lengths = tuple(length for _, length in documents)
        total = 0.0
        with reading_bar("evaluating", len(tokens) - (len(documents) or 1), model) as bar:

            def progress(losses: Tensor) -> None:
                nonlocal total
                total += losses.double().sum().item()
                read = bar.n + len(losses)
                bar.set_postfix_str(f"loss {total / max(read, 1):.3f} nats", refresh=False)
                bar.update(len(losses))

            evaluation = evaluate(model, tokens, self.streams, documents=lengths, progress=progress)
        numbers = summary(evaluation, of)
        seconds = time.perf_counter() - start
        loss = Mean(numbers["loss_nats"], numbers["uncertainty_nats"], int(numbers["tokens"]))
        print(
            f"loss            {number(loss, '.4f')} nats per token\n"
            f"per character   {numbers['bits_per_character']:.4f} bits\n"
            f"per byte        {numbers['bits_per_byte']:.4f} bits\n"
            f"per word        perplexity {numbers['word_perplexity']:,.1f}\n"
            f"accuracy        {numbers['accuracy']:.1%}\n"
            f"                {numbers['tokens']:,} tokens, {numbers['tokens'] / seconds:,.0f} per second"
            f"{', in ' + counted(len(documents), 'document') if documents else ''}"
        )
        if self.out:
            in_segment, by_memory = evaluation.by_position, evaluation.by_memory
            details: dict[str, Any] = {
                "loss_in_segment": in_segment,
                "loss_by_memory": [
                    {"positions_before": before, "loss": loss, "uncertainty": or_none(uncertainty)}
                    for before, loss, uncertainty in by_memory
                ],
            }
            if documents:
                details["documents"] = [
                    {"name": name, "tokens": predicted, "loss": or_none(loss)}
                    for (name, _), predicted, loss in zip(
                        documents, evaluation.predicted, evaluation.document_losses, strict=True
                    )
                ]
            finite = {name: or_none(value) for name, value in numbers.items()}
            write_json(self.out / NUMBERS, {**finite, **details})
            save_loss_by_position(in_segment, by_memory, self.out / FIGURE)
            print(f"written to {self.out}")


def check_only_ours(folder: Path) -> None:
    """Raise UserError if ``folder`` has files with the names of ours that no evaluation wrote."""
    try:
        read_json(folder / NUMBERS, {"loss_nats": float, "loss_in_segment": list[float]})
    except UserError:
        check_nothing_is_lost(folder, (NUMBERS, FIGURE))


def stored(store: TokenStore, name: str) -> tuple[Tokens, list[tuple[str, int]], Units]:
    """A split of a folder of tokens, as [`Evaluate.tokens`][] gives it."""
    split, lengths = store.splits[name], tuple(store.splits[name].documents.tolist())
    of = units(store.tokenizer, split.tokens, lengths, store.card.splits[name])
    return split.tokens, [(f"{name}:{n}", length) for n, length in enumerate(lengths, 1)], of


def or_none(value: float) -> float | None:
    """The value, or None for one that JSON doesn't know."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Probe(OwnCode):
    """Measure how much context and memory help trained models, and add the result to their report.

    Example: memformers probe runs/…
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The folder of a run or of a comparison."""
    config: tyro.conf.OmitArgPrefixes[ProbeConfig] = field(default_factory=ProbeConfig)
    device: str = "auto"
    """Where to run, such as cpu or cuda:1; auto takes a GPU if there is one."""

    def run(self) -> None:
        """Measure, write the report again, say where it is."""
        self.import_own()
        probe(self.folder, self.config, choose_device(self.device))
        say_report(write_report(self.folder))
