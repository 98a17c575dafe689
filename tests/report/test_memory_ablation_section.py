"""What a report says that memory is worth, of probes that were written by hand."""

import pytest

from memformers.common.files import write_json
from memformers.report.arms import LABELS
from memformers.report.curves import LOOKS
from memformers.report.document import write_report
from memformers.report.memory_ablation_figure import save_memory_ablation
from memformers.report.memory_ablation_section import memory_ablation_section
from tests.report.fake_runs import fake_run


def difference(mean, half_width=0.01):
    return {"mean": mean, "half_width": half_width}


def group(name, tokens, loss, less_baseline, less_untouched):
    return {
        "name": name, "tokens": tokens, "loss": loss, "less_baseline": less_baseline,
        "less_untouched": less_untouched,
    }  # fmt: skip


def worth_of(costs, more=None, baseline="transformer"):
    """Of models that are changed at these ``costs``: the same for all tokens, and for those of one of two
    bands."""
    loss = dict.fromkeys(costs, 1.5)
    less = {name: difference(-0.02) for name in costs if baseline and name != baseline}
    parts = {name: {control.split()[0] for control in found} for name, found in costs.items()}
    groups = [
        group("1 – 63", 80, loss, less, costs),
        group("64 or more, or never", 0, {}, {}, {}),
    ]
    return {
        "streams": 16, "warm_up": 320, "n_gram": 8, "baseline": baseline,
        "overall": group("all", 12_345, loss, less, costs),
        "swapped_less_zeroed": {
            name: {part: (more or {}).get((name, part), difference(0.0)) for part in sorted(found)}
            for name, found in parts.items()
        },
        "by_occurrences": groups, "by_repeat_distance": groups,
    }  # fmt: skip


def probed(folder, models, **memory_ablation):
    """The report of ``models`` with a probe of this or an older version, and no other figures than its."""
    for model in models:
        fake_run(folder / model, model, 2.4)
        (folder / model / "metrics.jsonl").write_text("")
    mass = {"by_place": [[[0.2, 0.3, 0.5]]], "nearest": [0, 1], "by_distance": [[[0.5, 0.5]]]}
    gains = {r: {model: [0.1, 0.0] for model in models} for r in ("0.1", "1.0")}
    recl = {r: dict.fromkeys(models, 32) for r in ("0.1", "1.0")}
    probe = {
        "checkpoints": dict.fromkeys(models, ""),
        "effective_context": {"step": 32, "positions": 10, "recl": recl, "gains": gains},
        "attention": dict.fromkeys(models, mass),
        **memory_ablation,
    }
    write_json(folder / "probe.json", probe)
    return write_report(folder).with_suffix(".md").read_text(encoding="utf-8")


def section(memory_ablation, folder, figure=None):
    """The part of a report that is about ``memory_ablation``."""
    models = memory_ablation["overall"]["loss"] if memory_ablation else ()
    return "\n\n".join(
        memory_ablation_section(memory_ablation, {name: LABELS[name] for name in models}, figure, folder)
    )


MODELS = ("transformer", "transformer-xl", "compressive")
ZEROED, SWAPPED = "memory zeroed", "memory swapped"
COSTS = {
    "transformer": {},
    "transformer-xl": {ZEROED: difference(0.05), SWAPPED: difference(0.08)},
    "compressive": {
        "slots zeroed": difference(0.02), "slots swapped": difference(0.002),
        ZEROED: difference(0.05), SWAPPED: difference(0.06),
    },
}  # fmt: skip


def test_each_part_has_its_cost_and_an_absent_one_a_dash(tmp_path):
    markdown = section(worth_of(COSTS), tmp_path)
    assert "12,345 tokens of the held-out text in 16 streams, after the first 320" in markdown
    assert "| Transformer, no memory | 1.5000 | – | – | – | – |" in markdown
    assert "| Transformer-XL | 1.5000 | – | – | +0.0500 ± 0.0100 | +0.0800 ± 0.0100 |" in markdown
    assert "| Compressive Transformer | 1.5000 | +0.0200 ± 0.0100 | +0.0020 ± 0.0100 |" in markdown
    assert "| Compressive Transformer, minus Transformer, no memory | −0.0200 ± 0.0100 | – |" in markdown
    assert "| tokens | 80 | 0 |" in markdown


def test_a_use_is_claimed_where_the_interval_leaves_out_zero(tmp_path):
    more = {
        ("transformer-xl", "memory"): difference(0.03),
        ("compressive", "slots"): difference(-0.022),
        ("compressive", "memory"): difference(0.01, 0.02),
    }
    markdown = section(worth_of(COSTS, more), tmp_path)
    assert (
        "- Transformer-XL uses the contents of its memory: those of another stream cost +0.0800 ± 0.0100. "
        "That is +0.0300 ± 0.0100 more than zeros cost" in markdown
    )
    assert (
        "- Compressive Transformer: no use of the contents of its compressed memory was seen. Those of "
        "another stream cost +0.0020 ± 0.0100, and a cost of up to 0.0120 is not excluded. Zeros cost "
        "+0.0200 ± 0.0100, more than another stream's" in markdown
    )
    assert (
        "- Compressive Transformer uses the contents of its memory: those of another stream cost +0.0600 ± "
        "0.0100. Zeros cost +0.0500 ± 0.0100; no difference between the two was seen." in markdown
    )


def test_a_memory_that_harms_is_said_to_harm(tmp_path):
    costs = {"transformer-xl": {ZEROED: difference(-0.05), SWAPPED: difference(-0.08)}}
    markdown = section(worth_of(costs, baseline=None), tmp_path)
    assert "Transformer-XL has a lower loss with another stream's memory than with its own" in markdown


@pytest.mark.parametrize(
    ("models", "baseline", "said"),
    [
        (MODELS, "transformer", ["above, how much", "below, the loss of each arm minus"]),
        (MODELS[2:], None, ["What memory is worth: how much the loss of a trained model rises"]),
        (
            ("transformer", "wide"),
            "transformer",
            ["worth: the loss of each arm minus that of Transformer, no"],
        ),
    ],
)
def test_the_figure_has_a_panel_for_costs_and_one_for_differences(models, baseline, said, tmp_path):
    memory_ablation = worth_of({name: COSTS.get(name, {}) for name in models}, baseline=baseline)
    labels = {name: LABELS.get(name, name) for name in models}
    looks = {name: LOOKS.get(name, LOOKS["compressive"]) for name in models}
    figure = save_memory_ablation(memory_ablation, labels, looks, tmp_path)["memory_ablation"]
    assert figure.stat().st_size > 10_000
    markdown = "\n\n".join(memory_ablation_section(memory_ablation, labels, figure, tmp_path))
    assert all(words in markdown for words in said)
    assert markdown.count("(memory_ablation.png)") == 1
    assert figure.with_suffix(".svg").is_file()
    lines = figure.with_suffix(".csv").read_text().splitlines()
    marks = sum(map(len, (COSTS.get(name, {}) for name in models))) + (len(models) - 1 if baseline else 0)
    assert len(lines) == 1 + marks


def test_a_model_without_memory_alone_has_no_figure(tmp_path):
    memory_ablation = worth_of({"transformer": {}}, baseline=None)
    assert save_memory_ablation(memory_ablation, LABELS, LOOKS, tmp_path) == {}
    assert "| Transformer, no memory | 1.5000 | – | – | – | – |" in section(memory_ablation, tmp_path)


def test_a_difference_without_an_interval_claims_none(tmp_path):
    costs = {"transformer": {}, "transformer-xl": {ZEROED: difference(0.05), SWAPPED: difference(0.08)}}
    memory_ablation = worth_of(costs)
    memory_ablation["by_repeat_distance"][0]["less_baseline"] = {"transformer-xl": difference(-0.5, None)}
    markdown = section(memory_ablation, tmp_path)
    assert "| Transformer-XL, minus Transformer, no memory | −0.5000 | – |" in markdown


def test_a_text_that_was_too_short_is_said_to_be(tmp_path):
    assert "It was not measured: the held-out text is too short" in section(None, tmp_path)


def test_a_probe_of_an_older_version_makes_the_report_it_made(tmp_path):
    markdown = probed(tmp_path, MODELS[:2])
    assert "## What context and memory are worth" in markdown
    assert "| Transformer-XL | ≤\N{NO-BREAK SPACE}32 | ≤\N{NO-BREAK SPACE}32 |" in markdown
    assert "### What each part" not in markdown
    assert not (tmp_path / "figures" / "memory_ablation.png").exists()
