"""Each number that README and the home page claim, against the file of results that it is from; and each
sentence that compares memories, against every bold row of the tables of results."""

import re
from itertools import pairwise

import pytest

from docs.building.markdown import BLOCK
from docs.building.results import ROOT, mean, paired, seeds, verdicts

README, HOME = (
    " ".join((ROOT / path).read_text(encoding="utf-8").split()) for path in ("README.md", "docs/index.md")
)
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
}
"""What each bold row that compares slots with positions on a whole text says of slots."""


def python_source(arm, experiment="text"):
    return seeds(experiment, arm, "bits per byte, 6,400,000 tokens")


def correct(experiment, arm, band):
    found = mean(seeds(experiment, arm, f"correct, {band}"))
    return f"{100 * found.mean:.1f} ± {100 * found.half_width:.1f} %"


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


def comparisons_on_text():
    """The bits that slots save against the same number of vectors in the same layers, paired over seeds."""
    chart = [verdict.gain for verdict in verdicts() if verdict.panel.startswith("Text")]
    short = paired(*(seeds("ablation", arm, "bits per character") for arm in ("transformer-xl", "conv")))
    measures = ("bits per character, tiny-shakespeare", "bits per byte, python-source")
    models = ("transformer-xl", "compressive")
    return [*chart, short, *(paired(*(seeds("memories", arm, m) for arm in models)) for m in measures)]


def test_the_sentence_about_slots_on_text_counts_every_comparison():
    found = comparisons_on_text()
    better = sum(gain.mean > gain.half_width for gain in found)
    worse = sum(gain.mean < -gain.half_width for gain in found)
    said = f"slots won {better} of {len(found)} comparisons (after short training) and lost {worse};"
    for page in (README, HOME, " ".join(RESULTS["index"].split())):
        assert f"{said} {len(found) - better - worse} show no significant difference." in page
    assert [*BOLD_ON_TEXT.values()].count("better") == better
    assert [*BOLD_ON_TEXT.values()].count("worse") == worse


def test_every_bold_row_that_compares_slots_on_a_text_is_in_that_sentence():
    bold = {
        (page, cells[0])
        for page in RESULTS
        for headings, _, cells in table_rows(page)
        if "slots" in cells[0] or "Compressive" in cells[0] or (page, cells[0]) in BOLD_ON_TEXT
        for column, cell in enumerate(cells)
        if cell.startswith("**") and "bits per" in " ".join(headings[max(0, column - 1) : column])
    }
    assert bold == BOLD_ON_TEXT.keys()


def test_exact_memory_wins_within_the_reach_of_all_layers_and_slots_beyond():
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


def test_the_readme_is_short_and_has_the_words_that_people_search_for():
    searched = ["recurrence over segments", "memory carried across batches", "truncated backpropagation"]
    searched += ["reset per row", "KV cache", "long context", "drop-in for `nn.GRU` and `nn.LSTM`"]
    assert [words for words in searched if words not in README] == []
    assert len(README.split()) <= 750


@pytest.mark.parametrize("page", sorted(RESULTS.keys() - {"commands", "index", "speed"}))
def test_a_headline_claims_nothing_from_one_seed_and_its_numbers_have_intervals(page):
    headline = re.search(r"\n\n\*\*(.+?)\*\*", RESULTS[page], re.DOTALL)[1]
    assert "one seed" not in headline
    for number in re.findall(r"\d+\.\d+", headline):
        assert f"{number} ±" in RESULTS[page] or f"± {number}" in RESULTS[page], number


def test_what_memory_and_one_long_layer_save_of_python_source_are_paired_differences():
    none, exact = python_source("none"), python_source("xl-256")
    saved = paired(none, exact)
    more = paired(*(python_source(arm, "text_heads") for arm in ("xl-256", "xl-last")))
    assert (saved.n, more.leaves_out_zero) == (3, True)
    gain = f"(−{saved.mean:.3f} ± {saved.half_width:.3f})"
    for page, long_layer in ((README, "files: −"), (HOME, "another ")):
        assert f"from {mean(none).mean:.3f} to {mean(exact).mean:.3f} bits per byte {gain}" in page
        assert f"{long_layer}{more.mean:.3f} ± {more.half_width:.3f}" in page


def test_what_a_token_shift_saves_is_a_paired_difference_on_two_texts():
    gains = []
    for text in ("python", "rfc"):
        arms = (python_source(arm, f"text_shift_{text}") for arm in ("last-256-shift", "last-256"))
        gains.append(paired(*arms))
        assert (gains[-1].n, gains[-1].leaves_out_zero) == (3, True)
    code, prose = (f"{-gain.mean:.3f} ± {gain.half_width:.3f}" for gain in gains)
    shift = "[token shift](docs/how-to/train.md#token-shift) (default)"
    assert f"{shift} | −{code} on Python, −{prose} on RFCs" in README
    which = " ".join((ROOT / "docs/which-memory.md").read_text(encoding="utf-8").split())
    for page in (HOME, " ".join(RESULTS["long-text"].split()), which):
        assert f"{code} " in page
        assert f"{prose} on RFCs" in page


def test_what_a_token_shift_saves_with_the_settings_of_compare_is_a_paired_difference():
    pairs = (
        ("xl-plain", "transformer-xl"),
        ("compressive-plain", "compressive"),
        ("compressive", "transformer-xl"),
    )
    gains = [paired(*(seeds("text_recipe", arm, "bits per byte") for arm in pair)) for pair in pairs]
    assert all(gain.mean > 0 and gain.leaves_out_zero for gain in gains)
    exact, slots, behind = (f"{gain.mean:.3f} ± {gain.half_width:.3f}" for gain in gains)
    said = f"saves {exact} bits per byte for Transformer-XL and {slots} for the Compressive Transformer"
    assert f"{said}, which is {behind} behind with it" in " ".join(RESULTS["long-text"].split())


def test_what_a_selective_memory_saves_is_a_paired_difference_to_as_many_newest_positions():
    of, gains = ("last-256-shift", "last-128-selective-shift"), []
    for text in ("python", "rfc"):
        gains.append(paired(*(python_source(arm, f"text_selective_{text}") for arm in of)))
        assert (gains[-1].n, gains[-1].leaves_out_zero, gains[-1].mean > 0) == (3, True, True)
    code, prose = (f"{gain.mean:.3f} ± {gain.half_width:.3f}" for gain in gains)
    assert f"[`--model selective`](docs/which-memory.md) | another −{code} and −{prose} |" in README
    which = " ".join((ROOT / "docs/which-memory.md").read_text(encoding="utf-8").split())
    assert f"saves another {code} on Python and {prose} on RFCs" in which
    for page in (HOME, RESULTS["index"], RESULTS["long-text"]):
        assert f"another {code} and {prose}" in " ".join(page.split())


def test_what_a_selective_memory_saves_with_the_settings_of_compare_is_significant_on_one_text():
    of = ("transformer-xl", "selective")
    code, prose = (
        paired(*(seeds(name, arm, "bits per byte") for arm in of))
        for name in ("text_recipe", "text_recipe_rfc")
    )
    assert (code.n, prose.n, code.leaves_out_zero, prose.leaves_out_zero) == (3, 3, True, False)
    saved = f"{code.mean:.3f} ± {code.half_width:.3f} on Python"
    found = f"saves another {saved}, and nothing on RFCs ({prose.mean:.3f} ± {prose.half_width:.3f})"
    assert found in " ".join(RESULTS["long-text"].split())
    which = " ".join((ROOT / "docs/which-memory.md").read_text(encoding="utf-8").split())
    assert f"{saved} after 2.7 million tokens, and nothing on RFCs" in which


def test_what_a_selective_memory_saves_without_a_token_shift_is_significant_on_one_text():
    of = ("last-256", "last-128-selective")
    code, prose = (
        paired(*(python_source(arm, f"text_selective_{text}") for arm in of)) for text in ("python", "rfc")
    )
    assert (code.n, code.leaves_out_zero, prose.leaves_out_zero) == (3, True, False)
    page = " ".join(RESULTS["long-text"].split())
    assert f"this memory saves {code.mean:.3f} ± {code.half_width:.3f} on Python" in page
    assert f"difference on RFCs (−{prose.mean:.3f} ± {prose.half_width:.3f})" in page


def test_slots_in_the_last_layer_are_worse_than_as_many_newest_positions_and_significantly_on_one_text():
    of = ("last-128-slots-shift", "last-256-shift")
    code, prose = (
        paired(*(python_source(arm, f"text_selective_{text}") for arm in of)) for text in ("python", "rfc")
    )
    assert (code.n, prose.n, code.leaves_out_zero, prose.leaves_out_zero) == (3, 3, False, True)
    page = " ".join(RESULTS["long-text"].split())
    assert f"the loss is {prose.mean:.3f} ± {prose.half_width:.3f} higher than with the 256 newest" in page
    assert f"by {code.mean:.3f} ± {code.half_width:.3f}, which is not significant" in page


def test_without_a_limit_a_selective_memory_costs_what_the_pages_say():
    of = ("last-128-selective-shift", "last-256-shift")
    code, prose = (
        paired(*(python_source(arm, f"text_shift_{text}") for arm in of)) for text in ("python", "rfc")
    )
    assert (code.leaves_out_zero, prose.leaves_out_zero) == (True, False)
    page = " ".join(RESULTS["long-text"].split())
    assert f"{code.mean:.3f} ± {code.half_width:.3f} higher than with the 256 newest" in page
    assert f"({prose.mean:+.3f} ± {prose.half_width:.3f})" in page


def test_what_selecting_and_a_token_shift_gain_in_associative_recall_are_paired_differences():
    of = ("selective-128-shift", "xl-128-shift-slow", "xl-128-slow")
    found = [seeds("mqar", arm, "correct") for arm in of]
    for better, worse in pairwise(found):
        assert (better.keys(), paired(better, worse).leaves_out_zero) == ({1, 2, 3}, True)
    kept, exact, plain = (
        f"{100 * share.mean:.1f} ± {100 * share.half_width:.1f} %" for share in map(mean, found)
    )
    said = f"{kept} correct, Transformer-XL {exact}, without token shift {plain} |"
    assert f"associative recall | `--model selective` | {said}" in README
    for page in (" ".join((ROOT / "docs/which-memory.md").read_text().split()), RESULTS["index"]):
        assert [share for share in (kept, exact, plain) if share not in page] == []


@pytest.mark.parametrize(
    ("experiment", "band"), [("recall_three_layers", "192 – 384"), ("recall_far", "512 – 2048")]
)
def test_the_answers_of_both_models_are_those_of_the_experiment(experiment, band):
    for arm in ("transformer-xl", "compressive"):
        assert (share := correct(experiment, arm, band)) in README
        assert share in HOME


def test_the_speed_is_that_of_its_page():
    page = (ROOT / "docs/results/speed.md").read_text(encoding="utf-8")
    low, high = re.search(r"([\d.]+) to ([\d.]+) times as fast as labml-nn", page.replace("\n", " ")).groups()
    assert f"{low} to {float(high):g} times as fast as labml-nn" in README
