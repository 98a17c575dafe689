"""What a model recalls of a stream: the share of correct answers, by how long ago the value was set and where
the model has it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memformers.data.recall_stream import NO_QUESTION
from memformers.data.streams import Segment
from memformers.evaluation.evaluate import Control, read_segments
from memformers.models.language_model import MemoryLM
from memformers.models.stack import eval_mode
from memformers.runs.folder import PLACES

FINEST = 64
"""The narrowest distance bin, in positions."""


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
        """The share over all asks for values that were in one of these ``places``; None for no such ask."""
        n_asks = 0
        n_right = 0.0
        for name in places:
            n_asks += self.asks_by_place[name]
            n_right += (self.by_place[name] or 0.0) * self.asks_by_place[name]
        return n_right / n_asks if n_asks else None


def distance_edges(reach: int) -> tuple[int, ...]:
    """Octaves from ``FINEST`` to a sixth of ``reach``, equal steps to a third beyond it, and one octave."""
    step = FINEST
    octaves = [0]
    while 2 * step <= reach // 6:
        octaves.append(step)
        step *= 2
    last = -(-4 * reach // (3 * step)) * step
    return (*octaves, *range(step, last + 1, step), 2 * last)


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
    # Whether each ask is answered, with each memory, and how far back its value was set.
    pairs = list(segments)
    bins: list[Tensor] = []
    places: list[Tensor] = []
    answers: dict[str, list[tuple[Tensor, Tensor]]] = {}  # whether they are right, and their losses
    with eval_mode(model):
        read = read_segments(model, (segment for segment, _ in pairs), controls, warm_up)
        for (_, distances), (segment, memory, _, scores) in zip(pairs, read, strict=True):
            if segment.end <= warm_up:
                continue
            reach = memory.n_positions(model.config.memory_sizes)
            is_asked = distances != NO_QUESTION
            # How far before the segment's first position a value was set: 0 or less is inside of it.
            age = distances - torch.arange(len(distances))[:, None]
            bins.append(torch.bucketize(distances[is_asked], torch.tensor(edges), right=True))
            limits = torch.tensor([0, memory.mem_len, reach])
            places.append(torch.bucketize(age[is_asked], limits))
            for name, (losses, is_right) in scores.items():
                answers.setdefault(name, []).append((is_right[is_asked], losses[is_asked]))
    bin_of_ask = torch.cat(bins)
    place_of_ask = torch.cat(places)

    # Counts by distance and by place.
    recalls = {}
    for name, of_segments in answers.items():
        is_right = torch.cat([is_right for is_right, _ in of_segments])
        total = sum(losses.double().sum().item() for _, losses in of_segments)
        # The first bin ends at the first edge, and the last one has no end: neither is reported.
        asks, accuracy = count_right(bin_of_ask, is_right, len(edges) + 1)
        place_asks, place_accuracy = count_right(place_of_ask, is_right, len(PLACES))
        recalls[name] = RecallByDistance(
            edges=edges,
            accuracy=accuracy[1:-1],
            asks=asks[1:-1],
            by_place=dict(zip(PLACES, place_accuracy, strict=True)),
            asks_by_place=dict(zip(PLACES, place_asks, strict=True)),
            loss=total / max(len(is_right), 1),
        )
    return recalls


def count_right(
    kind: Tensor, is_right: Tensor, n_kinds: int
) -> tuple[tuple[int, ...], tuple[float | None, ...]]:
    """Of each ``kind [n]``, how many there are, and the share of those that are right, ``is_right [n]``."""
    asks = kind.bincount(minlength=n_kinds).tolist()
    right_asks = kind[is_right].bincount(minlength=n_kinds).tolist()
    shares = [n_right / n if n else None for n_right, n in zip(right_asks, asks, strict=True)]
    return tuple(asks), tuple(shares)
