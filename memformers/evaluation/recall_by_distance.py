"""How much a model recalls, by how long ago it was said, and which part of its memory it has that from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memformers.data.recall_stream import NOTHING
from memformers.data.streams import Segment
from memformers.evaluation.evaluate import Control, read_segments
from memformers.models.base import eval_mode
from memformers.models.language_model import MemoryLM

PLACES = ("segment", "memory", "slots", "beyond")
"""Where a value can be when it is asked for: in the segment that is read, in the memory, in a compressed
slot, or beyond what one layer sees. Of layers with other lengths, those that remember the most count."""
FINEST = 64
"""The narrowest distance bin, in positions."""


@dataclass(frozen=True)
class RecallByDistance:
    """The share of asks that were answered correctly; None where there was no ask."""

    edges: tuple[int, ...]
    """Of the distance bins, in positions: bin i is from edge i to before edge i + 1."""
    accuracy: tuple[float | None, ...]
    """In each bin."""
    asks: tuple[int, ...]
    """How many asks each bin has."""
    by_place: dict[str, float | None]
    """By where the value was: one of [`PLACES`][]."""
    asks_by_place: dict[str, int]
    """How many asks that is."""
    loss: float
    """Mean over all asks, in nats."""

    @property
    def within_reach(self) -> float | None:
        """Over all asks for what one layer can see."""
        return self.correct(PLACES[:-1])

    def correct(self, places: Sequence[str] = PLACES) -> float | None:
        """Over all asks for values at these ``places``."""
        asks = sum(self.asks_by_place[place] for place in places)
        right = sum((self.by_place[place] or 0.0) * self.asks_by_place[place] for place in places)
        return right / asks if asks else None


def distance_edges(reach: int) -> tuple[int, ...]:
    """Edges of distance bins for a model that sees ``reach`` positions back: octaves from [`FINEST`][] on up
    to a sixth of it, equal steps up to a third beyond it, and then one octave."""
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
    recalls with its memory untouched, and under each of the ``controls``, by name.

    The memory that is carried on is always the untouched one. Segments that end within the first ``warm_up``
    positions of each stream don't count. The mode of the model is restored.

    Raises UserError if there is only one stream, since controls exchange them.
    """
    pairs, bins, places = list(segments), [], []
    by_control: dict[str, list[tuple[Tensor, Tensor]]] = {}
    with eval_mode(model):
        read = read_segments(model, (segment for segment, _ in pairs), controls, warm_up)
        for (_, distances), (segment, memory, _, scores) in zip(pairs, read, strict=True):
            if segment.end <= warm_up:
                continue
            held, reach = memory.mem_len, memory.positions(model.config.memory_sizes)
            asked = distances != NOTHING
            before = distances - torch.arange(len(distances))[:, None]  # the segment's first position
            bins.append(torch.bucketize(distances[asked], torch.tensor(edges), right=True))
            places.append(torch.bucketize(before[asked], torch.tensor([0, held, reach])))
            for name, (losses, correct) in scores.items():
                by_control.setdefault(name, []).append((correct[asked], losses[asked]))
    bin_of, place_of = torch.cat(bins), torch.cat(places)

    def recall(answers: list[tuple[Tensor, Tensor]]) -> RecallByDistance:
        right = torch.cat([correct for correct, _ in answers])
        loss = sum(losses.double().sum().item() for _, losses in answers) / max(len(right), 1)
        asks, accuracy = shares(bin_of, right, len(edges) + 1)  # the first comes before the first edge
        asks_at, accuracy_at = shares(place_of, right, len(PLACES))
        return RecallByDistance(
            edges=edges,
            accuracy=accuracy[1:-1],
            asks=asks[1:-1],
            by_place=dict(zip(PLACES, accuracy_at, strict=True)),
            asks_by_place=dict(zip(PLACES, asks_at, strict=True)),
            loss=loss,
        )

    return {name: recall(answers) for name, answers in by_control.items()}


def shares(kind: Tensor, right: Tensor, kinds: int) -> tuple[tuple[int, ...], tuple[float | None, ...]]:
    """How many asks there are of each ``kind [n]``, and the shares of those that are ``right [n]``."""
    asks, correct = (x.bincount(minlength=kinds).tolist() for x in (kind, kind[right]))
    return tuple(asks), tuple(c / n if n else None for c, n in zip(correct, asks, strict=True))
