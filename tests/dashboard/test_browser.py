"""The dashboard as the experimenter sees it: in a browser without a network, with real runs."""

import re
import signal
import subprocess
import sys

import pytest

from memformers.dashboard.page import fetch_copies
from memformers.dashboard.runs import read_card
from memformers.tracking import read_metrics
from tests.dashboard.conftest import wait_for

COMPARISON = [
    "--models", "transformer", "compressive", "--data", "builtin", "--tokens", "160000", "--batch-size", "4",
    "--evaluations", "3", "--d-model", "16", "--heads", "2", "--d-ff", "16", "--n-layers", "1",
    "--segment-len", "16", "--mem-len", "16",
]  # fmt: skip
MODELS = ("transformer", "compressive")


@pytest.fixture
def copies():
    try:
        return fetch_copies()
    except ValueError as error:
        pytest.skip(f"the page's files can't be had: {error}")


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


def test_a_comparison_is_drawn_whole_though_the_dashboard_was_killed_in_the_middle(
    copies, start, page, tmp_path
):
    dashboard = start()
    folder = tmp_path / "compared"
    command = [sys.executable, "-m", "memformers.cli", "compare", "--out", str(folder), *COMPARISON]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = folder / "transformer"
    wait_for(lambda: dashboard.runs() and dashboard.curve(read_card(first).run))
    dashboard.stop(signal.SIGKILL)
    missed = len(read_metrics(first)) + 3
    wait_for(lambda: len(read_metrics(first)) > missed)
    dashboard = start(port=dashboard.port)
    said, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "not all metrics" not in errors
    cards = {model: read_card(folder / model) for model in MODELS}

    page.goto(dashboard.url)
    page.wait_for_selector(".runs-list a")
    entries = [entry.inner_text() for entry in page.query_selector_all(".runs-list a")]
    assert len(entries) == 2
    for model, entry in zip(reversed(MODELS), entries, strict=True):
        assert "COMPLETED" in entry
        assert model in entry
        assert "comparison compared" in entry

    for model in MODELS:
        page.goto(f"{dashboard.url}/run/{cards[model].run}")
        drawn = curves(page, "path.unsmoothed-line")
        assert "deleted in 12 hours" not in page.inner_text("body")
        records = read_metrics(folder / model)
        for name in ("loss.train", "loss.valid"):
            assert_drawn(drawn, records, name)

    (link,) = set(re.findall(r"http\S+/compare", said))
    page.goto(link)
    base, current = (curves(page, f".fixed-chart path.smoothed-line.{kind}") for kind in ("base", "current"))
    for paths, model in ((base, "transformer"), (current, "compressive")):
        count = sum("loss.train" in record for record in read_metrics(folder / model))
        assert sorted(len(points(path)) for path in paths) == [3, count]
    header = page.inner_text(".compare-header")
    assert header.index("compressive") < header.index("transformer")
