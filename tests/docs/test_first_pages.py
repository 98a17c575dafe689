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
from tests.docs.pages import in_one_line, read_file

README = in_one_line(read_file("README.md"))
HOME = in_one_line(read_file("docs/index.md"))
WHICH_MEMORY = in_one_line(read_file("docs/which-memory.md"))
INDEX = in_one_line(read_file("docs/results/index.md"))
LONG_TEXT = in_one_line(read_file("docs/results/long-text.md"))
RESULTS = {path.stem: read_file(path) for path in (ROOT / "docs/results").glob("*.md")}

# What each bold row that compares slots with positions on a whole text says of slots.
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


def losses_of(arm, experiment="text"):
    """The bits per byte of an arm, by seed."""
    # Experiments on text have the budget in the measure's name, but for those with recipes.
    is_recipe = experiment.startswith("text_recipe")
    return seeds(experiment, arm, "bits per byte" if is_recipe else "bits per byte, 6,400,000 tokens")


def difference(experiment, worse, better):
    """What the better arm saves, paired by seed."""
    return paired(losses_of(worse, experiment), losses_of(better, experiment))


def as_written(gain):
    return f"{gain.mean:.3f} ± {gain.half_width:.3f}"


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def table_rows(page):
    """Each row of a page's tables: the headings, the newest row that is only a heading, and the cells."""
    for block in BLOCK.finditer(RESULTS[page]):
        lines = [line for line in block[0].splitlines() if line.startswith("|")]
        # Blocks of source and commands have no table. The second line of a table is its rule.
        if not lines:
            continue
        headings = cells_of(lines[0])
        group = ""
        for line in lines[2:]:
            cells = cells_of(line)
            if not any(cells[1:]):
                group = cells[0].strip("*")
            yield headings, group, cells


def bits_that_slots_save():
    """Each comparison of slots with the same number of vectors in the same layers on text, paired by seed."""
    for verdict in verdicts():
        if verdict.panel.startswith("Text"):
            yield verdict.gain
    compared = [
        ("ablation", "conv", "bits per character"),
        ("memories", "compressive", "bits per character, tiny-shakespeare"),
        ("memories", "compressive", "bits per byte, python-source"),
        ("equal_bytes", "compressive-transformer", "bits per character"),
        ("equal_bytes_python", "compressive-transformer", "bits per character"),
    ]
    for experiment, slots, measure in compared:
        positions = seeds(experiment, "transformer-xl", measure)
        yield paired(positions, seeds(experiment, slots, measure))


def test_the_sentence_about_slots_on_text_counts_every_comparison():
    better = 0
    worse = 0
    level = 0
    for gain in bits_that_slots_save():
        if gain.mean > gain.half_width:
            better += 1
        elif gain.mean < -gain.half_width:
            worse += 1
        else:
            level += 1
    n_compared = better + worse + level
    sentence = (
        f"slots won {better} of {n_compared} comparisons (after short training) and lost {worse}; "
        f"{level} show no significant difference."
    )
    for page in (README, HOME, INDEX):
        assert sentence in page
    # The tables agree: each comparison that is not level is a bold row.
    says = list(BOLD_ON_TEXT.values())
    assert says.count("better") == better
    assert says.count("worse") == worse


def test_each_significant_row_about_slots_is_in_the_sentence():
    bold = set()
    for page in RESULTS:
        for headings, _, cells in table_rows(page):
            row = (page, cells[0])
            if "slots" not in cells[0] and "Compressive" not in cells[0] and row not in BOLD_ON_TEXT:
                continue
            # A difference in bits is in the column after the bits themselves.
            for heading, cell in zip(headings, cells[1:], strict=False):
                if cell.startswith("**") and "bits per" in heading:
                    bold.add(row)
    assert bold == BOLD_ON_TEXT.keys()


def test_exact_memory_wins_in_reach_and_slots_beyond():
    compared = 0
    for _, group, cells in table_rows("reach"):
        band = re.match(r"set ([\d,]+) to ([\d,]+) tokens ago", cells[0])
        is_significant = cells[-1].startswith("**")
        if not band or not is_significant:
            continue
        layers, keys = map(int, re.findall(r"\d+", group))
        # With K keys in each of L layers, exact memory reaches L · K tokens back.
        reach = layers * keys
        first, last = (int(number.replace(",", "")) for number in band.groups())
        slots_win = "+" in cells[-1]
        # In a band that contains the end of the reach, either may win.
        if last < reach:
            assert not slots_win, (group, cells)
            compared += 1
        elif first >= reach:
            assert slots_win, (group, cells)
            compared += 1
    assert compared >= 10


def test_the_readme_is_short_and_searchable():
    searched = [
        "recurrence over segments", "memory carried across batches", "truncated backpropagation",
        "reset it per row", "KV cache", "long context", "in place of `nn.GRU` or `nn.LSTM`",
    ]  # fmt: skip
    assert [words for words in searched if words not in README] == []
    assert len(README.split()) <= 750


def test_the_readme_has_both_commands_on_its_first_screen():
    first_screen = read_file("README.md").splitlines()[:30]
    commands = [line.partition(" #")[0].strip() for line in first_screen]
    assert "make compare" in commands
    assert "make test" in commands


@pytest.mark.parametrize("page", sorted(RESULTS.keys() - {"commands", "index", "speed"}))
def test_headlines_claim_from_several_seeds(page):
    headline = re.search(r"\n\n\*\*(.+?)\*\*", RESULTS[page], re.DOTALL)[1]
    assert "one seed" not in headline
    for number in re.findall(r"\d+\.\d+", headline):
        assert f"{number} ±" in RESULTS[page] or f"± {number}" in RESULTS[page], number


def test_python_source_savings_are_paired():
    saved = difference("text", "none", "xl-256")
    assert saved.n == 3
    without = mean(losses_of("none")).mean
    exact = mean(losses_of("xl-256")).mean
    assert f"from {without:.3f} to {exact:.3f} bits per byte (−{as_written(saved)})" in HOME
    # Memory only in the last layer.
    saved_in_last_layer = difference("text_heads", "xl-256", "xl-last")
    assert saved_in_last_layer.leaves_out_zero
    assert f"another {as_written(saved_in_last_layer)}" in HOME


# Pairs of arms, the worse one first.
SHIFT = ("last-256", "last-256-shift")
SELECTIVE = ("last-256-shift", "last-128-selective-shift")
# Without expiry, the selective memory costs, so that the newest positions are the better arm.
NEWEST = ("last-128-selective-shift", "last-256-shift")
# Experiments and pairs of a worse and a better arm; how many of the differences, the first ones, are
# significant; and what pages say of them.
SAVED = [
    (["text_shift_python", "text_shift_rfc"], [SHIFT], 2,
     [(HOME, "{} …{} on RFCs"), (LONG_TEXT, "{} …{} on RFCs"), (WHICH_MEMORY, "{} …{} on RFCs")]),
    (["text_recipe"], [("xl-plain", "transformer-xl"), ("compressive-plain", "compressive"),
                       ("compressive", "transformer-xl")], 3,
     [(LONG_TEXT, "saves {} bits per byte for Transformer-XL and {} for the Compressive Transformer"),
      (LONG_TEXT,
        "{1} for the Compressive Transformer. With a shift, the Compressive Transformer is {2} behind")]),
    (["text_selective_python", "text_selective_rfc"], [SELECTIVE], 2,
     [(WHICH_MEMORY, "saves another {} on Python and {} on RFCs"),
      (HOME, "another {} and {}"), (INDEX, "another {} and {}"), (LONG_TEXT, "another {} and {}")]),
    (["text_recipe", "text_recipe_rfc"], [("transformer-xl", "selective")], 1,
     [(LONG_TEXT, "saves another {} on Python, and nothing on RFCs ({})"),
      (WHICH_MEMORY, "{} on Python after 2.7 million tokens, and nothing on RFCs")]),
    (["text_selective_python", "text_selective_rfc"], [("last-256", "last-128-selective")], 1,
     [(LONG_TEXT, "this memory saves {} on Python…difference on RFCs (−{})")]),
    (["text_selective_longer"], [("last-832-shift", "last-416-selective-shift")], 1,
     [(LONG_TEXT, "it saves {} on Python compared with the 832"),
      (WHICH_MEMORY, "kept, it saves {} on Python")]),
    (["text_selective_rfc", "text_selective_python"], [("last-128-slots-shift", "last-256-shift")], 1,
     [(LONG_TEXT, "{} higher than with the 256 newest on RFCs…but not significantly ({})")]),
    (["text_selective_rfc", "text_selective_python"], [("last-128-means-shift", "last-256-shift")], 1,
     [(LONG_TEXT, "means of 4 tokens are no better: +{} on RFCs and +{} (not significant)")]),
    (["text_shift_python", "text_shift_rfc"], [NEWEST], 1,
     [(LONG_TEXT, "{} higher than with the 256 newest…(+{})")]),
]  # fmt: skip


@pytest.mark.parametrize(("experiments", "pairs", "n_significant", "sentences"), SAVED)
def test_savings_are_paired_and_significant_if_so_said(experiments, pairs, n_significant, sentences):
    numbers = []
    for experiment in experiments:
        for worse, better in pairs:
            gain = difference(experiment, worse, better)
            is_said_significant = len(numbers) < n_significant
            assert gain.n == 3
            assert gain.leaves_out_zero == is_said_significant
            assert gain.mean > 0 or not is_said_significant
            numbers.append(as_written(gain))
    for page, sentence in sentences:
        # A page may say more at the place of …
        for part in sentence.format(*numbers).split("…"):
            assert part in page


def test_associative_recall_gains_are_paired():
    arms = ("selective-128-shift", "xl-128-shift-slow", "xl-128-slow")
    answers = [seeds("mqar", arm, "correct") for arm in arms]
    for better, worse in pairwise(answers):
        assert better.keys() == {1, 2, 3}
        assert paired(better, worse).leaves_out_zero
    # The level without association: how many answers of an episode are its most common one.
    _, targets, _ = draw_episode(np.random.default_rng(0), SHORTEST, 16, 64)
    most_common = np.bincount(targets[targets >= 0]).max() / 16
    assert most_common == level_without_association(SHORTEST)
    quoted = [share(mean(correct)) for correct in answers]
    quoted.append(f"{100 * most_common:.1f} %")
    for page in (WHICH_MEMORY, INDEX):
        assert [number for number in quoted if number not in page] == []


def test_two_memories_beat_guessing_without_a_shift():
    level = level_without_association(SHORTEST)
    above = set()
    for arm in ("xl-128-slow", "conv-128", "mean-128", "selective-128-slow"):
        correct = mean(seeds("mqar", arm, "correct"))
        if correct.mean - correct.half_width > level:
            above.add(arm)
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
    for better, worse in pairwise(order):
        gain = paired(seeds("mqar", better, "correct"), seeds("mqar", worse, "correct"))
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
    page = in_one_line(read_file("docs/results/speed.md"))
    low, high = re.search(r"([\d.]+) to ([\d.]+) times as fast as labml-nn", page).groups()
    # README writes 2.9 for 2.90.
    assert f"{low} to {float(high):g} times as fast as labml-nn" in README


def test_the_sentence_on_learning_is_that_of_its_file():
    def measured(measure):
        return seeds("learning", "transformer-xl-shakespeare", measure)[0]

    static = measured("loss (nats)")
    learning = measured("sgd: loss (nats)")
    assert f"`transformer-xl-shakespeare` goes from {static:.3f} to {learning:.3f} nats" in README
    assert measured("sgd: saved (nats)") > measured("sgd: saved, half width (nats)")


def test_the_terminal_in_readme_shows_the_results_of_its_file():
    readme = read_file("README.md")
    results = about("first_comparison")["arms"]
    assert len(results) == 3
    for arm in results:
        bits = seeds("first_comparison", arm["name"], "bits_per_character")[0]
        assert f"\n{arm['label']:<23}      1      {bits:.3f}\n" in readme
