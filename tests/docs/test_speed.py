"""The page of speed says in its sentences what the benchmarks' files have."""

import pytest

from docs.building.results import ROOT
from experiments.benchmarks import attention, kernels, rotary
from experiments.benchmarks.measuring import spread, times_as_fast
from experiments.benchmarks.peers import LABML
from experiments.benchmarks.training import LABML_FUSED, OURS
from memformers.common.files import read_json

BENCHMARKS = ROOT / "experiments/benchmarks"


def text_of(page):
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def lowest_to_highest(ratios):
    """``1.45 to 2.90``, of medians."""
    medians = [ratio.median for ratio in ratios]
    return f"{min(medians):.2f} to {max(medians):.2f}"


def training_phrases():
    rows = read_json(BENCHMARKS / "results.json")["training"]
    words = {LABML: " times as fast as labml-nn", LABML_FUSED: " times with fused AdamW on both sides"}
    for side, rest in words.items():
        ratios = [times_as_fast(row["seconds"][OURS], row["seconds"][side]) for row in rows]
        yield lowest_to_highest(ratios) + rest


def decoding_phrases():
    measured = read_json(BENCHMARKS / "decoding.json")["long text"]
    early = spread(measured["early"], 1e3).median
    late = spread(measured["late"], 1e3).median
    yield f"{early:.2f} ms when the memory has just filled"
    yield f"{late:.2f} ms after {measured['tokens']:,} tokens"


def attention_phrases():
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
                seconds = row["seconds"]["16"]
                ratios.append(times_as_fast(seconds[kernels.FLASH], seconds[kernels.BLOCKED]))
        rest = "times as fast as by the blocked kernel in float32"
        yield f"{lowest_to_highest(ratios)} {rest if precision == 'float32' else 'times in bfloat16'}"


def in_turns_of_three(side, rival):
    """By CPU time, of what takes turns beside x-transformers."""
    ratios = []
    for row in read_json(BENCHMARKS / "results.json")["x-transformers"]:
        cpu_seconds = row["CPU seconds"]
        ratios.append(times_as_fast(cpu_seconds[side], cpu_seconds[rival]))
    return lowest_to_highest(ratios)


def peer_phrases():
    flash, usual, peer = rotary.OURS_FLASH, rotary.OURS, rotary.PEER
    yield f"{in_turns_of_three(flash, peer)} times as fast as x-transformers"
    yield f"{in_turns_of_three(usual, peer)} times with all features"
    yield f"With 16 features, steps are {in_turns_of_three(flash, usual)} times as fast as with all"


@pytest.mark.parametrize(
    "phrases", [training_phrases, decoding_phrases, attention_phrases, kernel_phrases, peer_phrases]
)
def test_the_page_of_speed_says_what_was_measured(phrases):
    page = text_of("docs/results/speed.md")
    assert [phrase for phrase in phrases() if phrase not in page] == []


def test_the_page_of_today_says_how_fast_few_features_are():
    phrase = f"[{in_turns_of_three(rotary.OURS_FLASH, rotary.PEER)} times as fast](results/speed.md)"
    assert phrase in text_of("docs/from-2019-to-today.md")
