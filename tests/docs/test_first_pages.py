"""Each number that README and the home page claim, against the file of results that it is from."""

import re

import pytest

from docs.building.results import mean, paired, seeds, stored
from docs.building.source import ROOT

README, HOME = ((ROOT / path).read_text(encoding="utf-8") for path in ("README.md", "docs/index.md"))
SHAKESPEARE, BITS = "tiny_shakespeare", "bits per character"


def python_source(arm):
    return seeds("text", arm, "bits per byte, 6,400,000 tokens")


def correct(experiment, arm, band):
    found = mean(seeds(experiment, arm, f"correct, {band}"))
    return f"{100 * found.mean:.1f} ± {100 * found.half_width:.1f} %"


def difference(arm):
    found = stored(SHAKESPEARE, arm, f"{BITS} minus transformer-xl")
    return f"{found.mean:+.3f} ± {found.half_width:.3f}".replace("-", "−")


def test_the_table_of_tiny_shakespeare_is_that_of_five_seeds():
    none, exact, slots = (
        stored(SHAKESPEARE, arm, BITS) for arm in ("transformer", "transformer-xl", "compressive")
    )
    assert {none.n, exact.n, slots.n} == {5}
    assert f"| No memory | {none.mean:.3f} | {difference('transformer')} |" in README
    assert f"| Transformer-XL | {exact.mean:.3f} | |" in README
    assert f"| Compressive Transformer | {slots.mean:.3f} | {difference('compressive')} |" in README


def test_what_memory_saves_of_python_source_is_a_paired_difference():
    none, saved = python_source("none"), paired(python_source("none"), python_source("xl-256"))
    assert saved.n == 3
    assert f"saves {saved.mean:.3f} ± {saved.half_width:.3f} of {mean(none).mean:.3f} bits per byte" in README
    assert f"saves {saved.mean:.3f} of {mean(none).mean:.3f} bits per byte" in HOME


def test_what_one_long_layer_saves_is_a_paired_difference():
    base, last = (
        seeds("text_heads", arm, "bits per byte, 6,400,000 tokens") for arm in ("xl-256", "xl-last")
    )
    saved = paired(base, last)
    assert saved.leaves_out_zero
    said = f"{saved.mean:.3f} ± {saved.half_width:.3f} more"
    assert said in README
    assert said in HOME


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
    assert f"{low} to {float(high):g} times as many tokens per second as labml-nn" in README


def test_the_readme_is_short():
    assert len(README.split()) <= 750
