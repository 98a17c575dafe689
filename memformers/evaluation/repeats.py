"""The distance from each token to the earlier occurrence that it repeats.

A token *repeats from distance d* where it and the n − 1 tokens before it, its n-gram, last occurred d tokens
ago. So a model that remembers what was d tokens ago can copy the token from there.
"""

from itertools import pairwise

import torch
from torch import Tensor

NEVER = 0
"""The distance of a token that repeats nothing."""


def repeat_distances(tokens: Tensor, n: int) -> Tensor:
    """How many tokens ago the n-gram that ends with each token of the streams ``tokens [T, B]`` last occurred
    in the same stream, int64 ``[T, B]``; [`NEVER`][] where it did not, and for the first ``n`` − 1 tokens."""
    found = torch.full_like(tokens, NEVER, dtype=torch.int64)
    for b, stream in enumerate(tokens.T.tolist()):
        newest: dict[tuple[int, ...], int] = {}
        for end in range(n, len(stream) + 1):
            n_gram = tuple(stream[end - n : end])
            if n_gram in newest:
                found[end - 1, b] = end - newest[n_gram]
            newest[n_gram] = end
    return found


def band_edges(segment_len: int, reach: int) -> list[int]:
    """Edges of distance bands, in tokens: 1, then powers of two from the largest within a segment up to the
    first that is at least twice the ``reach`` of the memory, or twice the segment if that is longer."""
    edges = [1, max(1 << (segment_len.bit_length() - 1), 2)]
    while edges[-1] < 2 * max(reach, segment_len):
        edges.append(2 * edges[-1])
    return edges


def bands(distances: Tensor, edges: list[int]) -> Tensor:
    """The band of each of ``distances``, of any shape: i for those from edge i to before edge i + 1, and the
    number of bands for those beyond the last edge and for [`NEVER`][]."""
    band = torch.bucketize(distances, torch.tensor(edges), right=True) - 1
    return band.where(distances != NEVER, len(edges) - 1).clamp(max=len(edges) - 1)


def band_names(edges: list[int]) -> list[str]:
    """The names of the bands of [`bands`][], in this order."""
    between = [f"{low:,} – {above - 1:,}" for low, above in pairwise(edges)]
    return [*between, f"{edges[-1]:,} or more, or never"]
