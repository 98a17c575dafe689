"""Facts about a full memory for reports: its keys, bytes and operations."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from memformers.models.config import NetworkConfig
from memformers.models.sizes import MemorySizes

BYTES = 4
"""Bytes per float32 value."""
LONGEST_CYCLE = 10_000
"""The most segments to search for the largest total of layers with several rates. Only unusual rates have
longer cycles. Then the layers' maxima are added, since they coincide at some time, or nearly."""


def operations(D: int, Q: int, K: float) -> float:
    """Operations of attention from Q queries to K keys in one stream, hidden keys included: 2·Q·K·D each for
    content scores, position scores and weighted values, and 4·(K + Q)·D² for the projections. Projected
    positions are shared and don't count."""
    return 6 * Q * K * D + 4 * (K + Q) * D * D


def memory_facts(config: NetworkConfig) -> dict[str, Any]:
    """The facts in ``run.json`` about a full memory, for segments of S tokens.

    - ``memory``: the positions that one layer and all together see at most.
    - ``keys``: those of a layer's memory, the mean over layers, at most; ``mean_keys``: on average over
      segments; ``configured_keys``: M + C. They differ where c does not divide both M and S.
    - ``state_bytes``: what a stream carries from segment to segment, layer inputs in float32, at most, and
      ``mean_state_bytes`` on average; ``cached_bytes``: keys and values instead, which generation keeps.
    - ``attention_operations``: per token, on average.
    """
    S = config.segment_len
    D = config.d_model
    n_layers = config.n_layers
    sizes = config.memory_sizes

    # Positions of all layers: those that wait for a whole slot differ from segment to segment.
    configured = sum(size.mem_len for size in sizes)
    mean = sum(size.mean_positions(S) for size in sizes)
    most = most_positions(sizes, S)

    # Keys before the segment; C is constant.
    mean_keys = sum(size.mean_keys(S) for size in sizes)  # of all layers together
    keys = mean_keys + most - mean
    configured_keys = mean_keys + configured - mean
    # The state carried between segments, in vectors of D numbers.
    always_held = sum(size.c_mem_len + size.bptt_len + size.has_shift_state for size in sizes)
    extra_bytes = sum(size.extra_state for size in sizes) * BYTES
    farthest = [size.full_reach(S) - config.same_length for size in sizes]
    operations_of_layers = sum(operations(D, S, size.mean_keys(S) + S) // S for size in sizes)
    extra_operations = sum(size.extra_operations for size in sizes)
    return {
        "memory": {"one_layer": max(farthest), "all_layers": sum(farthest)},
        "keys": plain_number(keys / n_layers),
        "mean_keys": plain_number(mean_keys / n_layers),
        "configured_keys": plain_number(configured_keys / n_layers),
        "state_bytes": (most + always_held) * D * BYTES + extra_bytes,
        "mean_state_bytes": plain_number((mean + always_held) * D * BYTES + extra_bytes),
        "cached_bytes": round(2 * keys * D * BYTES),
        "attention_operations": int(operations_of_layers) + extra_operations,
    }


def most_positions(sizes: Sequence[MemorySizes], segment_len: int) -> int:
    """The most positions that full memories of layers with these ``sizes`` have together after a segment."""
    layers_of = Counter(sizes)  # mostly one size, or two
    # After a cycle of segments, all layers hold again what they held.
    cycle = math.lcm(*(size.group // math.gcd(segment_len, size.group) for size in layers_of))
    if cycle > LONGEST_CYCLE:
        return sum(size.most_positions(segment_len) for size in sizes)
    totals = []
    for n_segments in range(cycle):
        n_tokens = n_segments * segment_len
        totals.append(sum(n * size.full_positions(n_tokens) for size, n in layers_of.items()))
    return max(totals)


def plain_number(value: float) -> int | float:
    """``value`` as an integer if it is one."""
    return int(value) if value == int(value) else value
