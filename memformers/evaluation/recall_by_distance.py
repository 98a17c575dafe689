"""How much a model recalls, by how long ago it was said, and which part of its memory it has that from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memformers.data.recall_stream import NOTHING
from memformers.data.streams import Segment
from memformers.evaluation.controls import Control, scores_under
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.stack import eval_mode

UNTOUCHED = "untouched"
PLACES = ("segment", "memory", "slots", "beyond")
"""Where a value can be when it is asked for: in the segment that is read, in the memory, in a compressed
slot, or beyond what one layer sees. Of layers with other lengths, those that remember the most count."""
FINEST = 64
"""The narrowest distance bin, in positions."""


@dataclass(frozen=True)
class Recall:
    """The share of asks that were answered rightly; None where there was no ask."""

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
        places = [place for place in PLACES[:-1] if self.asks_by_place[place]]
        right = sum((self.by_place[place] or 0.0) * self.asks_by_place[place] for place in places)
        asks = sum(self.asks_by_place[place] for place in places)
        return right / asks if asks else None


def distance_edges(reach: int) -> tuple[int, ...]:
    """Edges of distance bins for a model that sees ``reach`` positions back: octaves from [`FINEST`][] on up
    to a sixth of it, equal steps up to a third beyond it, and then one octave."""
    step = FINEST
    while 2 * step <= reach // 6:
        step *= 2
    fine = [FINEST * 2**i for i in range((step // FINEST).bit_length() - 1)]
    last = -(-4 * reach // (3 * step)) * step
    return (0, *fine, *range(step, last + 1, step), 2 * last)


@torch.no_grad()
def recall_by_distance(
    model: MemoryLM,
    segments: Iterable[tuple[Segment, Tensor]],
    edges: tuple[int, ...],
    *,
    warm_up: int = 0,
    controls: Mapping[str, Control] | None = None,
) -> dict[str, Recall]:
    """Read ``segments``, each with its distances ``[S, B]``, from an empty memory; returns what the model
    recalls with its memory untouched, and under each of the ``controls``, by name.

    A control changes the memory that the model reads in one segment. The memory that is carried on is always
    the untouched one, so a loss in one segment is not a loss in the next. Questions in the first ``warm_up``
    positions of each stream don't count. The mode of the model is restored.

    Raises ValueError if there is only one stream, since controls exchange them.
    """
    counts = {name: Counts(edges) for name in (UNTOUCHED, *(controls or {}))}
    memory, position, rate = Memory(()), 0, model.config.lengths.compression_rate
    with eval_mode(model):
        for segment, distances in segments:
            ends = (0, memory.mem_len, memory.positions(rate) - memory.mem_len)
            counted = position >= warm_up
            read, changed = scores_under(model, segment, memory, (controls or {}) if counted else {})
            for name, scores in ({UNTOUCHED: read.scores} | changed).items() if counted else ():
                counts[name].add(distances, ends, scores.correct.cpu(), scores.losses.cpu())
            memory, position = read.memory, position + len(segment.inputs)
    return {name: count.recall() for name, count in counts.items()}


@dataclass
class Counts:
    """Asks, and those that were right, of bins with these edges and of places."""

    edges: tuple[int, ...]
    bins: Tensor = field(init=False)
    """int64 ``[2, n + 2]``: asks and right answers before, in and after the bins."""
    places: Tensor = field(init=False)
    """int64 ``[2, 4]``: likewise in each of [`PLACES`][]."""
    loss: float = 0.0
    """Summed over asks, in nats."""

    def __post_init__(self) -> None:
        """Start with nothing counted."""
        self.bins = torch.zeros(2, len(self.edges) + 1, dtype=torch.int64)
        self.places = torch.zeros(2, len(PLACES), dtype=torch.int64)

    def add(self, distances: Tensor, ends: tuple[int, int, int], correct: Tensor, losses: Tensor) -> None:
        """Count a segment with these ``distances``, right answers and ``losses``, ``[S, B]`` each; ``ends``
        are the positions that segment, memory and slots hold before it, in this order."""
        asked = distances != NOTHING
        before = distances - torch.arange(len(distances))[:, None]  # the segment's first position
        limits = torch.tensor(ends).cumsum(0)
        for count, group in (
            (self.bins, torch.bucketize(distances[asked], torch.tensor(self.edges), right=True)),
            (self.places, torch.bucketize(before[asked], limits)),
        ):
            for row, which in enumerate((group, group[correct[asked]])):
                count[row] += torch.bincount(which, minlength=count.shape[1])
        self.loss += losses[asked].double().sum().item()

    def recall(self) -> Recall:
        """What has been counted."""
        asks, right = self.bins[:, 1:-1].tolist()
        place_asks, place_right = self.places.tolist()
        total = sum(place_asks)
        return Recall(
            edges=self.edges,
            accuracy=tuple(map(share, right, asks)),
            asks=tuple(asks),
            by_place=dict(zip(PLACES, map(share, place_right, place_asks), strict=True)),
            asks_by_place=dict(zip(PLACES, place_asks, strict=True)),
            loss=self.loss / total if total else 0.0,
        )


def share(right: int, asks: int) -> float | None:
    """The part of ``asks`` that is right."""
    return right / asks if asks else None
