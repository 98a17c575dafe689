"""Figures: what is drawn, and that it looks alike everywhere."""

import pytest
from matplotlib.figure import Figure

from memformers.common.intervals import mean_of
from memformers.report.arms import POINTS, arms_of
from memformers.report.curves import by_octave, octave_means
from memformers.report.page import inline_svg
from memformers.report.plotting import DARK, LOOKS, PALETTE, Series, draw_lines, looks_of
from memformers.report.probe import effective_length
from memformers.report.probe_figures import LINES, layer_look
from memformers.runs.reader import read_runs
from tests.report.fake_runs import XL, fake_comparison, less, markdown_of


@pytest.mark.drawn
def test_each_figure_is_there_as_png_and_svg_and_the_same_data_give_the_same_files(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": XL})
    made = []
    for _ in range(2):
        markdown_of(tmp_path)
        made.append({path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()})
    assert made[0] == made[1]
    names = {"validation_tokens", "differences", "validation_time", "reconstruction_loss",
             "tokens_per_second", "loss_by_position"}  # fmt: skip
    assert made[0].keys() == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    svg = inline_svg(made[0]["validation_tokens.svg"].decode(), "<title>")
    assert f"var(--c{LOOKS['compressive']['color'][1:].lower()}, " in svg
    assert 'aria-label="&lt;title&gt;"' in svg


@pytest.mark.parametrize(("points", "lines"), [(2, 0), (3, 1)])
def test_fewer_than_three_points_are_not_joined_by_a_line(points, lines):
    axes = Figure().add_subplot()
    curve = [(float(x), mean_of([1.0, 2.0 + x])) for x in range(points)]
    draw_lines(axes, [Series("arm", curve, LOOKS["compressive"])])
    assert sum(line.get_linestyle() not in ("None", "none") for line in axes.lines) == lines


def test_curves_are_means_over_seeds_and_their_differences_of_the_same_seed(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": less(-0.1, -0.1, -0.4)})
    base, slots = arms_of(read_runs(tmp_path))
    curve = base.curve("bits_per_character.valid")
    assert [x for x, _ in curve] == [100.0 * i for i in range(1, 11)]
    for i, (_, mean) in enumerate(curve, 1):
        wanted = mean_of([bits + 1 / i for bits in XL])
        assert (mean.mean, mean.half_width, mean.n) == (
            pytest.approx(wanted.mean), pytest.approx(wanted.half_width), 3,
        )  # fmt: skip
    assert [x for x, _ in base.curve("bits_per_character.valid", "seconds")] == list(range(1, 11))
    for _, mean in slots.curve_minus(base, "bits_per_character.valid"):
        assert mean.mean == pytest.approx(-0.2)
    assert base.curve("unknown") == slots.curve_minus(base, "unknown") == []


def test_a_long_curve_is_thinned_alike_for_all_seeds(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": [2.4, 2.5]})
    for name, length in (("transformer-xl", 20_000), ("transformer-xl-seed1", 10_010)):
        with open(tmp_path / name / "metrics.jsonl", "w") as file:
            file.writelines(f'{{"tokens": {i}, "a": {i % 40}}}\n' for i in range(1, length + 1))
        config = tmp_path / name / "config.json"
        config.write_text(config.read_text().replace('"tokens": 16384', '"tokens": 20000'))
    [arm] = arms_of(read_runs(tmp_path))
    for run in arm.runs:
        run.config["tokens"] = 20_000
    whole, half = arm.curves("a").values()
    assert len(whole) == POINTS
    assert [*half][:-1] == [*whole][:250]
    assert whole[40.0] == (40.0, pytest.approx(sum(i % 40 for i in range(1, 41)) / 40))


def test_the_loss_by_position_is_of_octaves_and_its_difference_is_of_the_same_seed(tmp_path):
    result = {"loss_by_position": [5.0, 4.0, 3.0, 2.0, 1.0], "loss": 3.0, "bits_per_character": 3.0}
    assert octave_means(result) == {(1, 1): 5.0, (2, 2): 4.0, (3, 4): 2.5, (5, 5): 1.0}
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": less(-0.1, -0.1, -0.4)})
    base, slots = arms_of(read_runs(tmp_path))
    found = by_octave(slots, base)
    assert [*found] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16)]
    assert [mean.mean for mean in found.values()] == [pytest.approx(-0.2)] * 5
    assert "The lower panel has the loss minus that of Transformer-XL" in markdown_of(tmp_path)
    fake_comparison(tmp_path / "one", {"transformer-xl": [2.4], "compressive": [2.3]})
    assert "The lower panel has" not in markdown_of(tmp_path / "one")


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


def test_an_arm_has_one_look_and_each_colour_has_a_dark_one():
    assert looks_of(["mean", "other"])["other"] == PALETTE[3], "sky is taken"
    colours = [look["color"].lower() for look in PALETTE]
    assert len({DARK[colour] for colour in colours}) == len(colours)
    layers = [layer_look(i) for i in range(len(PALETTE) * len(LINES))]
    assert len({(look["color"], look["linestyle"]) for look in layers}) == len(layers)
