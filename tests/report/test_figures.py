"""Figures, and the data beside them."""

import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from memformers.common.intervals import mean_of
from memformers.report import plotting
from memformers.report.curves import octave_means
from memformers.report.plotting import LOOKS, PALETTE, Series, draw_lines, looks_of
from memformers.report.probe import effective_length
from memformers.report.probe_figures import LINES, attention_figure, gains_figure, layer_look
from tests.report.fake_runs import XL, data_of, fake_comparison, less, markdown_of

WEB = Path(plotting.__file__).parents[1] / "dashboard" / "web"


def numbers(rows, *names):
    return [[float(row[name]) for name in names] for row in rows]


@pytest.mark.drawn
def test_each_figure_is_there_as_png_svg_and_csv_and_the_same_data_give_the_same_files(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": XL})
    made = []
    for _ in range(2):
        markdown_of(tmp_path)
        made.append({path: path.read_bytes() for path in (tmp_path / "figures").iterdir()})
    assert made[0] == made[1]
    drawn = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert drawn == {"validation_tokens", "differences", "validation_time", "reconstruction_loss",
                     "tokens_per_second", "loss_by_position"}  # fmt: skip
    for name in drawn:
        assert (tmp_path / "figures" / f"{name}.svg").read_text(encoding="utf-8").lstrip().startswith("<?xml")
        assert (tmp_path / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert data_of(tmp_path, name)
    rows = [row for row in data_of(tmp_path, "validation_tokens") if row["series"] == "Transformer-XL"]
    expected = [(100 * i, 2.45 + 1 / i) for i in range(1, 11)]
    got = numbers(rows, "place", "mean")
    assert got == [pytest.approx(point) for point in expected]
    assert {row["n"] for row in rows} == {"3"}


@pytest.mark.parametrize(("points", "lines"), [(2, 0), (3, 1)])
def test_fewer_than_three_points_are_not_joined_by_a_line(points, lines):
    axes = Figure().add_subplot()
    curve = [(float(x), mean_of([1.0, 2.0 + x])) for x in range(points)]
    draw_lines(axes, [Series("arm", curve, LOOKS["compressive"])])
    assert sum(line.get_linestyle() not in ("None", "none") for line in axes.lines) == lines


def test_the_loss_by_position_is_of_octaves_and_its_difference_is_of_the_same_seed(tmp_path):
    assert octave_means(
        {"loss_by_position": [5.0, 4.0, 3.0, 2.0, 1.0], "loss": 3.0, "bits_per_character": 3.0}
    ) == {
        (1, 1): 5.0, (2, 2): 4.0, (3, 4): 2.5, (5, 5): 1.0,
    }  # fmt: skip
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": less(-0.1, -0.1, -0.4)})
    markdown = markdown_of(tmp_path)
    rows = [row for row in data_of(tmp_path, "loss_by_position") if "minus that" in row["panel"]]
    assert {row["series"] for row in rows} == {"Compressive Transformer"}
    assert [row["place"] for row in rows] == ["1 – 1", "2 – 2", "3 – 4", "5 – 8", "9 – 16"]
    assert numbers(rows, "mean") == [pytest.approx([-0.2])] * 5  # 0.7 · 0.2 nats
    assert "The lower panel has the loss minus that of Transformer-XL" in markdown


def test_one_seed_has_no_difference_by_position(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": [2.4], "compressive": [2.3]})
    assert "The lower panel has" not in markdown_of(tmp_path)
    rows = data_of(tmp_path, "loss_by_position")
    assert {row["panel"] for row in rows} == {"loss (bits per character)"}


def context(length, interval):
    gains, ends = [0.2, 0.05, 0.0], [[0.1, 0.3], [0.0, 0.1], [0.0, 0.0]]
    found = {"gains": gains, "gain_intervals": ends, "recl": length, "recl_intervals": interval}
    return {"step": 32} | {name: {"1.0": {"a": of_a}} for name, of_a in found.items()}


@pytest.mark.parametrize(
    ("length", "interval", "said"),
    [(96, (96, None), "96 (96 – over 96)"),
     (64, (32, None), "64 (≤\N{NO-BREAK SPACE}32 – over 96)"),
     (64, (64, 64), "64 (64)")],
)  # fmt: skip
def test_an_effective_context_at_the_end_of_what_was_tried_is_said_to_be(length, interval, said):
    assert effective_length(context(length, interval), "1.0", "a") == said


def test_gains_have_their_intervals_and_say_of_which_tokens_they_are(tmp_path):
    gains_figure(context(64, (32, 96)), {"a": "Transformer-XL"}, {"a": LOOKS["transformer-xl"]}, tmp_path)
    rows = data_of(tmp_path, "effective_context")
    columns = ["place", "mean", "95 % interval from", "to"]
    expected = [[32, 20, 10, 30], [64, 5, 0, 10], [96, 0, 0, 0]]
    assert numbers(rows, *columns) == [pytest.approx(row) for row in expected]


def test_a_model_has_one_colour_in_figures_and_on_the_dashboard():
    looks = (WEB / "looks.js").read_text(encoding="utf-8")
    assert re.findall(r"color: '(#\w+)'", looks) == [look["color"] for look in PALETTE]
    names = {look["color"]: name for name in ("BLUE", "ORANGE", "GREEN", "PINK", "SKY", "AMBER", "BLACK")
             for look in [getattr(plotting, name)]}  # fmt: skip
    assert dict(re.findall(r"'([a-z-]+)': ([A-Z]+)", looks)) == {
        n: names[k["color"]] for n, k in LOOKS.items()
    }
    assert looks_of(["mean", "other"])["other"] == PALETTE[3], "sky is taken"


def test_no_two_layers_look_alike_and_every_head_is_in_the_data(tmp_path):
    looks = [layer_look(i) for i in range(len(PALETTE) * len(LINES))]
    assert len({(look["color"], look["linestyle"]) for look in looks}) == len(looks)
    mass = {"by_place": [[[0.2, 0.3, 0.5]] * 2] * 3, "nearest": [0, 1], "by_distance": [[[0.4, 0.6]] * 2] * 3}
    attention_figure({"a": mass}, {"a": "Transformer-XL"}, tmp_path)
    rows = data_of(tmp_path, "attention")
    assert len(rows) == 3 * 2 * (3 + 2)
    shares = [float(row["share of attention"]) for row in rows if (row["layer"], row["head"]) == ("3", "2")]
    assert shares == [0.2, 0.3, 0.5, 0.4, 0.6]
