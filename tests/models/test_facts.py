"""What is said of a full memory is what models hold after segments that are read."""

import math
import random
from dataclasses import replace

import pytest
import torch

from memformers import LayerMemory, MemoryLM, MemoryRule, MemorySizes, ModelConfig
from memformers.models.facts import memory_facts
from tests.texts import kept

BYTES = 4
TINY = ModelConfig(vocab_size=13, d_model=8, n_heads=2, d_ff=8)


class Decaying(MemoryRule):
    """A user's memory: one slot for all that has left, and c says nothing about its positions."""

    @classmethod
    def sizes(cls, config):
        return [MemorySizes(5, 1, 4)] * config.n_layers

    def update(self, past, x, context):
        window = self.push(past, x, context)
        slots = 0.9 * window.slots + 0.1 * window.evicted.sum(0, keepdim=True)
        return LayerMemory(window.mem, slots if len(window.evicted) else past.slots), None


def random_config(seed):
    draw = random.Random(seed)
    n_layers = draw.randint(1, 3)

    def lengths(low, high):
        if draw.random() < 0.5:
            return draw.randint(low, high)
        return tuple(draw.randint(low, high) for _ in range(n_layers))

    model = draw.choice(("transformer", "transformer-xl", "selective", *["compressive"] * 4, Decaying))
    config = replace(
        TINY, model=model, n_layers=n_layers, segment_len=draw.randint(3, 8), mem_len=lengths(0, 12),
        c_mem_len=lengths(1, 6), compression_rate=lengths(1, 5), token_shift=draw.random() < 0.5,
    )  # fmt: skip
    if model != "compressive" or draw.random() < 0.5:
        return config
    return replace(config, bptt=draw.randint(1, 2))


def held_by(config):
    """The keys of all layers and the vectors of a stream after each segment of a cycle, once the memory is
    full; and the farthest positions that each layer covers."""
    model = MemoryLM(config).eval()
    rates = [size.compression_rate for size in config.memory_sizes]
    cycle = math.lcm(*rates)
    memory = None
    keys = []
    vectors = []
    reaches = []
    # After 20 segments of 3 positions, the longest memory is full: 12 positions and 6 slots of 5.
    for i in range(2 * cycle + 20):
        with torch.no_grad():
            memory = model(torch.randint(13, (config.segment_len, 1)), memory).memory
        if i < cycle + 20:
            continue
        keys.append(sum(layer.mem_len + layer.n_slots for layer in memory.layers))
        vectors.append(sum(map(len, kept(memory))))
        by_layer = zip(memory.layers, rates, strict=True)
        reaches.append([layer.mem_len + rate * layer.n_slots for layer, rate in by_layer])
    return keys, vectors, [max(reach) for reach in zip(*reaches, strict=True)]


@pytest.mark.parametrize("seed", range(40))
def test_facts_are_the_mean_and_the_most_of_what_is_held(seed):
    config = random_config(seed)
    keys, vectors, reaches = held_by(config)
    facts = memory_facts(config)
    assert facts["keys"] == pytest.approx(max(keys) / config.n_layers)
    assert facts["mean_keys"] == pytest.approx(sum(keys) / len(keys) / config.n_layers)
    assert facts["state_bytes"] == max(vectors) * config.d_model * BYTES
    assert facts["mean_state_bytes"] == pytest.approx(sum(vectors) / len(vectors) * config.d_model * BYTES)
    assert facts["cached_bytes"] == 2 * max(keys) * config.d_model * BYTES
    assert facts["memory"] == {"one_layer": max(reaches), "all_layers": sum(reaches)}


@pytest.mark.parametrize(
    ("segment_len", "mem_len", "rate", "most", "mean"),
    # c divides both, only S, only M, neither; and positions that wait though M = 0.
    [(8, 12, 4, 12, 12), (6, 11, 3, 9, 9), (7, 12, 4, 12, 10.5), (64, 32, 9, 32, 28), (6, 0, 4, 2, 1)],
)
def test_positions_that_wait_for_a_whole_slot_are_counted(segment_len, mem_len, rate, most, mean):
    size = MemorySizes(mem_len, 3, rate, slot_positions=rate)
    assert (size.most_positions(segment_len), size.mean_positions(segment_len)) == (most, mean)


def test_rates_whose_cycles_are_long_are_no_problem():
    rates = (65_537, 65_539, 2**31 - 1)
    config = replace(
        TINY,
        model="compressive",
        n_layers=3,
        segment_len=64,
        mem_len=2**31 - 1,
        c_mem_len=1,
        compression_rate=rates,
    )
    facts = memory_facts(config)
    assert facts["keys"] == 2**31 - 1 + 1
    assert facts["mean_keys"] == 2**31 - 1 + 1 - sum(rate - 1 for rate in rates) / 6
