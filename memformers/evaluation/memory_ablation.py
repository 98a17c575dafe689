"""How much each part of its memory helps a trained model, which reads parallel streams: before a segment,
slots or positions are zeroed, or swapped with those of another stream.

Of a text, the loss without the part minus the loss with it: each stream, which may be a document, counts as
an independent observation, and differences are taken within streams, token by token. Of a recall stream, the
share of correct answers, by how long ago the value was set and where the model has it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memformers.common.console import Progress
from memformers.common.errors import UserError
from memformers.common.files import write_json
from memformers.common.intervals import Mean, mean_of_groups
from memformers.data.dataset import TokenDataset
from memformers.data.recall_stream import NO_QUESTION
from memformers.data.sources import CorpusSpec
from memformers.data.streams import Reading, Segment, streams_and_places
from memformers.data.tokenize_corpus import dataset_of
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import TOKENIZER
from memformers.evaluation.evaluate import Control, read_segments
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.sizes import MemorySizes
from memformers.models.stack import eval_mode
from memformers.runs.folder import PLACES, PROBE, UNTOUCHED, flatten
from memformers.runs.load import load_checkpoint
from memformers.runs.reader import Run, newest_checkpoint, read_runs

MAX_STREAMS = 16
"""Streams into which a plain text is cut, and documents that are read in parallel."""
MAX_TOKENS = 4_000_000
"""Of the held-out text of a folder of tokens that are read."""
PARTS = {"slots": "slots", "memory": "mem"}
"""The parts of a memory, and their fields."""
LENGTHS = {"slots": "c_mem_len", "memory": "mem_len"}
FINEST = 64
"""The narrowest distance bin, in positions."""
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeroed": torch.zeros_like,
    "swapped": lambda x: x.roll(1, dims=1),
}


def controls_of(sizes: Sequence[MemorySizes]) -> dict[str, Control]:
    """Changes of a memory, by name; swapped: each stream has the part of the stream before it."""

    def changed(part: str, change: Callable[[Tensor], Tensor], memory: Memory) -> Memory:
        layers = []
        for layer in memory.layers:
            new: dict[str, Any] = {part: change(getattr(layer, part))}
            layers.append(replace(layer, **new))
        return replace(memory, layers=tuple(layers))

    return {
        f"{name} {how}": partial(changed, part, change)
        for name, part in PARTS.items()
        if any(getattr(size, LENGTHS[name]) for size in sizes)
        for how, change in CHANGES.items()
    }


@dataclass(frozen=True)
class MemoryAblation:
    """How much memory helps some models on the same tokens; losses are in nats per token."""

    streams: int
    warm_up: int
    """How many tokens of each stream fill the memories first and don't count."""
    tokens: int
    """How many tokens count."""
    of_documents: bool
    loss: dict[str, float]
    """By model: the mean loss with its memory unmodified."""
    costs: dict[str, dict[str, Mean]]
    """By model and control: how much more the loss is with the changed memory, with an interval over
    streams."""


def memory_ablation(
    models: Mapping[str, MemoryLM],
    text: Tensor,
    *,
    tokens: int,
    documents: Sequence[int] = (),
    progress: Callable[[int], object] = lambda tokens: None,
) -> MemoryAblation | None:
    """How much memory helps ``models``, by name, on about ``tokens`` tokens of ``text [n]``, or of the
    ``documents`` that it consists of, given by their numbers of tokens; None for a text too short for two
    streams. ``progress`` is called with the number of further tokens that were read."""
    configs = [model.config for model in models.values()]
    warm_up = max(-(-c.remembered_positions // c.segment_len) * c.segment_len for c in configs)
    reading = choose_streams(len(text), warm_up, max(c.segment_len for c in configs), tokens, documents)
    if reading is None:
        return None
    losses = {
        name: losses_under_controls(model, text, reading, warm_up, progress) for name, model in models.items()
    }
    stream, place = streams_and_places(reading.lengths)
    counted = place >= warm_up

    def difference(changed: Tensor, base: Tensor) -> Mean:
        of, less = stream[counted], (changed - base)[counted]
        return mean_of_groups(of.bincount(less).tolist(), of.bincount().tolist())

    return MemoryAblation(
        streams=len(reading.lengths),
        warm_up=warm_up,
        tokens=int(counted.sum()),
        of_documents=bool(documents),
        loss={model: of_model[UNTOUCHED][counted].mean().item() for model, of_model in losses.items()},
        costs={
            model: {c: difference(x, of_model[UNTOUCHED]) for c, x in of_model.items() if c != UNTOUCHED}
            for model, of_model in losses.items()
        },
    )


def losses_under_controls(
    model: MemoryLM, text: Tensor, reading: Reading, warm_up: int, progress: Callable[[int], object]
) -> dict[str, Tensor]:
    """The loss of each prediction, stream after stream, in nats, float64: ``untouched``, and under each
    control, which starts after ``warm_up`` predictions."""
    reading = replace(reading, segment_len=model.config.segment_len)
    controls = controls_of(model.config.memory_sizes)
    losses: dict[str, list[Tensor]] = {name: [] for name in (UNTOUCHED, *controls)}
    with eval_mode(model):
        for segment, _, _, scores in read_segments(model, reading.segments(text), controls, warm_up):
            for name, parts in losses.items():
                parts.append(scores.get(name, scores[UNTOUCHED])[0].double())
            progress(segment.inputs.numel() * len(scores))
    return {name: reading.in_order(parts) for name, parts in losses.items()}


def choose_streams(
    n_tokens: int, warm_up: int, segment_len: int, tokens: int, documents: Sequence[int] = ()
) -> Reading | None:
    """The beginnings of at most ``MAX_STREAMS`` equal parts of a text, or of its ``documents``, of many every
    k-th. After the first ``warm_up``, at least ``segment_len`` tokens of each count, about ``tokens`` in all;
    None where fewer than two are that long. The longest two of a group are equally long, so that no stream is
    read alone."""
    streams = max(min(MAX_STREAMS, (n_tokens - 1) // (warm_up + segment_len)), 1)
    lengths = [length - 1 for length in documents] or [(n_tokens - 1) // streams] * streams
    begins = list(accumulate(documents or lengths, initial=0))
    chosen = [number for number, length in enumerate(lengths) if length >= warm_up + segment_len]
    if len(chosen) < 2:
        return None
    if documents:
        chosen = chosen[:: -(-len(chosen) // max(tokens // segment_len, 2))]
    longest = warm_up + max(tokens // len(chosen), segment_len)
    chosen.sort(key=lambda number: (-min(lengths[number], longest), number))
    if len(chosen) % MAX_STREAMS == 1:
        chosen.pop()
    read = [min(lengths[number], longest) for number in chosen]
    groups = tuple(tuple(range(len(chosen))[i : i + MAX_STREAMS]) for i in range(0, len(chosen), MAX_STREAMS))
    for group in groups:
        read[group[0]] = read[group[1]]
    return Reading(tuple(begins[n] for n in chosen), tuple(read), groups, segment_len, bool(documents))


@dataclass(frozen=True)
class RecallByDistance:
    """The share of asks that were answered correctly, and how many asks there were; no share of none."""

    edges: tuple[int, ...]
    """Of the distance bins, in positions: bin i is from edge i to before edge i + 1."""
    accuracy: tuple[float | None, ...]
    asks: tuple[int, ...]
    by_place: dict[str, float | None]
    """By where the value was: one of ``PLACES``."""
    asks_by_place: dict[str, int]
    loss: float
    """Mean over all asks, in nats."""

    @property
    def within_reach(self) -> float | None:
        """Over all asks for what one layer can see."""
        return self.correct(PLACES[:-1])

    def correct(self, places: Sequence[str] = PLACES) -> float | None:
        asks = sum(self.asks_by_place[place] for place in places)
        right = sum((self.by_place[place] or 0.0) * self.asks_by_place[place] for place in places)
        return right / asks if asks else None


def distance_edges(reach: int) -> tuple[int, ...]:
    """Octaves from ``FINEST`` to a sixth of ``reach``, equal steps to a third beyond it, and one octave."""
    step, fine = FINEST, [0]
    while 2 * step <= reach // 6:
        fine.append(step)
        step *= 2
    last = -(-4 * reach // (3 * step)) * step
    return (*fine, *range(step, last + 1, step), 2 * last)


def recall_by_distance(
    model: MemoryLM,
    segments: Iterable[tuple[Segment, Tensor]],
    edges: tuple[int, ...],
    *,
    warm_up: int = 0,
    controls: Mapping[str, Control] | None = None,
) -> dict[str, RecallByDistance]:
    """Read ``segments``, each with its distances ``[S, B]``, from an empty memory; returns what the model
    recalls with its memory ``untouched``, and under each of the ``controls``, by name. Segments that end
    within the first ``warm_up`` positions of each stream don't count."""
    pairs, bins, places = list(segments), [], []
    by_control: dict[str, list[tuple[Tensor, Tensor]]] = {}
    with eval_mode(model):
        read = read_segments(model, (segment for segment, _ in pairs), controls, warm_up)
        for (_, distances), (segment, memory, _, scores) in zip(pairs, read, strict=True):
            if segment.end <= warm_up:
                continue
            n_exact = memory.mem_len
            reach = memory.n_positions(model.config.memory_sizes)
            asked = distances != NO_QUESTION
            before = distances - torch.arange(len(distances))[:, None]  # the segment's first position
            bins.append(torch.bucketize(distances[asked], torch.tensor(edges), right=True))
            places.append(torch.bucketize(before[asked], torch.tensor([0, n_exact, reach])))
            for name, (losses, correct) in scores.items():
                by_control.setdefault(name, []).append((correct[asked], losses[asked]))
    bin_of, place_of = torch.cat(bins), torch.cat(places)

    def recall(answers: list[tuple[Tensor, Tensor]]) -> RecallByDistance:
        right = torch.cat([correct for correct, _ in answers])
        loss = sum(losses.double().sum().item() for _, losses in answers) / max(len(right), 1)
        asks, accuracy = count_right(bin_of, right, len(edges) + 1)  # the first comes before the first edge
        asks_at, accuracy_at = count_right(place_of, right, len(PLACES))
        return RecallByDistance(
            edges=edges,
            accuracy=accuracy[1:-1],
            asks=asks[1:-1],
            by_place=dict(zip(PLACES, accuracy_at, strict=True)),
            asks_by_place=dict(zip(PLACES, asks_at, strict=True)),
            loss=loss,
        )

    return {name: recall(answers) for name, answers in by_control.items()}


def count_right(kind: Tensor, right: Tensor, kinds: int) -> tuple[tuple[int, ...], tuple[float | None, ...]]:
    """Of each ``kind [n]``, how many there are, and the share of those that are ``right [n]``."""
    asks, correct = (x.bincount(minlength=kinds).tolist() for x in (kind, kind[right]))
    return tuple(asks), tuple(c / n if n else None for c, n in zip(correct, asks, strict=True))


def probe(folder: Path, tokens: int, device: torch.device, **moved: str) -> Path:
    """Measure how much memory helps the models in ``folder``, a run's or a comparison's, on about ``tokens``
    tokens of their held-out text, and write the checkpoints and the [`MemoryAblation`][] into its
    ``probe.json``; returns the path. ``moved`` is as in [`common_corpus`][]. Of several seeds, the first of
    each arm that has a checkpoint is measured.

    Raises UserError where there is no checkpoint, and for runs on different texts or with different
    vocabularies.
    """
    runs: dict[str, Run] = {}
    for run in read_runs(folder):
        if newest_checkpoint(run.folder):
            runs.setdefault(run.arm, run)
    if not runs:
        raise UserError(f"no run in {folder} has a checkpoint; train at least until the first evaluation.")
    loaded = {run.folder.name: load_checkpoint(run.folder, device) for run in runs.values()}
    tokenizers = [tokenizer for _, tokenizer in loaded.values()]
    corpus = common_corpus(list(runs.values()), tokenizers[0], **moved)
    if any(tokenizer.to_json() != tokenizers[0].to_json() for tokenizer in tokenizers):
        raise UserError("these runs have different tokenizers; probe each run alone.")
    text, documents = held_out_tokens(corpus)
    models = {name: model for name, (model, _) in loaded.items()}
    with Progress(unit="tok", unit_scale=True, desc="probing memory") as bar:
        # A single document is part of one that was cut like a plain text.
        documents = documents if len(documents) > 1 else ()
        ablation = memory_ablation(models, text, tokens=tokens, documents=documents, progress=bar.update)
    checkpoints = {run.folder.name: newest_checkpoint(run.folder) for run in runs.values()}
    write_json(folder / PROBE, {"checkpoints": checkpoints, "memory_ablation": ablation})
    return folder / PROBE


def held_out_tokens(corpus: TokenDataset) -> tuple[Tensor, tuple[int, ...]]:
    """The held-out text, int64 ``[n]``, and the length of each document."""
    split = corpus.validation
    most = MAX_TOKENS if isinstance(split.tokens, np.memmap) else len(split.tokens)
    ends = split.documents.cumsum()
    documents = split.documents[ends <= max(most, ends[0])] if len(ends) else ends
    tokens = split.tokens[: documents.sum() if len(ends) else most]
    return torch.from_numpy(tokens.astype(np.int64)), tuple(documents.tolist())


def common_corpus(runs: Sequence[Run], subwords: Tokenizer | None = None, **moved: str) -> TokenDataset:
    """The text that all ``runs`` were trained on, its ``data``, ``validation`` and ``test`` now where these
    say if they were ``moved``; UserError if it has changed since, or differs between runs. The ``subwords``
    that they have learned from it are not learned again."""
    first = runs[0].config
    fields = ("data", "validation", "test", "document_separator", "text_field", "tokenizer")
    known = {name.rpartition(".")[2]: value for name, value in flatten(first)}
    settings = {name: known[name] for name in fields if name in known}  # earlier versions have fewer
    settings |= {name: place for name, place in moved.items() if place}
    if (tokenizer := runs[0].folder / TOKENIZER).is_file():  # one that was not made from the text
        settings["tokenizer"] = str(tokenizer)
    vocab_size = first["model"]["vocab_size"]
    known_subwords = subwords if settings["tokenizer"] == "bpe" else None
    corpus = dataset_of(CorpusSpec(**settings, vocab_size=vocab_size, subwords=known_subwords))
    for run in runs:
        before, now = run.facts["corpus"], corpus.info
        if before["sha256"] != now.sha256:
            raise UserError(
                f"{run.folder} was trained on {before['source']} with sha256 {before['sha256']}, but "
                f"{now.source} now has {now.sha256}; name the text that it was trained on with --data, and "
                f"measure runs on different texts one by one."
            )
    return corpus
