"""The page of speed says in its sentences what the benchmarks' files have."""

import pytest

from docs.building.results import ROOT
from experiments.benchmarks import attention, kernels, rotary
from experiments.benchmarks.measuring import spread, times_as_fast
from experiments.benchmarks.peers import LABML
from experiments.benchmarks.training import LABML_FUSED, OURS
from memformers.common.files import read_json
from tests.docs.pages import in_one_line, read_file

BENCHMARKS = ROOT / "experiments/benchmarks"


def lowest_to_highest(ratios):
    """``1.45 to 2.90``, of medians."""
    medians = [ratio.median for ratio in ratios]
    return f"{min(medians):.2f} to {max(medians):.2f}"


def training_phrases():
    rows = read_json(BENCHMARKS / "results.json")["training"]
    rivals = {LABML: "times as fast as labml-nn", LABML_FUSED: "times with fused AdamW on both sides"}
    for rival, words in rivals.items():
        ratios = [times_as_fast(row["seconds"][OURS], row["seconds"][rival]) for row in rows]
        yield f"{lowest_to_highest(ratios)} {words}"


def decoding_phrases():
    measured = read_json(BENCHMARKS / "decoding.json")["long text"]
    # In milliseconds.
    early = spread(measured["early"], 1e3).median
    late = spread(measured["late"], 1e3).median
    yield f"{early:.2f} ms when the memory has just filled"
    yield f"{late:.2f} ms after {measured['tokens']:,} tokens"


def attention_phrases():
    # The last row has the most keys.
    row = read_json(BENCHMARKS / "results.json")["attention"][-1]
    seconds = row["seconds"]
    ratio = times_as_fast(seconds[attention.BLOCKED], seconds[attention.NAIVE]).median
    yield f"with {row['memory_len']:,} keys it is {ratio:.2f} times as fast as the naive kernel"


def kernel_phrases():
    rows = read_json(BENCHMARKS / "kernels.json")["attention"]
    for precision in kernels.PRECISIONS:
        ratios = []
        for row in rows:
            if row["precision"] == precision:
                # By the number of position features, of which 16 are the fewest.
                seconds = row["seconds"]["16"]
                ratios.append(times_as_fast(seconds[kernels.FLASH], seconds[kernels.BLOCKED]))
        rest = "times as fast as by the blocked kernel in float32"
        yield f"{lowest_to_highest(ratios)} {rest if precision == 'float32' else 'times in bfloat16'}"


def in_turns_of_three(side, rival):
    """How many times as fast a side is by CPU time, where three sides take turns."""
    ratios = []
    for row in read_json(BENCHMARKS / "results.json")["x-transformers"]:
        cpu_seconds = row["CPU seconds"]
        ratios.append(times_as_fast(cpu_seconds[side], cpu_seconds[rival]))
    return lowest_to_highest(ratios)


def peer_phrases():
    few_features = rotary.OURS_FLASH
    all_features = rotary.OURS
    peer = rotary.PEER
    yield f"{in_turns_of_three(few_features, peer)} times as fast as x-transformers"
    yield f"{in_turns_of_three(all_features, peer)} times with all features"
    ratio = in_turns_of_three(few_features, all_features)
    yield f"With 16 features, steps are {ratio} times as fast as with all"


@pytest.mark.parametrize(
    "phrases", [training_phrases, decoding_phrases, attention_phrases, kernel_phrases, peer_phrases]
)
def test_the_page_of_speed_says_what_was_measured(phrases):
    page = in_one_line(read_file("docs/results/speed.md"))
    assert [phrase for phrase in phrases() if phrase not in page] == []


def test_the_page_of_today_says_how_fast_few_features_are():
    phrase = f"[{in_turns_of_three(rotary.OURS_FLASH, rotary.PEER)} times as fast](results/speed.md)"
    assert phrase in in_one_line(read_file("docs/from-2019-to-today.md"))
