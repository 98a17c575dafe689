"""Each number that README and the home page claim, against the file of results that it is from."""

import re

from docs.building.results import ROOT, mean, paired, seeds, stored

README, HOME, SPEED = (
    (ROOT / path).read_text(encoding="utf-8")
    for path in ("README.md", "docs/index.md", "docs/results/speed.md")
)


def text_loss(experiment, arm):
    return seeds(experiment, arm, "bits per byte, 6,400,000 tokens")


def test_the_table_of_tiny_shakespeare_is_that_of_five_seeds():
    for arm, shown in {
        "transformer": "No memory",
        "transformer-xl": "Transformer-XL",
        "compressive": "Compressive Transformer",
    }.items():
        loss, less = (
            stored("tiny_shakespeare", arm, f"bits per character{minus}")
            for minus in ("", " minus transformer-xl")
        )
        assert loss.n == 5
        difference = f"{less.mean:+.3f} ± {less.half_width:.3f} ".replace("-", "−") if less else ""
        assert f"| {shown} | {loss.mean:.3f} | {difference}|" in README


def test_what_memory_saves_of_python_source_is_a_paired_difference():
    none = text_loss("text", "none")
    saved, all_of_it = paired(none, text_loss("text", "xl-256")), f"of {mean(none).mean:.3f} bits per byte"
    assert saved.n == 3
    assert f"saves {saved.mean:.3f} ± {saved.half_width:.3f} {all_of_it}" in README
    assert f"saves {saved.mean:.3f} {all_of_it}" in HOME


def test_what_one_long_layer_saves_is_a_paired_difference():
    saved = paired(text_loss("text_heads", "xl-256"), text_loss("text_heads", "xl-last"))
    assert saved.leaves_out_zero
    for page in (README, HOME):
        assert f"{saved.mean:.3f} ± {saved.half_width:.3f} more" in page


def test_the_answers_of_both_models_are_those_of_the_experiments():
    for experiment, band in (("recall_three_layers", "192 – 384"), ("recall_far", "512 – 2048")):
        for arm in ("transformer-xl", "compressive"):
            right = mean(seeds(experiment, arm, f"correct, {band}"))
            share = f"{100 * right.mean:.1f} ± {100 * right.half_width:.1f} %"
            assert share in README
            assert share in HOME


def test_the_speed_is_that_of_its_page():
    found = re.search(r"([\d.]+) to ([\d.]+) times as fast as labml-nn", SPEED.replace("\n", " "))
    low, high = found.groups()
    assert f"{low} to {float(high):g} times as many tokens per second as labml-nn" in README


def test_the_readme_is_short():
    assert len(README.split()) <= 750
