"""``memformers evaluate``: how well a trained model predicts a text; ``memformers probe``: what context and
memory are worth to it."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from memformers.commands.options import ModelCommand, say_report
from memformers.common.errors import UserError
from memformers.common.fields import Count
from memformers.common.files import write_json
from memformers.common.machine import choose_device
from memformers.data.texts import divided, read_text_or_documents
from memformers.evaluation.evaluate import evaluate, summary, with_lengths
from memformers.evaluation.probe import ProbeConfig, probe
from memformers.models.lengths import ByLayer
from memformers.report.document import write_report
from memformers.report.figures import save_loss_by_position


@dataclass(frozen=True)
class Evaluate(ModelCommand):
    """Measure how well a trained model predicts a whole text, with the memory carried along.

    Example: memformers evaluate --checkpoint runs/… --text book.txt --mem-len 400
    """

    text: str
    """A text file; - is standard input. Or documents: a folder of texts, or a .jsonl file with a "text" in
    each line; each document starts with an empty memory."""
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
        model, tokenizer = self.load()
        model = with_lengths(
            model, segment_len=self.segment_len, mem_len=self.mem_len, c_mem_len=self.c_mem_len
        )
        read = read_text_or_documents(self.text)
        if self.document_separator:
            read = divided(read, self.document_separator, Path(self.text).name)
        documents, texts = ([], [read]) if isinstance(read, str) else (read, [d.text for d in read])
        if self.out:  # before a long text is read
            self.out.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        tokens = [tokenizer.encode(text) for text in texts]
        lengths = tuple(map(len, tokens)) if documents else ()
        evaluation = evaluate(model, torch.cat(tokens), self.streams, documents=lengths)
        numbers = summary(evaluation, *texts)
        seconds = time.perf_counter() - start
        print(
            f"loss            {numbers['loss_nats']:.4f} ± {numbers['uncertainty_nats']:.4f} nats a token\n"
            f"per character   {numbers['bits_per_character']:.4f} bits\n"
            f"per byte        {numbers['bits_per_byte']:.4f} bits\n"
            f"per word        perplexity {numbers['word_perplexity']:,.1f}\n"
            f"accuracy        {numbers['accuracy']:.1%}\n"
            f"                {numbers['tokens']:,} tokens, {numbers['tokens'] / seconds:,.0f} a second"
            f"{f', in {len(documents):,} documents' if documents else ''}"
        )
        if self.out:
            in_segment = evaluation.by_position(model.config.segment_len)
            by_memory = evaluation.by_memory(model.config.segment_len, model.config.remembered_positions)
            details: dict[str, Any] = {
                "loss_in_segment": in_segment,
                "loss_by_memory": [
                    {"positions_before": before, "loss": loss, "uncertainty": or_none(uncertainty)}
                    for before, loss, uncertainty in by_memory
                ],
            }
            if documents:
                details["documents"] = [
                    {"name": document.name, "tokens": len(losses), "loss": or_none(losses.mean().item())}
                    for document, losses in zip(documents, evaluation.losses_by_text, strict=True)
                ]
            finite = {name: or_none(value) for name, value in numbers.items()}
            write_json(self.out / "evaluation.json", {**finite, **details})
            save_loss_by_position(in_segment, by_memory, self.out / "loss_by_position.png")
            print(f"written to {self.out}")


def or_none(value: float) -> float | None:
    """The value, or None for one that JSON doesn't know."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Probe:
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
        probe(self.folder, self.config, choose_device(self.device))
        say_report(write_report(self.folder))
