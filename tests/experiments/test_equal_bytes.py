"""All memories on one text: their sizes, and an experiment of moments."""

import csv
from dataclasses import replace

from experiments import equal_bytes as program
from experiments.equal_bytes import BASE, EqualBytes
from experiments.memories import ALL_MEMORIES
from memformers.models.facts import memory_facts
from tests.builders import small_training

LAYERS, D = 4, 128
# Bytes of 64 positions in each layer, in float32.
FULL = 4 * LAYERS * 64 * D
OTHERS = {
    "no-memory": 0,
    "infini-attention": 4 * LAYERS * (32 + 1) * D,
    # For each stream, random positions have the key of each kept position, and a counter.
    "random-positions": FULL + 4 * LAYERS * (32 + 1),
    # Pooled slots carry the inputs of a segment of 64.
    "pooled-slots": 2 * FULL,
}


def test_all_memories_but_memory_tokens_take_part():
    names = {variant.label for variant in EqualBytes.variants}
    assert {memory.name for memory in ALL_MEMORIES} - names == {"memory tokens"}


def test_memories_have_equal_bytes_but_for_those_in_the_report():
    for variant in EqualBytes.variants:
        facts = memory_facts(variant.arm(BASE).config.model)
        assert facts["state_bytes"] == OTHERS.get(variant.name, FULL)


def test_memories_have_at_most_as_many_keys_as_transformer_xl():
    for variant in EqualBytes.variants:
        assert memory_facts(variant.arm(BASE).config.model)["keys"] <= 64


def test_an_experiment_reports_each_memory_beside_transformer_xl(tmp_path, monkeypatch, quick_runs):
    base = small_training(evaluations=1)
    monkeypatch.setattr(program, "BASE", replace(base, model=replace(base.model, model="transformer-xl")))
    arms = ("transformer-xl", "keydiff")
    out = tmp_path / "a"
    EqualBytes(data="builtin", out=out, arms=arms, seeds=2, tokens=128, dashboard="off").run()
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["arm"] for row in rows} == {*arms}
    assert "KeyDiff, minus Transformer-XL" in (out / "report.md").read_text(encoding="utf-8")
