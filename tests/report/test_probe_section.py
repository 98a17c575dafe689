"""What a report says of a probe that was written by hand."""

import pytest

from memformers.report.arms import arms_of
from memformers.report.probe import effective_length, probe_section
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
MORE = {
    ("transformer-xl", "memory"): difference(0.03),
    ("compressive", "slots"): difference(-0.022),
    ("compressive", "memory"): difference(0.01, 0.02),
}


def ablation_of(costs, baseline="transformer", less_width=0.01):
    """Of models that are changed at these ``costs``: the same for all tokens, and for those of one of two
    bands."""
    loss = dict.fromkeys(costs, 1.5)
    less = {name: difference(-0.02, less_width) for name in costs if baseline and name != baseline}
    group = {"name": "1 – 63", "tokens": 80, "loss": loss, "less_baseline": less, "less_untouched": costs}
    empty = {name: {} for name in ("loss", "less_baseline", "less_untouched")}
    groups = [group, {"name": "64 or more, or never", "tokens": 0} | empty]
    more = {
        name: {part: MORE[name, part] for part in ("slots", "memory") if f"{part} zeroed" in found}
        for name, found in costs.items()
    }
    return {
        "streams": 16, "warm_up": 320, "n_gram": 8, "baseline": baseline, "of_documents": False,
        "overall": group | {"tokens": 12_345}, "swapped_less_zeroed": more,
        "by_occurrences": groups, "by_repeat_distance": groups,
    }  # fmt: skip


def section(folder, ablation, models=MODELS, scale=1.0, **changes):
    """The section of a report on a probe of ``models``. One nat per token of their text is ``scale`` bits per
    character."""
    for name in models:
        fake_run(folder / name, name if name in MODELS else "transformer", 2.4)
        changed(folder / name / "result.json", loss=2.4 / scale)
    mass = {"by_place": [[[0.2, 0.3, 0.5]]], "nearest": [0, 1], "by_distance": [[[0.5, 0.5]]]}
    context = {"recl": 32, "recl_intervals": [32, 64], "gains": [0.1, 0], "gain_intervals": [[0, 0.2]] * 2}
    context = {n: {r: dict.fromkeys(models, value) for r in ("0.1", "1.0")} for n, value in context.items()}
    probe = {
        "checkpoints": dict.fromkeys(models, ""), "documents": 0, "memory_ablation": ablation,
        "effective_context": {"step": 32, "positions": 10, **context},
        "attention": dict.fromkeys(models, mass),
    }  # fmt: skip
    return "\n\n".join(probe_section(arms_of(read_runs(folder)), probe | changes, folder))


@pytest.mark.parametrize("scale", [1, 2])
def test_each_part_has_its_cost_in_bits_and_an_absent_one_a_dash(scale, tmp_path):
    def bits(nats):
        return f"{scale * nats:.3f}"

    markdown = section(tmp_path, ablation_of(COSTS), scale=scale)
    half, short = bits(0.01), "≤\N{NO-BREAK SPACE}32"
    said = [
        "12,345 tokens", "16 streams", "the first 320",
        f"| No memory | {bits(1.5)} | – | – | – | – |",
        f"| Transformer-XL | {bits(1.5)} | – | – | +{bits(0.05)} ± {half} | +{bits(0.08)} ± {half} |",
        f"| Compressive Transformer | {bits(1.5)} | +{bits(0.02)} ± {half} | *+{bits(0.002)} ± {half}* |",
        f"| Compressive Transformer, minus No memory | −{bits(0.02)} ± {half} | – |",
        "| tokens | 80 | 0 |",
        f"| Transformer-XL | {short} ({short} – 64) | {short} ({short} – 64) |",
    ]  # fmt: skip
    assert [words for words in said if words not in markdown] == []


def test_a_use_is_claimed_where_the_interval_leaves_out_zero_and_a_harm_too(tmp_path):
    lines = section(tmp_path / "uses", ablation_of(COSTS, less_width=None)).splitlines()
    said = [
        ("Transformer-XL uses", "+0.080 ± 0.010", "+0.030 ± 0.010 more than zeros"),
        ("no use", "+0.002 ± 0.010", "up to 0.012", "Zeros cost +0.020 ± 0.010, more"),
        ("Compressive Transformer uses", "Zeros cost +0.050 ± 0.010; no difference"),
    ]
    for line, parts in zip([line for line in lines if line.startswith("- ")], said, strict=True):
        assert [part for part in parts if part not in line] == []
    assert "| Transformer-XL, minus No memory | −0.020 | – |" in "\n".join(lines)
    costs = {"transformer-xl": {ZEROED: difference(-0.05), SWAPPED: difference(-0.08)}}
    assert "has a lower loss" in section(tmp_path / "harms", ablation_of(costs, baseline=None), MODELS[1:2])


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("models", "baseline", "said"),
    [(MODELS, "transformer", "below, the loss of each model minus"),
     (MODELS[2:], None, "How much memory helps: how much the loss of a trained model rises"),
     (("transformer", "wide"), "transformer", "loss of each model minus that of No memory"),
     (MODELS[:1], None, "")],
)  # fmt: skip
def test_the_figure_has_a_panel_for_costs_and_one_for_differences(models, baseline, said, tmp_path):
    ablation = ablation_of({name: COSTS.get(name, {}) for name in models}, baseline)
    markdown = section(tmp_path, ablation, models, effective_context=None, attention=None)
    assert said in markdown
    assert markdown.count("(figures/memory_ablation.svg)") == bool(said)
    figure = tmp_path / "figures" / "memory_ablation.svg"
    assert not said or figure.stat().st_size > 10_000


def test_of_documents_each_is_a_stream_and_what_they_are_too_short_for_is_said(tmp_path):
    for ablation, said in (
        (None, ["held-out text is too short"]),
        (ablation_of(COSTS) | {"of_documents": True}, ["another document", "16 documents, each a stream"]),
    ):
        folder = tmp_path / str(len(said))
        markdown = section(folder, ablation, documents=3, effective_context=None, attention=None)
        said += ["Of 3 held-out documents", "too short to measure how much context helps and how attention"]
        assert [words for words in said if words not in markdown] == []


@pytest.mark.parametrize(
    ("length", "interval", "said"),
    [(96, (96, None), "96 (96 – over 96)"),
     (64, (32, None), "64 (≤\N{NO-BREAK SPACE}32 – over 96)"),
     (64, (64, 64), "64 (64)")],
)  # fmt: skip
def test_an_effective_context_at_the_end_of_what_was_tried_is_said_to_be(length, interval, said):
    found = {"gains": [0.2, 0.05, 0.0], "recl": length, "recl_intervals": interval}
    context = {"step": 32} | {name: {"1.0": {"a": of_a}} for name, of_a in found.items()}
    assert effective_length(context, "1.0", "a") == said
