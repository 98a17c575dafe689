"""All memories on the recall stream: their sizes, and an experiment of moments."""

import csv

import pytest

from experiments.equal_bytes_recall import EqualBytesRecall, variants_of
from experiments.memories import ALL_MEMORIES
from memformers.comparison.recall.setup import RecallConfig
from memformers.models.facts import memory_facts

LAYERS, D, SEGMENT = 2, 64, 64
KEYS = {"near": 128, "far": 256}
SLOTS = {"near": 64, "far": 224}
OTHER_SIZES = ("no-memory", "infini-attention", "random-positions", "pooled-slots", "gated-deltanet")
"""Memories whose state has another size, and the formula of each."""


def facts_of(reach, name):
    config = RecallConfig(reach)
    [variant] = [variant for variant in variants_of(config) if variant.name == name]
    return memory_facts(variant.arm(config.setup.base).config.model)


def test_all_memories_but_memory_tokens_take_part():
    for reach in KEYS:
        names = {variant.label for variant in variants_of(RecallConfig(reach))}
        assert {memory.name for memory in ALL_MEMORIES} - names == {"memory tokens"}


@pytest.mark.parametrize("reach", KEYS)
def test_memories_have_the_bytes_of_transformer_xl(reach):
    full = 4 * LAYERS * KEYS[reach] * D
    for memory in ALL_MEMORIES:
        if memory.name != "memory tokens" and memory.arm not in OTHER_SIZES:
            n_bytes = facts_of(reach, memory.arm)["state_bytes"]
            # Positions that wait for a whole slot of c = 9 are beyond the last multiple.
            waiting = 4 * LAYERS * 9 * D if memory.arm == "compressive-transformer" else 0
            assert full <= n_bytes <= full + waiting


@pytest.mark.parametrize("reach", KEYS)
def test_states_of_another_size_have_the_bytes_of_their_formula(reach):
    C = SLOTS[reach]
    full = 4 * LAYERS * KEYS[reach] * D
    assert facts_of(reach, "no-memory")["state_bytes"] == 0
    # A matrix and a normalizer for each head, of width 16.
    assert facts_of(reach, "infini-attention")["state_bytes"] == 4 * LAYERS * (16 + 1) * D
    # A key of each kept position, and a counter.
    assert facts_of(reach, "random-positions")["state_bytes"] == full + 4 * LAYERS * (C + 1)
    # The inputs of a segment, too.
    assert facts_of(reach, "pooled-slots")["state_bytes"] >= full + 4 * LAYERS * SEGMENT * D
    assert facts_of(reach, "gated-deltanet")["state_bytes"] == full


@pytest.mark.parametrize("reach", KEYS)
def test_positions_and_slots_are_at_most_the_keys_of_transformer_xl(reach):
    for memory in ALL_MEMORIES:
        if memory.name not in ("memory tokens", "Compressive Transformer", "pooled slots"):
            assert facts_of(reach, memory.arm)["keys"] <= KEYS[reach]


def test_an_experiment_reports_recall_by_distance(tmp_path, quick_runs):
    arms = ("transformer-xl", "r-kv")
    out = tmp_path / "a"
    EqualBytesRecall(out=out, arms=arms, quick=True, tokens=4096, dashboard="off").run()
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["arm"] for row in rows} == {*arms}
    assert {row["measure"] for row in rows} == {"set 0 to 192 tokens ago", "set 192 to 384 tokens ago"}
    assert "R-KV, minus Transformer-XL" in (out / "report.md").read_text(encoding="utf-8")
