"""Evaluation of documents: each from an empty memory, several in parallel, all tokens with equal weight."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from memformers.common.errors import UserError
from memformers.data.streams import IGNORED
from memformers.data.text_files import bytes_of
from memformers.evaluation.evaluate import Evaluation, numbers_of, summed_up
from memformers.evaluation.units import bits_per_character, whole_characters
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.memory_streams import some_streams
from memformers.models.stack import eval_mode


@dataclass(frozen=True)
class Reading:
    """The order in which documents are read: group by group, the documents of a group in parallel."""

    documents: tuple[int, ...]
    """How many tokens each document has, in the order of the text."""
    groups: tuple[tuple[int, ...], ...]
    """The numbers of the documents of each group, the longest first; each is in one group at most."""
    segment_len: int
    """Tokens that are read at once of each document."""

    @cached_property
    def steps(self) -> list[tuple[tuple[int, ...], int]]:
        """The segments in the order of reading: the numbers of the documents that are not finished, and the
        position in them at which the segment begins."""
        found = []
        for group in self.groups:
            for start in range(0, self.documents[group[0]] - 1, self.segment_len):
                found.append((tuple(n for n in group if self.documents[n] - 1 > start), start))
        return found

    def predicted(self, steps: int | None = None) -> tuple[int, ...]:
        """How many tokens of each document are predicted in the first ``steps``, or in all."""
        counts = [0] * len(self.documents)
        for numbers, start in self.steps[:steps]:
            for number in numbers:
                counts[number] = min(start + self.segment_len, self.documents[number] - 1)
        return tuple(counts)


def grouped(documents: Sequence[int], numbers: Sequence[int], batch_size: int) -> tuple[tuple[int, ...], ...]:
    """The documents of these ``numbers``, whose lengths in tokens are in ``documents``, in groups of
    ``batch_size``. Documents of similar length are in the same group, so that few wait for the longest one. A
    document of a single token, which isn't predicted, is in no group."""
    longest_first = sorted((n for n in numbers if documents[n] > 1), key=lambda n: (-documents[n], n))
    return tuple(tuple(longest_first[i : i + batch_size]) for i in range(0, len(longest_first), batch_size))


def reading_of(documents: Sequence[int], batch_size: int, segment_len: int) -> Reading:
    """How to read all ``documents``, given as numbers of tokens; UserError where nothing can be predicted."""
    if max(documents, default=0) < 2:
        raise UserError("documents of a single token have nothing to predict; use at least 2 tokens.")
    return Reading(tuple(documents), grouped(documents, range(len(documents)), batch_size), segment_len)


@torch.no_grad()
def evaluate_documents(
    model: MemoryLM,
    tokens: Tensor,
    reading: Reading,
    between_segments: Callable[[], None] = lambda: None,
    steps: int | None = None,
) -> Evaluation:
    """Predict the documents that follow each other in ``tokens [n]``, each from an empty memory and all but
    its first token. The result for each document equals that of an evaluation of this document alone, as a
    single stream.

    A group begins with an empty memory, and a document that ends leaves it: so nothing before a document is
    there to be seen, and segments begin where they would alone. ``between_segments`` may raise any exception
    to end it; with ``steps``, only this number of segments is read. The mode of the model doesn't change.
    """
    texts, memory = tokens.split(list(reading.documents)), Memory(())
    losses: list[list[Tensor]] = [[] for _ in texts]
    hits: list[list[Tensor]] = [[] for _ in texts]
    reconstruction = []
    with eval_mode(model):
        for numbers, start in islice(reading.steps, steps):
            between_segments()
            memory = some_streams(memory, slice(len(numbers))) if start else Memory(())
            end = start + reading.segment_len
            inputs = pad_sequence([texts[n][start:end][: len(texts[n]) - 1 - start] for n in numbers])
            targets = pad_sequence([texts[n][start + 1 : end + 1] for n in numbers], padding_value=IGNORED)
            targets = targets.to(model.device)  # [S, documents]
            scores, memory, auxiliary_loss = model(inputs.to(model.device), memory, targets)
            reconstruction.append(float(auxiliary_loss))
            of_all, is_correct = scores.losses.cpu(), scores.correct.cpu()  # [S, documents]
            for column, number in enumerate(numbers):
                length = min(end, reading.documents[number] - 1) - start
                losses[number].append(of_all[:length, column])
                hits[number].append(is_correct[:length, column])
    predicted = reading.predicted(steps)
    of_each, correct = (torch.cat([part for parts in found for part in parts]) for found in (losses, hits))
    return summed_up(of_each, correct, tuple(reconstruction), max(predicted), predicted)


def evaluate_texts(model: MemoryLM, texts: Sequence[Tensor], batch_size: int) -> Evaluation:
    """As [`evaluate_documents`][], of documents in tokens ``[n]`` each, ``batch_size`` side by side."""
    reading = reading_of([len(text) for text in texts], batch_size, model.config.segment_len)
    return evaluate_documents(model, torch.cat(list(texts)), reading)


def beginning_of(evaluation: Evaluation, reading: Reading, steps: int) -> Evaluation:
    """The evaluation of the first ``steps``, taken from one of more steps."""
    predicted = reading.predicted(steps)
    losses, correct = (
        torch.cat([x[:n] for x, n in zip(found.split(list(evaluation.documents)), predicted, strict=True)])
        for found in (evaluation.losses, evaluation.correct)
    )
    return summed_up(
        losses, correct, evaluation.reconstruction_losses[:steps], max(predicted), documents=predicted
    )


def losses_of_documents(evaluation: Evaluation) -> tuple[Tensor, ...]:
    """The losses of each document's tokens after the first, ``[n - 1]`` each."""
    return evaluation.losses.split(list(evaluation.documents))


def summary_of_documents(evaluation: Evaluation, texts: Sequence[str]) -> dict[str, float]:
    """The numbers of [`memformers.evaluation.evaluate.summary`][] for the ``texts`` of documents; all tokens
    of each but the first are predicted."""
    words = sum(len(text.split()) for text in texts)
    return numbers_of(evaluation, *bits_of_documents(evaluation, texts), words)


def bits_of_documents(evaluation: Evaluation, texts: Sequence[str]) -> tuple[float, float]:
    """Bits per character and per byte over all ``texts`` of documents, as [`memformers.evaluation.units`][]
    counts them in each; NaN where none was predicted."""
    bits = 0.0
    characters = in_bytes = 0
    for losses, text in zip(losses_of_documents(evaluation), texts, strict=True):
        start, stop = whole_characters(text)
        if stop > start and len(losses):
            bits += bits_per_character(losses, text) * (stop - start)
            characters += stop - start
        is_by_character = len(losses) + 1 == len(text)
        in_bytes += len(bytes_of(text)) - (len(bytes_of(text[:1])) if is_by_character else 1)
    all_bits = evaluation.losses.double().sum().item() / math.log(2)
    return bits / characters if characters else math.nan, all_bits / in_bytes if in_bytes else math.nan
