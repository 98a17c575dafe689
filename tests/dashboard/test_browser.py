"""The dashboard as the experimenter sees it, in a browser: our live page without a network, and labml's with
the three files that it loads from public servers."""

import math
import shutil
import tarfile
from dataclasses import replace

import pytest

from memformers.common.files import write_json
from memformers.comparison.experiment import plan_runs
from memformers.dashboard.pages import bring_in
from memformers.runs.card import close_card, read_card
from memformers.runs.folder import alone_in
from memformers.runs.plan import runs_of
from memformers.tracking import discovery
from memformers.tracking.recorder import Tracking
from tests.dashboard.conftest import DashboardHere, record_losses, write_plan
from tests.processes import finish

# labml takes the mean of a curve without points; the command says nothing of it either.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MODELS = ("compressive", "transformer")
# The arm of each run of the first seed.
ARMS = {
    "transformer": "transformer",
    "transformer-xl": "transformer-xl",
    "odd": "<img src=x onerror=alert(1)>",
}
COLOURS = {
    "light": ["rgb(0, 114, 178)", "rgb(213, 94, 0)", "rgb(204, 121, 167)"],
    "dark": ["rgb(63, 169, 232)", "rgb(245, 138, 60)", "rgb(226, 155, 198)"],
}


# The npm packages, with their paths, that are the same as what labml's page loads from these addresses.
LOADED = {
    "d3@6.7.0:dist/d3.min.js": "https://d3js.org/d3.v6.min.js",
    "bootstrap@5.0.0-beta2:dist/css/bootstrap.min.css": "https://cdn.jsdelivr.net/npm/**/bootstrap.min.css",
    "@fortawesome/fontawesome-free@5.9.0:css/all.css": "https://cdnjs.cloudflare.com/**/5.9.0/css/all.css",
}


@pytest.fixture
def with_network(page, tmp_path):
    """The page, for which public servers have the three files that labml's loads, which are npm's."""
    if not (command := shutil.which("npm")):
        pytest.skip("npm is not installed; with it, this test looks at labml's page")
    for where, url in LOADED.items():
        package, _, path = where.rpartition(":")
        packed = finish([command, "pack", package], cwd=tmp_path, timeout=60)
        if packed.returncode:
            pytest.skip(f"the npm registry can't be reached: {packed.stderr[-200:]}")
        with tarfile.open(tmp_path / packed.stdout.split()[-1]) as archive:
            body = archive.extractfile(f"package/{path}").read()
        kind = "text/css" if url.endswith("css") else "text/javascript"
        answer = {"body": body, "headers": {"access-control-allow-origin": "*", "content-type": kind}}
        page.route(url, lambda route, *, of=answer: route.fulfill(**of))
    return page


@pytest.fixture
def comparison(tmp_path, quick_runs):
    """Three arms and two seeds, none of them begun."""
    folder = tmp_path / "three arms & more"
    runs = runs_of(list(ARMS), [0, 1])
    plan_runs(runs, folder)
    planned = {name: replace(run, arm=ARMS[run.arm]) for name, run in runs.items()}
    arms = {arm: {"mem_len": i, "norm": "<b>"} for i, arm in enumerate(ARMS.values())}
    write_plan(folder, planned, {"max_tokens": 100, "mem_len": 1, "norm": "pre"}, arms)
    discovery.note_comparison(folder)
    return folder


@pytest.fixture
def troubles(page):
    """What goes wrong on the page."""
    troubles = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: troubles.append(dialog.message))
    return troubles


def page_of(dashboard, comparison):
    return f"{dashboard.url}/comparisons/{discovery.comparison_id(comparison)}"


def strokes(page):
    """The colours of the lines in the chart, in the order of the arms."""
    return page.locator("#chart .scatterlayer .js-line").evaluate_all(
        "lines => lines.map(l => getComputedStyle(l).stroke)"
    )


@pytest.mark.parametrize(
    ("width", "scheme"), [(390, "light"), pytest.param(1280, "dark", marks=pytest.mark.long)]
)
def test_three_arms_are_drawn_live_and_names_stay_text(width, scheme, page, comparison, troubles, tmp_path):
    page.set_viewport_size({"width": width, "height": 1000})
    page.emulate_media(color_scheme=scheme)
    with DashboardHere(tmp_path / "records") as dashboard:
        page.goto(dashboard.url)
        assert page.url == page_of(dashboard, comparison)
        page.get_by_text("6 runs, 0 finished; no record yet").wait_for()
        assert page.inner_text("#title") == comparison.name
        page.get_by_text("Settings that differ").click()
        for i, name in enumerate(ARMS):
            with Tracking(comparison / name, name, {}, "off"):
                record_losses(comparison / name, [3.0 - i, 2.5 - i, 2.25 - i])
            write_json(comparison / name / "result.json", {"bits_per_character": 3.5 - i})
        with open(comparison / "transformer-seed1" / "metrics.jsonl", "w") as file:
            file.write('{"tokens": 10, "seconds": 1, "loss.valid": 3.25}\n{"tokens": 20, "loss.va')
        with alone_in(comparison / "transformer-seed1"):
            page.get_by_text("1 finished, 1 running").wait_for()
        assert page.get_by_text("mem_len", exact=True).is_visible(), "what was opened stays open"
        page.wait_for_function("document.querySelectorAll('#chart .legendtext').length === 3")
        names = page.locator("#chart .legendtext").all_text_contents()
        assert names == ["No memory", "Transformer-XL", ARMS["odd"]]
        assert [stroke for stroke in strokes(page) if "rgb(" in stroke] == COLOURS[scheme]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.locator("#chart .legendtoggle").nth(1).click()
        page.wait_for_timeout(800)  # a second click would have shown it alone
        assert len(strokes(page)) == 2
        page.select_option("#over", "seconds")
        page.wait_for_url("**over=seconds*")
        page.locator("#log").check()
        (comparison / "report.html").write_text("<h1>The report</h1>")
        page.click("#report a")
        page.get_by_text("The report").wait_for()
        page.goto(f"{dashboard.url}/comparisons")
        page.get_by_role("link", name=comparison.name).first.click()
        page.wait_for_selector("#chart .js-line", state="attached")
    assert troubles == []


@pytest.mark.long
def test_a_restarted_dashboard_shows_a_killed_run_as_stopped(page, comparison, tmp_path):
    with DashboardHere(tmp_path / "records") as dashboard:
        page.goto(page_of(dashboard, comparison))
        page.locator("summary", has_text="Runs").click()
        row = page.locator("#below tr", has=page.get_by_text("odd", exact=True))
        record_losses(comparison / "odd", [2.0])
        close_card(comparison / "odd", "killed")
        row.get_by_text("stopped").wait_for()
    page.get_by_text("does not respond").wait_for()
    record_losses(comparison / "odd", [1.25], begin=2)
    with DashboardHere(tmp_path / "records", port=dashboard.port):
        row.get_by_text("1.250").wait_for()
        assert "does not respond" not in page.inner_text("#summary")
        page.goto(f"{dashboard.url}/run/{read_card(comparison / 'odd').run}")
        page.get_by_text("does not reach").wait_for()  # labml's page needs a network
        page.get_by_text("All runs in one chart").click()
        page.wait_for_url(page_of(dashboard, comparison))


def test_only_links_that_lead_somewhere_are_printed(comparison, tmp_path, capsys):
    runs = runs_of(["transformer", "odd"], [0])
    plan_runs(runs, comparison)
    with DashboardHere(tmp_path / "records") as dashboard:
        api = discovery.api_address(dashboard.url)
        discovery.show_comparison(comparison, api)
        assert f"{dashboard.url}/comparisons/" in capsys.readouterr().out
        with Tracking(comparison / "odd", "odd", {}, api):
            assert f"{dashboard.url}/run/{read_card(comparison / 'odd').run}" in capsys.readouterr().out
    discovery.show_comparison(comparison, api)
    discovery.show_comparison(tmp_path / "nowhere", "off")
    assert capsys.readouterr().out == ""
    assert tmp_path / "nowhere" not in discovery.noted_comparisons().values()


@pytest.mark.parametrize("width", [pytest.param(390, marks=pytest.mark.long), 1280])
def test_a_single_run_has_a_live_page(width, page, quick_runs, troubles, tmp_path, capsys):
    page.set_viewport_size({"width": width, "height": 900})
    folder = tmp_path / f"alone-{width}"
    folder.mkdir()
    with DashboardHere(tmp_path / "records") as dashboard:
        link = page_of(dashboard, folder)
        with (
            alone_in(folder),
            Tracking(folder, "alone", {}, discovery.api_address(dashboard.url)) as tracking,
        ):
            assert capsys.readouterr().out == f"dashboard: {link}\n"
            for step in range(1, 9):
                tracking.record({"tokens": 10 * step, "seconds": step, "loss.train": 4 - step / 9})
            page.goto(f"{dashboard.url}/comparisons")
            page.get_by_role("link", name=folder.name).click()
            assert page.url == link
            page.get_by_text("1 run, 0 finished, 1 running").wait_for()
            page.wait_for_selector("#chart .js-line", state="attached")
            assert page.input_value("#metric") == "loss.train"
            chart = page.locator("#chart .nsewdrag").first
            chart.hover()
            if buttons := page.locator("#chart .modebar").all():
                right = chart.bounding_box()["x"] + chart.bounding_box()["width"]
                assert buttons[0].bounding_box()["x"] >= right, "they lie beside the curve"
            assert len(buttons) == (width == 1280)
            tracking.record({"tokens": 80, "seconds": 8, "loss.valid": 3.5})
            page.locator("#metric option:checked[value='loss.valid']").wait_for(state="attached")
            page.select_option("#metric", "loss.train")
            page.wait_for_url("**metric=loss.train*")
            tracking.record({"tokens": 90, "seconds": 9, "loss.valid": 3.25})
            page.get_by_text("3.250").first.wait_for()
            assert page.input_value("#metric") == "loss.train", "the reader's choice stays"
    assert troubles == []


@pytest.mark.long
def test_labml_shows_settings_and_losses(with_network, quick_runs, troubles, tmp_path):
    page = with_network
    folder = tmp_path / "two"
    settings = {"model": {"model": "transformer", "mem_len": 7, "d_model": 32}, "seed": 3}
    plan_runs(runs_of(MODELS, [0]), folder)
    with DashboardHere(tmp_path / "records") as dashboard:
        for model in MODELS:
            api = discovery.api_address(dashboard.url)
            with Tracking(folder / model, model, settings, api) as tracking:
                for step in range(1, 31):
                    tracking.record({"tokens": 100 * step, "loss.train": math.exp(-step / 9)})
                for step in (10, 20, 30):
                    tracking.record({"tokens": 100 * step, "loss.valid": 1 + math.sin(step)})
        bring_in([folder / model for model in MODELS], dashboard.url)
        page.goto(f"{dashboard.url}/runs")
        page.wait_for_selector(".runs-list a")
        entries = page.locator(".runs-list a").all_inner_texts()
        assert all("comparison two" in entry and "COMPLETED" in entry for entry in entries)
        assert [model in entry for model, entry in zip(reversed(MODELS), entries, strict=True)] == [True] * 2
        run = f"{dashboard.url}/run/{read_card(folder / MODELS[1]).run}"
        page.goto(run)
        page.wait_for_selector("path.unsmoothed-line", state="attached")
        configs = page.locator(".configs.block")
        configs.get_by_text("d_model").wait_for()
        assert not {"mem_len", "seed"} & set(configs.inner_text().split()), "a transformer has no memory"
        assert not [text for text in ("does not reach", "deleted in") if text in page.inner_text("html")]
        assert not page.get_by_text("Computer").is_visible()
        page.goto(f"{run}/metrics")
        lines = "path.unsmoothed-line.smooth-focused"
        page.wait_for_selector(lines, state="attached")
        ends = [1 + path.get_attribute("d").count("C") for path in page.query_selector_all(lines)]
        assert sorted(ends) == [3, 30], "a curve's pieces end at its points"
    assert [trouble for trouble in troubles if not {"404", "net::ERR_FAILED"} & set(trouble.split())] == []
