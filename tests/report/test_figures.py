"""Figures: what is drawn, and that it looks alike everywhere."""

from dataclasses import replace

import pytest
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.figure import Figure

from memformers.common.intervals import mean_of
from memformers.report import plotting
from memformers.report.arms import BITS, POINTS, arms_of
from memformers.report.plotting import (
    BESIDE,
    MAX_DRAWN,
    PALETTE,
    Series,
    best_arms,
    by_octave,
    draw_lines,
    line_styles,
)
from memformers.report.rendering import DARK
from memformers.runs.reader import read_runs
from tests.report.fake_runs import XL, changed, fake_comparison, less, markdown_of

VALID = "bits_per_character.valid"


def drawn_figures(folder):
    """The bytes of each figure of a report that is written now."""
    markdown_of(folder)
    return {path.name: path.read_bytes() for path in (folder / "figures").iterdir()}


@pytest.mark.drawn
def test_the_same_data_draw_the_same_figures(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": XL})
    first = drawn_figures(tmp_path)
    assert first.keys() == {
        "loss.svg", "differences.svg", "loss_by_time.svg", "reconstruction_loss.svg", "loss_by_position.svg"
    }  # fmt: skip
    assert drawn_figures(tmp_path) == first


def test_curves_are_means_of_paired_seeds(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": less(-0.1, -0.1, -0.4)})
    base, slots = arms_of(read_runs(tmp_path))
    # The runs of a fake comparison have ten records, 100 tokens and a second apart.
    for over, distance in (("tokens", 100.0), ("seconds", 1.0)):
        curve = base.curve(VALID, over)
        assert len(curve) == 10
        for number, (x, mean) in enumerate(curve, start=1):
            wanted = mean_of([bits + 1 / number for bits in XL])
            assert x == distance * number
            assert mean.mean == pytest.approx(wanted.mean)
            assert mean.half_width == pytest.approx(wanted.half_width)
    differences = slots.curve(VALID, base=base)
    assert len(differences) == 10
    for number, (x, difference) in enumerate(differences, start=1):
        assert x == 100.0 * number
        assert difference.mean == pytest.approx(-0.2)
        assert difference.n == 3
    assert base.curve("unknown") == slots.curve("unknown", base=base) == []


def test_a_long_curve_is_thinned_alike_for_all_seeds(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": [2.4, 2.5]})
    for name, length in (("transformer-xl", 20_000), ("transformer-xl-seed1", 10_010)):
        with open(tmp_path / name / "metrics.jsonl", "w") as file:
            for tokens in range(1, length + 1):
                file.write(f'{{"tokens": {tokens}, "a": {tokens % 40}}}\n')
        changed(tmp_path / name / "config.json", max_tokens=20_000)
    [arm] = arms_of(read_runs(tmp_path))
    whole, half = arm.curves("a").values()
    assert len(whole) == POINTS
    assert [*half][:-1] == [*whole][:250]
    # A point is the mean of 40 records: of 1 to 39, and 0.
    assert whole[40.0] == (40.0, pytest.approx(sum(range(40)) / 40))


def test_loss_by_position_is_binned_by_octaves(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": less(-0.1, -0.1, -0.4)})
    base, slots = arms_of(read_runs(tmp_path))
    differences = by_octave(slots, base)
    assert [*differences] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16)]
    assert [mean.mean for mean in differences.values()] == pytest.approx([-0.2] * 5)
    # Segments of five positions, in whose last octave only the fifth is left.
    for name in ("transformer-xl", "transformer-xl-seed1", "transformer-xl-seed2"):
        losses = {"loss_by_position": [5.0, 4.0, 3.0, 2.0, 1.0], "loss": 3.0, "bits_per_character": 3.0}
        changed(tmp_path / name / "result.json", **losses)
    base, slots = arms_of(read_runs(tmp_path))
    means = {octave: mean.mean for octave, mean in by_octave(base).items()}
    assert means == pytest.approx({(1, 1): 5.0, (2, 2): 4.0, (3, 4): 2.5, (5, 5): 1.0})
    assert by_octave(slots, base) == {}, "segments of other lengths"
    assert "The lower panel has" not in markdown_of(tmp_path)


def test_an_arm_has_one_line_and_each_colour_has_a_dark_one():
    assert line_styles(["mean", "other"])["other"] == PALETTE[3], "sky is taken"
    assert line_styles(["a", "b", "a"])["a"] == PALETTE[3]
    dark_colours = {DARK[line["color"].lower()] for line in PALETTE}
    assert len(dark_colours) == len(PALETTE)


@pytest.mark.parametrize(("points", "seeds", "lines", "bands"), [(2, 3, 0, 0), (3, 2, 1, 0), (3, 3, 1, 1)])
def test_two_points_have_no_line_and_two_seeds_no_band(points, seeds, lines, bands):
    axes = Figure().add_subplot()
    mean = mean_of([float(seed) for seed in range(seeds)])
    curve = [(float(x), mean) for x in range(points)]
    draw_lines(axes, [Series("arm", curve, PALETTE[0])])
    dotted = [line for line in axes.lines if line.get_linestyle() == ":"]
    filled = [drawn for drawn in axes.collections if isinstance(drawn, FillBetweenPolyCollection)]
    assert len(dotted) == lines
    assert len(filled) == bands


def test_marks_of_one_place_stand_beside_each_other():
    figure = Figure()
    axes = figure.add_subplot()
    curve = [(1.0, mean_of([1.0, 2.0, 3.0]))]
    draw_lines(axes, [Series("a", curve, PALETTE[0]), Series("b", curve, PALETTE[1])])
    figure.draw_without_rendering()
    left, right = (line.get_transform().transform((1.0, 2.0)) for line in axes.lines[::3])
    assert left[1] == right[1]
    assert right[0] - left[0] == pytest.approx(BESIDE * figure.dpi)


@pytest.mark.parametrize("better", [-1, 1])
def test_figures_of_many_arms_show_the_best_and_the_baseline(tmp_path, better):
    """By a measure of which less is better, and by one of which more is; an unfinished arm comes last."""
    names = [f"arm-{i:02}" for i in range(MAX_DRAWN + 4)]
    worst_first = sorted(names, reverse=better == -1)
    fake_comparison(tmp_path, {name: [2.0 + i / 100] for i, name in enumerate(names)})
    (tmp_path / worst_first[-1] / "result.json").unlink()
    arms = arms_of(read_runs(tmp_path))
    base = next(arm for arm in arms if arm.name == worst_first[0])
    drawn = best_arms(arms, base, replace(BITS, better=better))
    best = [*worst_first[-MAX_DRAWN:-1], base.name]
    assert [arm.name for arm in drawn] == sorted(best)
    assert best_arms(arms[:MAX_DRAWN], base, BITS) == arms[:MAX_DRAWN]


def test_captions_say_how_many_arms_are_drawn(tmp_path):
    few = {f"arm-{i:02}": [2.0 + i / 100] for i in range(MAX_DRAWN)}
    fake_comparison(tmp_path / "few", few)
    assert "best others" not in markdown_of(tmp_path / "few")
    fake_comparison(tmp_path / "many", few | {"transformer-xl": [3.0], "worst": [4.0]})
    report = markdown_of(tmp_path / "many")
    assert (
        f"Of {MAX_DRAWN + 2} models, figures show Transformer-XL and the {MAX_DRAWN - 1} best others"
        in report
    )
    assert "| worst |" in report


def test_captions_call_no_arm_without_a_result_one_of_the_best(tmp_path):
    arms = {f"arm-{i:02}": [2.0 + i / 100] for i in range(MAX_DRAWN)} | {"transformer-xl": [3.0]}
    fake_comparison(tmp_path, arms)
    n_others = MAX_DRAWN - 1
    for i in range(4):
        (tmp_path / f"arm-{i:02}" / "result.json").unlink()
    beginning = f"Of {MAX_DRAWN + 1} models, figures show Transformer-XL"
    n_best = MAX_DRAWN - 4
    wanted = f"{beginning}, the {n_best} best others by bits per character and 3 without a result."
    assert wanted in markdown_of(tmp_path)
    for name in arms:
        (tmp_path / name / "result.json").unlink(missing_ok=True)
    assert f"{beginning} and {n_others} without a result." in markdown_of(tmp_path)


def test_arms_keep_their_lines_where_only_the_best_are_drawn(tmp_path, monkeypatch):
    fake_comparison(tmp_path, {f"arm-{i:02}": [4.0 - i / 100] for i in range(MAX_DRAWN + 2)})
    drawn = {}

    def keep_lines(*args, **options):
        for panel in args[5]:
            for series in panel.series:
                if series.line["marker"]:
                    drawn[series.label] = series.line
        return []

    monkeypatch.setattr(plotting, "curves", keep_lines)
    markdown_of(tmp_path)
    arms = arms_of(read_runs(tmp_path))
    lines = line_styles([arm.name for arm in arms])
    assert drawn == {arm.label: lines[arm.name] for arm in arms if arm.label in drawn}
    assert len(drawn) == MAX_DRAWN
