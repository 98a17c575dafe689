"""The dashboard as the experimenter sees it: in a browser without a network, with real runs."""

import math
import re
import signal
import subprocess

import pytest

from memformers.comparison.experiment import plan_runs
from memformers.dashboard.server import bring_in
from memformers.runs.folder import read_card, read_metrics
from memformers.runs.plan import runs_of
from memformers.tracking.recorder import Tracking
from tests.builders import SMALL_RUN
from tests.dashboard.conftest import DashboardHere
from tests.processes import program, wait_for
from tests.processes import start as start_program

# labml takes the mean of a curve without points; the command says nothing of it either.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MODELS = ("transformer", "compressive")


def points(path):
    """The points that a curve of the page goes through: the end of each of its pieces."""
    numbers = [float(n) for n in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", path)]
    pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
    return [pairs[0], *pairs[3::3]]


def assert_drawn(paths, records, name):
    """Some of the curves goes through the values of the records: its pixels are a linear map of them."""
    steps, values = zip(*[(r["tokens"], r[name]) for r in records if name in r], strict=True)
    candidates = [points(path) for path in paths]
    fitting = [drawn for drawn in candidates if len(drawn) == len(steps)]
    assert any(fits(steps, [x for x, _ in d]) and fits(values, [y for _, y in d]) for d in fitting)


def fits(numbers, pixels):
    """Whether the pixels lie where the linear map through the lowest and the highest number has them, to a
    fiftieth of the way between these two, or half a pixel if that is less."""
    low, high = numbers.index(min(numbers)), numbers.index(max(numbers))
    way = pixels[high] - pixels[low]
    scale = way / (numbers[high] - numbers[low])
    wanted = [pixels[low] + (number - numbers[low]) * scale for number in numbers]
    return way != 0 and pixels == pytest.approx(wanted, abs=min(0.5, abs(way) / 50))


def curves(page, selector):
    page.wait_for_selector(selector, state="attached")
    return [path.get_attribute("d") for path in page.query_selector_all(selector)]


def check_pages(page, dashboard, folder):
    """The list of runs, the page of each, and the comparison of the two, show all that was recorded."""
    records = {model: read_metrics(folder / model) for model in MODELS}
    page.goto(f"{dashboard.url}/runs")
    page.wait_for_selector(".runs-list a")
    entries = [entry.inner_text() for entry in page.query_selector_all(".runs-list a")]
    assert len(entries) == 2
    for model, entry in zip(reversed(MODELS), entries, strict=True):
        assert "COMPLETED" in entry
        assert model in entry
        assert f"comparison {folder.name}" in entry
    for model in MODELS:
        page.goto(f"{dashboard.url}/run/{read_card(folder / model).run}")
        drawn = curves(page, "path.unsmoothed-line")
        assert "deleted in 12 hours" not in page.inner_text("body")
        for name in ("loss.train", "loss.valid"):
            assert_drawn(drawn, records[model], name)
    page.goto(f"{dashboard.url}/run/{read_card(folder / MODELS[1]).run}/compare")
    base, current = (curves(page, f".fixed-chart path.smoothed-line.{kind}") for kind in ("base", "current"))
    for paths, model in ((base, "transformer"), (current, "compressive")):
        counts = [sum(name in r for r in records[model]) for name in ("loss.valid", "loss.train")]
        assert sorted(len(points(path)) for path in paths) == counts
    header = page.inner_text(".compare-header")
    assert header.index("compressive") < header.index("transformer")


def test_two_runs_that_are_compared_are_listed_and_drawn(page, quick_runs, tmp_path):
    plan_runs(runs_of(MODELS, [0]), tmp_path)
    for model in MODELS:
        with Tracking(tmp_path / model, model, {}, "off") as tracking:
            for step in range(1, 31):
                tracking.record({"tokens": 100 * step, "loss.train": math.exp(-step / 9)})
                if step % 10 == 0:
                    tracking.record({"tokens": 100 * step, "loss.valid": 1 + math.sin(step)})
    with DashboardHere(tmp_path / "records") as dashboard:
        bring_in([tmp_path / model for model in MODELS], dashboard.url)
        check_pages(page, dashboard, tmp_path)


@pytest.mark.long
def test_a_comparison_is_drawn_whole_though_the_dashboard_was_killed_in_the_middle(start, page, tmp_path):
    dashboard, folder = start(), tmp_path / "compared"
    process = start_program(
        program("compare", *SMALL_RUN, "--models", *MODELS, "--tokens", 160_000, "--evaluations", 3, "--out",
                folder),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    first = folder / "transformer"
    wait_for(lambda: dashboard.runs() and dashboard.curve(read_card(first).run))
    dashboard.stop(signal.SIGKILL)
    missed = len(read_metrics(first)) + 3
    wait_for(lambda: len(read_metrics(first)) > missed)
    dashboard = start(port=dashboard.port)
    said, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "not all metrics" not in errors
    (link,) = set(re.findall(r"http\S+/compare", said))
    assert link == f"{dashboard.url}/run/{read_card(folder / 'compressive').run}/compare"
    check_pages(page, dashboard, folder)
