"""Recall on streams that ask more and less of a slot, at a size of moments."""

from dataclasses import replace

import pytest

from experiments.recall_grid import STREAMS, RecallGrid, beyond_chance, bits_of
from memformers.common.files import read_json
from memformers.data.recall_stream import RecallStream


def test_both_memories_are_trained_on_each_stream_and_have_a_row_in_the_order_of_bits(tmp_path, quick_runs):
    grid = RecallGrid(out=tmp_path, streams=(2, 3), tokens=128, growing=0.75, seeds=1)
    grid.run()
    configs = [read_json(path) for path in tmp_path.glob("*/config.json")]
    assert sorted(config["recall"]["stream"]["keys"] for config in configs) == [8, 8, 16, 16]
    assert {config["recall"]["growing"] for config in configs} == {0.75}
    rows = [line for line in (tmp_path / "report.md").read_text().splitlines() if " keys, " in line]
    assert [row.split(" | ")[:2] for row in rows[:2]] == [
        ["| 8 keys, 2 values, p = 1/8", "2.0"], ["| 16 keys, 4 values, p = 1/8", "3.0"]
    ]  # fmt: skip
    assert all(row.count(" points") == 1 for row in rows[:2])
    replace(grid, memories=("both-losses",), resume=True).run()
    configs = [read_json(path) for path in tmp_path.glob("*/config.json")]
    assert sorted(config["model"]["bptt"] for config in configs) == [0] * 4 + [1] * 2
    rows = [line for line in (tmp_path / "report.md").read_text().splitlines() if " keys, " in line]
    assert all(row.count(" points") == 2 for row in rows[:2])
    assert {"grid.png", "grid.svg"} <= {path.name for path in (tmp_path / "figures").iterdir()}


def test_a_slot_must_say_which_keys_of_its_positions_have_which_values():
    assert bits_of(RecallStream(keys=16, values=4, set_probability=1 / 8), rate=4) == 4 / 8 * 6
    bits = [bits_of(stream, rate=4) for stream in STREAMS]
    assert bits == sorted(bits)


def test_guesses_count_nothing_and_correct_answers_one():
    stream = RecallStream(values=4)
    for right, share in ((0.25, 0), (1, 1), (0.625, 0.5)):
        result = {"recall": {"edges": [64, 96, 128], "asks": [3, 1], "accuracy": [right, right]}}
        assert beyond_chance(64, 128, stream).of(result) == pytest.approx(share)
