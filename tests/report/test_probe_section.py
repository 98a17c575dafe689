"""What a report says of a probe that was written by hand."""

import pytest

from memformers.report.arms import arms_of
from memformers.report.probe import probe_section, scaled
from memformers.runs.reader import read_runs
from tests.builders import MODELS
from tests.report.fake_runs import changed, fake_run


def difference(mean, half_width=0.01):
    return {"mean": mean, "half_width": half_width, "n": 16}


ZEROED, SWAPPED = "memory zeroed", "memory swapped"
COSTS = {
    "transformer": {},
    "transformer-xl": {ZEROED: difference(0.05), SWAPPED: difference(0.08)},
    "compressive": {
        "slots zeroed": difference(0.02), "slots swapped": difference(0.002),
        ZEROED: difference(0.05), SWAPPED: difference(0.06),
    },
}  # fmt: skip


def ablation_of(costs, more=None, baseline="transformer"):
    """Of models that are changed at these ``costs``: the same for all tokens, and for those of one of two
    bands."""
    loss = dict.fromkeys(costs, 1.5)
    less = {name: difference(-0.02) for name in costs if baseline and name != baseline}
    names = ("name", "tokens", "loss", "less_baseline", "less_untouched")
    groups = [
        dict(zip(names, ("1 – 63", 80, loss, less, costs), strict=True)),
        dict(zip(names, ("64 or more, or never", 0, {}, {}, {}), strict=True)),
    ]
    return {
        "streams": 16, "warm_up": 320, "n_gram": 8, "baseline": baseline, "of_documents": False,
        "overall": groups[0] | {"tokens": 12_345},
        "swapped_less_zeroed": {
            name: {
                part: (more or {}).get((name, part), difference(0.0))
                for part in sorted({control.split()[0] for control in found})
            }
            for name, found in costs.items()
        },
        "by_occurrences": groups, "by_repeat_distance": groups,
    }  # fmt: skip


def section(folder, ablation, models=MODELS, **changes):
    """The section on a probe of ``models``."""
    for name in models:
        fake_run(folder / name, name if name in MODELS else "transformer", 2.4)
        changed(folder / name / "result.json", loss=2.4)  # in bits per character, as what is reported
    mass = {"by_place": [[[0.2, 0.3, 0.5]]], "nearest": [0, 1], "by_distance": [[[0.5, 0.5]]]}
    context = {"recl": 32, "recl_intervals": [32, 64], "gains": [0.1, 0], "gain_intervals": [[0, 0.2]] * 2}
    context = {n: {r: dict.fromkeys(models, value) for r in ("0.1", "1.0")} for n, value in context.items()}
    probe = {
        "checkpoints": dict.fromkeys(models, ""),
        "documents": 0,
        "effective_context": {"step": 32, "positions": 10, **context},
        "attention": dict.fromkeys(models, mass),
        "memory_ablation": ablation,
    }
    return "\n\n".join(probe_section(arms_of(read_runs(folder)), probe | changes, folder))


def test_each_part_has_its_cost_and_an_absent_one_a_dash(tmp_path):
    markdown = section(tmp_path, ablation_of(COSTS))
    assert "12,345 tokens of the held-out text in 16 streams, after the first 320" in markdown
    assert "| Transformer, no memory | 1.500 | – | – | – | – |" in markdown
    assert "| Transformer-XL | 1.500 | – | – | +0.050 ± 0.010 | +0.080 ± 0.010 |" in markdown
    assert "| Compressive Transformer | 1.500 | +0.020 ± 0.010 | *+0.002 ± 0.010* |" in markdown
    assert "| Compressive Transformer, minus Transformer, no memory | −0.020 ± 0.010 | – |" in markdown
    assert "| tokens | 80 | 0 |" in markdown
    space = "\N{NO-BREAK SPACE}"
    assert f"| Transformer-XL | ≤{space}32 (≤{space}32 – 64) | ≤{space}32 (≤{space}32 – 64) |" in markdown


def test_losses_and_their_differences_are_in_the_reports_unit_and_counts_are_as_they_are():
    found = scaled(ablation_of(COSTS), 2.0)
    overall = found["overall"]
    assert (overall["tokens"], overall["loss"]["transformer"]) == (12_345, 3.0)
    assert overall["less_untouched"]["transformer-xl"][SWAPPED] == difference(0.16, 0.02)
    assert found["by_occurrences"][0]["less_baseline"]["compressive"] == difference(-0.04, 0.02)


def test_a_use_is_claimed_where_the_interval_leaves_out_zero(tmp_path):
    more = {
        ("transformer-xl", "memory"): difference(0.03),
        ("compressive", "slots"): difference(-0.022),
        ("compressive", "memory"): difference(0.01, 0.02),
    }
    lines = section(tmp_path, ablation_of(COSTS, more)).splitlines()
    xl, memory, slots = [line for line in lines if line.startswith("- ")]
    assert "Transformer-XL uses the contents of its memory" in xl
    assert "cost +0.080 ± 0.010. That is +0.030 ± 0.010 more than zeros cost" in xl
    assert "no use of the contents of its compressed memory was seen" in slots
    assert "cost +0.002 ± 0.010, and a cost of up to 0.012 is not excluded" in slots
    assert "Zeros cost +0.020 ± 0.010, more than another stream's" in slots
    assert "Compressive Transformer uses the contents of its memory" in memory
    assert "Zeros cost +0.050 ± 0.010; no difference between the two was seen." in memory


def test_a_memory_that_harms_is_said_to_harm(tmp_path):
    costs = {"transformer-xl": {ZEROED: difference(-0.05), SWAPPED: difference(-0.08)}}
    markdown = section(tmp_path, ablation_of(costs, baseline=None), MODELS[1:2])
    assert "Transformer-XL has a lower loss with another stream's memory than with its own" in markdown


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("models", "baseline", "said"),
    [(MODELS, "transformer", ["above, how much", "below, the loss of each arm minus"]),
     (MODELS[2:], None, ["What memory is worth: how much the loss of a trained model rises"]),
     (("transformer", "wide"), "transformer", ["loss of each arm minus that of Transformer, no"])],
)  # fmt: skip
def test_the_figure_has_a_panel_for_costs_and_one_for_differences(models, baseline, said, tmp_path):
    ablation = ablation_of({name: COSTS.get(name, {}) for name in models}, baseline=baseline)
    markdown = section(tmp_path, ablation, models, effective_context=None, attention=None)
    assert all(words in markdown for words in said)
    assert markdown.count("(figures/memory_ablation.png)") == 1
    figure = tmp_path / "figures" / "memory_ablation.png"
    assert figure.stat().st_size > 10_000


def test_a_model_without_memory_alone_has_no_figure(tmp_path):
    markdown = section(tmp_path, ablation_of({"transformer": {}}, baseline=None), MODELS[:1])
    assert "memory_ablation.png" not in markdown
    assert "| Transformer, no memory | 1.500 | – | – | – | – |" in markdown


def test_a_difference_without_an_interval_claims_none(tmp_path):
    ablation = ablation_of({name: COSTS[name] for name in MODELS[:2]})
    ablation["by_repeat_distance"][0]["less_baseline"] = {"transformer-xl": difference(-0.5, None)}
    markdown = section(tmp_path, ablation, MODELS[:2])
    assert "| Transformer-XL, minus Transformer, no memory | −0.500 | – |" in markdown


def test_what_a_text_or_its_documents_are_too_short_for_is_said(tmp_path):
    markdown = section(tmp_path, None, documents=3, effective_context=None, attention=None)
    assert "It was not measured: the held-out text is too short" in markdown
    assert "Of 3 held-out documents, each is read" in markdown
    assert "too short to measure how much context helps and how attention" in markdown


def test_of_documents_each_is_a_stream(tmp_path):
    markdown = section(tmp_path, ablation_of(COSTS) | {"of_documents": True}, documents=3)
    assert "another document" in markdown
    assert "16 documents, each a stream" in markdown
