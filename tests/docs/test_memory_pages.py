"""The pages of memories say what each keeps, and what was measured of it."""

import pytest
import torch

from docs.building.results import about, kib, mean, seeds, table_of
from docs.building.tables.cells import share
from docs.building.tables.comparisons import KEYS, cost_of_keys
from docs.building.tables.memories import claims
from docs.building.tables.recall import MODELS
from experiments.memories import ALL_MEMORIES
from memformers.common.intervals import paired
from tests.builders import small_lm
from tests.docs.pages import as_written, points, prose
from tests.texts import read

FLOAT32_BYTES = 4

# What a memory keeps.


@pytest.mark.parametrize("model", MODELS)
def test_the_state_of_a_stream_is_what_a_model_keeps(model):
    lm = small_lm(model, mem_len=4, c_mem_len=4, segment_len=4, compression_rate=2, n_layers=3).eval()
    *_, memory = read(lm, torch.randint(9, (40, 1)))
    n_bytes = 0
    for layer in memory.layers:
        n_bytes += layer.mem.nbytes + layer.slots.nbytes
    # M positions, and C slots of the Compressive Transformer.
    keys = 8 if model == "compressive" else 4
    assert cost_of_keys({KEYS: keys}, 3, lm.config.d_model) == f"{keys} · {kib(n_bytes)}"


def count_keys(S, M, C, c):
    """The mean and the largest number of keys of slots of c positions, from the lengths alone."""
    keys = []
    exact = 0
    for _ in range(1000):
        exact += S
        # c positions at a time become a slot, until M are left.
        while exact > M and exact >= c:
            exact -= c
        keys.append(exact + C)
    # From a full memory on, over a whole period.
    return sum(keys[100 : 100 + c]) / c, max(keys)


def test_slots_of_nine_have_the_keys_that_pages_say():
    settings = about("recall_far")["settings"]
    slots = settings["Compressive, M = 32, C = 224, c = 9"]
    shared = settings["all"]
    C = slots["model.c_mem_len"]
    c = slots["model.compression_rate"]
    n_mean, n_max = count_keys(shared["model.segment_len"], slots["model.mem_len"], C, c)
    # Each layer keeps keys of D numbers.
    n_bytes = n_max * shared["model.n_layers"] * shared["model.d_model"] * FLOAT32_BYTES
    cost = f"{n_mean:g}, at most {n_max} · {kib(n_bytes)}"
    costs = {row["arm"]: row["cost"] for row in table_of("arms") if row["table"] == "recall_shift"}
    assert costs["compressive"] == costs["compressive-shift"] == cost
    reach = prose("docs/results/reach.md")
    assert f"| 256 · 128 KiB · 0.44 M | {cost} · 0.44 M |" in reach
    assert f"It holds {n_mean:g} keys on average, and at most {n_max}" in reach
    sentence = f"with at most {n_max} keys ({n_mean:g} on average), {C} of them slots of {c} tokens each"
    assert sentence in prose("docs/how-to/recall.md")


# The comparison of all memories.


def worse_at_equal_bytes(experiment):
    """The differences, as pages show them, of the memories that are significantly worse than positions."""
    positions = seeds(experiment, "transformer-xl", "bits per character")
    worse = {}
    for memory in ALL_MEMORIES:
        bits = seeds(experiment, memory.arm, "bits per character")
        if not bits or memory.name == "Transformer-XL":
            continue
        difference = paired(bits, positions)
        assert difference.mean > -difference.half_width, "no memory is significantly better"
        if difference.leaves_out_zero:
            worse[memory.name] = as_written(difference)
    return worse


def test_the_page_of_memories_names_those_that_are_worse():
    shakespeare = worse_at_equal_bytes("equal_bytes")
    python = worse_at_equal_bytes("equal_bytes_python")
    assert shakespeare.keys() == {
        "no memory", "Compressive Transformer", "pooled slots", "KeyDiff", "Infini-attention"
    }  # fmt: skip
    assert python.keys() == {"no memory", "random positions", "TOVA", "Infini-attention"}
    sentences = (
        f"These save {shakespeare['no memory']} and {python['no memory']} bits per character compared with "
        f"no memory. On Tiny Shakespeare, slots of the Compressive Transformer are worse than positions by "
        f"{shakespeare['Compressive Transformer']}, pooled slots by {shakespeare['pooled slots']}, "
        f"KeyDiff by {shakespeare['KeyDiff']} and Infini-attention by {shakespeare['Infini-attention']}; "
        f"on Python, random positions by {python['random positions']}, TOVA by {python['TOVA']} and "
        f"Infini-attention by {python['Infini-attention']}. For all others, the interval contains zero."
    )
    assert sentences in prose("docs/results/memories.md")


def test_results_of_memories_have_three_seeds_of_both_arms():
    names = {memory.name for memory in ALL_MEMORIES}
    for (name, _), claim in claims().items():
        assert name in names
        ours = seeds(claim.experiment, claim.arm, claim.measure)
        theirs = seeds(claim.experiment, claim.rival, claim.measure)
        assert len(ours) >= 3
        assert ours.keys() == theirs.keys()


# Memories of other papers in associative recall.
KEPT = ("r-kv-128-shift-slow", "keydiff-128-shift", "tova-128-shift-slow", "selective-128-shift")
REACH = "docs/results/reach.md"


def answers(arm):
    return seeds("mqar_memories", arm, "correct")


def test_the_shares_in_associative_recall_are_those_of_the_experiment():
    page = prose(REACH)
    shown = [share(mean(answers(arm))) for arm in (*KEPT, "random-positions-128-shift", "xl-128-shift-slow")]
    r_kv, keydiff, tova, selective, at_random, newest = shown
    assert f"R-KV answers {r_kv} correctly, KeyDiff {keydiff}, TOVA {tova}, the selective memory " in page
    assert f"{selective}, and {at_random} are right if the positions are kept at random." in page
    assert f"with the bytes of 128 positions too, answers {newest}." in page
    assert f"an example in a file, {r_kv} |" in prose("docs/which-memory.md")


def test_kept_positions_win_in_associative_recall():
    newest = answers("xl-128-shift-slow")
    for arm in (*KEPT, "random-positions-128-shift"):
        gain = paired(answers(arm), newest)
        assert gain.n == 3
        assert gain.leaves_out_zero
        assert gain.mean > 0
    assert f"beats the newest positions, by {points(gain)} points" in prose(REACH)
    for arm in ("exponential-average-128-shift", "pooled-slots-128-shift"):
        assert not paired(answers(arm), newest).leaves_out_zero


def test_r_kv_and_tova_beat_the_selective_memory():
    *others, selective = map(answers, KEPT)
    r_kv, keydiff, tova = (paired(other, selective) for other in others)
    sentence = (
        f"R-KV and TOVA are better than the selective memory by {points(r_kv)} and {points(tova)} points; "
        f"KeyDiff's {points(keydiff)} are not significant."
    )
    assert sentence in prose(REACH)
    assert (r_kv.leaves_out_zero, keydiff.leaves_out_zero, tova.leaves_out_zero) == (True, False, True)


def test_memories_that_cannot_have_a_shift_learn_no_more_without_one():
    newest = seeds("mqar_memories_without_shift", "xl-128-slow", "correct")
    for arm in ("dms-128-slow", "gated-deltanet-128-slow"):
        other = seeds("mqar_memories_without_shift", arm, "correct")
        assert not paired(other, newest).leaves_out_zero
    infini = seeds("mqar_memories_without_shift", "infini-attention-128", "correct")
    loss = paired(newest, infini)
    assert loss.mean - loss.half_width > 0
    assert f"Infini-attention is worse by {points(loss)} points, and the others show no" in prose(REACH)


# Recall by all memories.
def recalled(arm, band="set 192 to 384 tokens ago"):
    return seeds("equal_bytes_recall", arm, band)


def test_the_page_says_which_memories_recall_more():
    newest = recalled("transformer-xl")
    gains = {}
    for memory in ALL_MEMORIES:
        values = recalled(memory.arm)
        if values and memory.name != "Transformer-XL":
            gains[memory.name] = paired(values, newest)
    better = {name for name, gain in gains.items() if gain.leaves_out_zero and gain.mean > 0}
    worse = {name for name, gain in gains.items() if gain.leaves_out_zero and gain.mean < 0}
    assert better == {"pooled slots", "R-KV", "Compressive Transformer"}
    assert worse == {"DMS"}
    arms = ("pooled-slots", "r-kv", "compressive-transformer", "transformer-xl", "dms")
    pooled, r_kv, slots, positions, dms = (share(mean(recalled(arm))) for arm in arms)
    page = prose("docs/results/memories.md")
    assert (
        f"pooled slots recall {pooled}, R-KV {r_kv}, the Compressive Transformer {slots}, and "
        f"Transformer-XL {positions}."
    ) in page
    assert f"so its gain of {points(gains['selective'])} points is not significant" in page
    assert f"DMS recalls {dms}, about as much as a guess." in page


def test_the_selective_memory_recalls_most_in_two_seeds():
    best = []
    for seed in range(3):
        by_arm = {memory.arm: recalled(memory.arm).get(seed, 0.0) for memory in ALL_MEMORIES}
        best.append(max(by_arm, key=lambda arm: by_arm[arm]))
    assert sorted(best) == ["pooled-slots", "selective", "selective"]


def test_no_memory_recalls_near_values_better():
    near = "set 0 to 192 tokens ago"
    newest = recalled("transformer-xl", near)
    assert f"Transformer-XL's {share(mean(newest))}." in prose("docs/results/memories.md")
    for memory in ALL_MEMORIES:
        values = recalled(memory.arm, near)
        if values:
            gain = paired(values, newest)
            assert not gain.leaves_out_zero or gain.mean < 0
