"""Each number that README and the home page claim, against the file of results that it is from; and each
sentence that compares memories, against every bold row of the tables of results."""

import re
from itertools import pairwise

import numpy as np
import pytest

from docs.building.markdown import BLOCK
from docs.building.results import ROOT, about, mean, paired, seeds, verdicts
from docs.building.tables.cells import share
from experiments.mqar import SHORTEST, draw_episode, level_without_association


def read(path):
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


README, HOME, WHICH = map(read, ("README.md", "docs/index.md", "docs/which-memory.md"))
INDEX, LONG_TEXT = (read(f"docs/results/{name}.md") for name in ("index", "long-text"))
RESULTS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs/results").glob("*.md")}
BOLD_ON_TEXT = {
    ("long-text", "64 positions, 192 slots"): "worse",
    ("compression", "Transformer-XL, equal keys"): "better",
    # Against 256 positions in every layer; against positions in the same layers they are level.
    ("long-text", "192 positions, 128 slots in the upper layers"): "other layers",
    ("long-text", "the same, slots of 2 positions"): "other layers",
    ("long-text", "32 positions, 32 slots"): "worse",
    ("long-text", "32 positions, 32 slots, no shift"): "worse",
    ("long-text", "128 newest and 128 slots in the last layer"): "worse",
    ("long-text", "the same, slots are means"): "worse",
    ("memories", "Compressive Transformer"): "worse",
    ("memories", "pooled slots"): "slots of another memory",
}
"""What each bold row that compares slots with positions on a whole text says of slots."""


def python_source(arm, experiment="text"):
    after = "" if experiment.startswith("text_recipe") else ", 6,400,000 tokens"
    return seeds(experiment, arm, f"bits per byte{after}")


def table_rows(page):
    """Each row of a page's tables: the headings, the newest row that is only a heading, and the cells."""
    for block in BLOCK.finditer(RESULTS[page]):
        headings, _, *rows = [line for line in block[0].splitlines() if line.startswith("|")] or ["", ""]
        group = ""
        for line in rows:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len([cell for cell in cells if cell]) == 1:
                group = cells[0].strip("*")
            yield [heading.strip() for heading in headings.strip("|").split("|")], group, cells


def test_the_sentence_about_slots_on_text_counts_every_comparison():
    """By the bits that slots save against the same number of vectors in the same layers, paired by seed."""
    gains = [verdict.gain for verdict in verdicts() if verdict.panel.startswith("Text")]
    compared = [("ablation", "conv", "bits per character")]
    compared += [("memories", "compressive", "bits per character, tiny-shakespeare")]
    compared += [("memories", "compressive", "bits per byte, python-source")]
    compared += [("equal_bytes", "compressive-transformer", "bits per character")]
    compared += [("equal_bytes_python", "compressive-transformer", "bits per character")]
    gains += [paired(seeds(name, "transformer-xl", m), seeds(name, slots, m)) for name, slots, m in compared]
    better = sum(gain.mean > gain.half_width for gain in gains)
    worse = sum(gain.mean < -gain.half_width for gain in gains)
    sentence = f"slots won {better} of {len(gains)} comparisons (after short training) and lost {worse};"
    for page in (README, HOME, INDEX):
        assert f"{sentence} {len(gains) - better - worse} show no significant difference." in page
    assert [*BOLD_ON_TEXT.values()].count("better") == better
    assert [*BOLD_ON_TEXT.values()].count("worse") == worse


def test_each_significant_row_about_slots_is_in_the_sentence():
    bold = {
        (page, cells[0])
        for page in RESULTS
        for headings, _, cells in table_rows(page)
        if "slots" in cells[0] or "Compressive" in cells[0] or (page, cells[0]) in BOLD_ON_TEXT
        for column, cell in enumerate(cells)
        if cell.startswith("**") and "bits per" in " ".join(headings[max(0, column - 1) : column])
    }
    assert bold == BOLD_ON_TEXT.keys()


def test_exact_memory_wins_in_reach_and_slots_beyond():
    compared = 0
    for _, group, cells in table_rows("reach"):
        band = re.match(r"set ([\d,]+) to ([\d,]+) tokens ago", cells[0])
        if not band or not cells[-1].startswith("**"):
            continue
        layers, keys = map(int, re.findall(r"\d+", group))
        first, last = (int(number.replace(",", "")) for number in band.groups())
        if last < layers * keys or first >= layers * keys:
            assert ("+" in cells[-1]) == (first >= layers * keys), (group, cells)
            compared += 1
    assert compared >= 10


def test_the_readme_is_short_and_searchable():
    searched = ["recurrence over segments", "memory carried across batches", "truncated backpropagation"]
    searched += ["reset it per row", "KV cache", "long context", "in place of `nn.GRU` or `nn.LSTM`"]
    assert [words for words in searched if words not in README] == []
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 750


def test_the_readme_has_both_commands_on_its_first_screen():
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:30]
    assert {"make compare", "make test"} <= {line.partition(" #")[0].strip() for line in first_screen}


@pytest.mark.parametrize("page", sorted(RESULTS.keys() - {"commands", "index", "speed"}))
def test_headlines_claim_from_several_seeds(page):
    headline = re.search(r"\n\n\*\*(.+?)\*\*", RESULTS[page], re.DOTALL)[1]
    assert "one seed" not in headline
    for number in re.findall(r"\d+\.\d+", headline):
        assert f"{number} ±" in RESULTS[page] or f"± {number}" in RESULTS[page], number


def test_python_source_savings_are_paired():
    none, exact = python_source("none"), python_source("xl-256")
    saved = paired(none, exact)
    more = paired(*(python_source(arm, "text_heads") for arm in ("xl-256", "xl-last")))
    assert (saved.n, more.leaves_out_zero) == (3, True)
    gain = f"(−{saved.mean:.3f} ± {saved.half_width:.3f})"
    assert f"from {mean(none).mean:.3f} to {mean(exact).mean:.3f} bits per byte {gain}" in HOME
    assert f"another {more.mean:.3f} ± {more.half_width:.3f}" in HOME


SHIFT, SELECTIVE = ("last-256", "last-256-shift"), ("last-256-shift", "last-128-selective-shift")
SAVED = [
    (["text_shift_python", "text_shift_rfc"], [SHIFT], 2,
     [(page, "{} …{} on RFCs") for page in (HOME, LONG_TEXT, WHICH)]),
    (["text_recipe"], [("xl-plain", "transformer-xl"), ("compressive-plain", "compressive"),
                       ("compressive", "transformer-xl")], 3,
     [(LONG_TEXT, "saves {} bits per byte for Transformer-XL and {} for the Compressive Transformer"),
      (LONG_TEXT,
        "{1} for the Compressive Transformer. With a shift, the Compressive Transformer is {2} behind")]),
    (["text_selective_python", "text_selective_rfc"], [SELECTIVE], 2,
     [(WHICH, "saves another {} on Python and {} on RFCs"),
      *((page, "another {} and {}") for page in (HOME, INDEX, LONG_TEXT))]),
    (["text_recipe", "text_recipe_rfc"], [("transformer-xl", "selective")], 1,
     [(LONG_TEXT, "saves another {} on Python, and nothing on RFCs ({})"),
      (WHICH, "{} on Python after 2.7 million tokens, and nothing on RFCs")]),
    (["text_selective_python", "text_selective_rfc"], [("last-256", "last-128-selective")], 1,
     [(LONG_TEXT, "this memory saves {} on Python…difference on RFCs (−{})")]),
    (["text_selective_longer"], [("last-832-shift", "last-416-selective-shift")], 1,
     [(LONG_TEXT, "it saves {} on Python compared with the 832"), (WHICH, "kept, it saves {} on Python")]),
    (["text_selective_rfc", "text_selective_python"], [("last-128-slots-shift", "last-256-shift")], 1,
     [(LONG_TEXT, "{} higher than with the 256 newest on RFCs…but not significantly ({})")]),
    (["text_selective_rfc", "text_selective_python"], [("last-128-means-shift", "last-256-shift")], 1,
     [(LONG_TEXT, "means of 4 tokens are no better: +{} on RFCs and +{} (not significant)")]),
    (["text_shift_python", "text_shift_rfc"], [SELECTIVE[::-1]], 1,  # without expiry, it costs
     [(LONG_TEXT, "{} higher than with the 256 newest…(+{})")]),
]  # fmt: skip
"""Experiments and pairs of a worse and a better arm; how many of the differences, the first ones, are
significant; and what pages say of them."""


@pytest.mark.parametrize(("experiments", "pairs", "significant", "sentences"), SAVED)
def test_savings_are_paired_and_significant_if_so_said(experiments, pairs, significant, sentences):
    gains = [paired(*(python_source(arm, name) for arm in arms)) for name in experiments for arms in pairs]
    assert [gain.leaves_out_zero for gain in gains] == [i < significant for i in range(len(gains))]
    assert all(gain.n == 3 for gain in gains)
    assert all(gain.mean > 0 for gain in gains[:significant])
    numbers = [f"{gain.mean:.3f} ± {gain.half_width:.3f}" for gain in gains]
    for page, sentence in sentences:
        assert [part for part in sentence.format(*numbers).split("…") if part not in page] == []


def test_associative_recall_gains_are_paired():
    of = ("selective-128-shift", "xl-128-shift-slow", "xl-128-slow")
    of_arms = [seeds("mqar", arm, "correct") for arm in of]
    for better, worse in pairwise(of_arms):
        assert (better.keys(), paired(better, worse).leaves_out_zero) == ({1, 2, 3}, True)
    shares = [share(mean(of_arm)) for of_arm in of_arms]
    # The level without association: how many answers of an episode are its most common one.
    _, targets, _ = draw_episode(np.random.default_rng(0), SHORTEST, 16, 64)
    most = np.bincount(targets[targets >= 0]).max() / 16
    assert most == level_without_association(SHORTEST)
    level = f"{100 * most:.1f} %"
    for page in (WHICH, INDEX):
        assert [shown for shown in (*shares, level) if shown not in page] == []


def test_two_memories_beat_guessing_without_a_shift():
    arms = ("xl-128-slow", "conv-128", "mean-128", "selective-128-slow")
    shares = {arm: mean(seeds("mqar", arm, "correct")) for arm in arms}
    level = level_without_association(SHORTEST)
    above = {arm for arm, share in shares.items() if share.mean - share.half_width > level}
    assert above == {"mean-128", "selective-128-slow"}


@pytest.mark.parametrize(
    "order",
    [
        ["selective-128-shift", "xl-128-shift-slow", "conv-128-shift"],
        ["conv-32-shift", "xl-32-shift-slow"],
        ["mean-32-shift", "xl-32-shift-slow"],
        ["selective-32-shift", "xl-32-shift-slow"],
    ],
)
def test_the_order_in_associative_recall_is_significant(order):
    answers = [seeds("mqar", arm, "correct") for arm in order]
    for better, worse in pairwise(answers):
        gain = paired(better, worse)
        assert gain.leaves_out_zero
        assert gain.mean > 0


@pytest.mark.parametrize(
    ("experiment", "band"), [("recall_three_layers", "192 – 384"), ("recall_far", "512 – 2048")]
)
def test_the_answers_of_both_models_are_those_of_the_experiment(experiment, band):
    for arm in ("transformer-xl", "compressive"):
        correct = share(mean(seeds(experiment, arm, f"correct, {band}")))
        assert correct in HOME


def test_the_speed_is_that_of_its_page():
    page = read("docs/results/speed.md")
    low, high = re.search(r"([\d.]+) to ([\d.]+) times as fast as labml-nn", page).groups()
    assert f"{low} to {float(high):g} times as fast as labml-nn" in README


def test_the_sentence_on_learning_is_that_of_its_file():
    def loss(measure):
        return seeds("learning", "transformer-xl-shakespeare", measure)[0]

    static, learning = loss("loss (nats)"), loss("sgd: loss (nats)")
    assert f"`transformer-xl-shakespeare` goes from {static:.3f} to {learning:.3f} nats" in README
    assert loss("sgd: saved (nats)") > loss("sgd: saved, half width (nats)")


def test_the_terminal_in_readme_shows_the_results_of_its_file():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    results = about("first_comparison")["arms"]
    assert len(results) == 3
    for arm in results:
        bits = seeds("first_comparison", arm["name"], "bits_per_character")[0]
        assert f"\n{arm['label']:<23}      1      {bits:.3f}\n" in readme
