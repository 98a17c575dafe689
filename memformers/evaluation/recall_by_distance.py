"""How much a model recalls, by how long ago it was said, and which part of its memory it has that from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memformers.data.recall_stream import NOTHING
from memformers.data.streams import Segment
from memformers.evaluation.evaluate import Control, read_segment
from memformers.evaluation.memory_ablation import BASELINE
from memformers.models.base import eval_mode
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory

PLACES = ("segment", "memory", "slots", "beyond")
"""Where a value can be when it is asked for: in the segment that is read, in the memory, in a compressed
slot, or beyond what one layer sees. Of layers with other lengths, those that remember the most count."""
FINEST = 64
"""The narrowest distance bin, in positions."""


@dataclass(frozen=True)
class Recall:
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
        places = [place for place in PLACES[:-1] if self.asks_by_place[place]]
        right = sum((self.by_place[place] or 0.0) * self.asks_by_place[place] for place in places)
        return share(right, sum(self.asks_by_place[place] for place in places))


def distance_edges(reach: int) -> tuple[int, ...]:
    """Edges of distance bins for a model that sees ``reach`` positions back: octaves from [`FINEST`][] on up
    to a sixth of it, equal steps up to a third beyond it, and then one octave."""
    step = FINEST
    while 2 * step <= reach // 6:
        step *= 2
    fine = [FINEST * 2**i for i in range((step // FINEST).bit_length() - 1)]
    last = -(-4 * reach // (3 * step)) * step
    return (0, *fine, *range(step, last + 1, step), 2 * last)


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

    The memory that is carried on is always the untouched one. Segments that end within the first ``warm_up``
    positions of each stream don't count. The mode of the model is restored.

    Raises UserError if there is only one stream, since controls exchange them.
    """
    changes, lengths = controls or {}, model.config.memory_sizes
    bins, places, memory = [], [], Memory(())
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in (BASELINE, *changes)}
    with eval_mode(model):
        for segment, distances in segments:
            counts, held, reach = segment.end > warm_up, memory.mem_len, memory.positions(lengths)
            read, changed = read_segment(model, segment, memory, changes if counts else {})
            if counts:
                asked = distances != NOTHING
                before = distances - torch.arange(len(distances))[:, None]  # the segment's first position
                bins.append(torch.bucketize(distances[asked], torch.tensor(edges), right=True))
                places.append(torch.bucketize(before[asked], torch.tensor([0, held, reach])))
                for name, scores in ({BASELINE: read.scores} | changed).items():
                    found[name].append((scores.correct.cpu()[asked], scores.losses.cpu()[asked]))
            memory = read.memory
    asks = torch.cat(bins), torch.cat(places)
    return {name: recall_of(edges, *asks, parts) for name, parts in found.items()}


def recall_of(
    edges: tuple[int, ...], bins: Tensor, places: Tensor, parts: Sequence[tuple[Tensor, Tensor]]
) -> Recall:
    """The recall of asks with these ``bins``, of which the first comes before the first edge, and ``places``,
    ``[n]`` each; ``parts`` are whether they were answered correctly, and their losses, of some asks each."""
    right = torch.cat([correct for correct, _ in parts])
    asks, asks_right = (x.bincount(minlength=len(edges) + 1)[1:-1].tolist() for x in (bins, bins[right]))
    by_place, right_by_place = (x.bincount(minlength=len(PLACES)).tolist() for x in (places, places[right]))
    return Recall(
        edges=edges,
        accuracy=tuple(map(share, asks_right, asks)),
        asks=tuple(asks),
        by_place=dict(zip(PLACES, map(share, right_by_place, by_place), strict=True)),
        asks_by_place=dict(zip(PLACES, by_place, strict=True)),
        loss=sum(losses.double().sum().item() for _, losses in parts) / max(len(right), 1),
    )


def share(right: float, asks: int) -> float | None:
    """The part of ``asks`` that is right."""
    return right / asks if asks else None
