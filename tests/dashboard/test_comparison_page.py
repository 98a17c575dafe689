"""The page of a comparison as the experimenter sees it: live, in a browser without a network."""

import re
import signal
from dataclasses import replace

import pytest

from memformers.comparison.experiment import plan_runs, print_links
from memformers.runs.folder import close_card, read_card
from memformers.runs.plan import runs_of
from memformers.tracking.discovery import (
    api_address,
    comparison_page,
    note_comparison,
    noted_comparisons,
    show_comparison,
)
from memformers.tracking.recorder import Tracking
from tests.dashboard.conftest import DashboardHere, record_losses, write_plan

ARMS = {
    "transformer": "transformer",
    "transformer-xl": "transformer-xl",
    "odd": "<img src=x onerror=alert(1)>",
}
"""The arm of each run of the first seed."""


@pytest.fixture
def comparison(tmp_path, quick_runs):
    """Three arms and two seeds, none of them begun."""
    folder = tmp_path / "three arms & more"
    runs = runs_of(list(ARMS), [0, 1])
    plan_runs(runs, folder)
    planned = {name: replace(run, arm=ARMS[run.arm]) for name, run in runs.items()}
    arms = {arm: {"mem_len": i, "norm": "<b>"} for i, arm in enumerate(ARMS.values())}
    write_plan(folder, planned, {"tokens": 100, "mem_len": 1, "norm": "pre"}, arms)
    note_comparison(folder)
    return folder


def run_id(folder):
    return read_card(folder / "odd").run


def row(page, name):
    return page.locator("#table tbody tr").filter(has_text=re.compile(rf"^{re.escape(name)}"))


def test_three_arms_are_drawn_live_and_sorted_and_names_stay_text(page, comparison, tmp_path):
    troubles = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda said: troubles.append(said.text) if said.type == "error" else None)
    page.on("dialog", lambda dialog: troubles.append(dialog.message))
    with DashboardHere(tmp_path / "records") as dashboard:
        address = comparison_page(api_address(dashboard.url), comparison)
        page.goto(address)
        page.wait_for_selector("#table tbody tr")
        assert page.inner_text("#title") == comparison.name
        assert page.locator("#table tbody tr").count() == 3
        assert "6 runs, 0 finished; no record yet" in page.inner_text("#summary")
        head = page.locator("#table th").all_inner_texts()
        assert head[-2:] == ["mem_len", "norm"] or head[-1] == "mem_len"

        page.click("[data-rows=runs]")
        for i, name in enumerate(ARMS):
            with Tracking(comparison / name, name, {}, "off"):
                record_losses(comparison / name, [3.0 - i, 2.5 - i])
        row(page, "odd").get_by_text("finished").wait_for()
        with open(comparison / "transformer-seed1" / "metrics.jsonl", "w") as file:
            file.write('{"tokens": 10, "seconds": 1, "loss.valid": 3.25}\n{"tokens": 20, "loss.va')
        row(page, "transformer-seed1").get_by_text("3.25").first.wait_for()
        assert "running" in row(page, "transformer-seed1").inner_text()
        legend = page.locator("#legend button").all_inner_texts()
        assert [re.sub(r"\s+", " ", text).strip() for text in legend] == [
            "transformer 2.5", "transformer-xl 1.5", f"{ARMS['odd']} 0.5",
        ]  # fmt: skip
        assert page.locator("#chart canvas").count() == 1
        assert colours(page) >= {(0, 114, 178), (213, 94, 0), (204, 121, 167)}

        page.click("th[data-key=valid] button")
        page.click("th[data-key=valid] button")
        names = [text.split("\n")[0] for text in page.locator("#table tbody td.name").all_inner_texts()]
        assert names[:4] == ["transformer-seed1", "transformer", "transformer-xl", "odd"]

        page.click("#legend button >> nth=1")
        assert (213, 94, 0) not in colours(page)
        page.select_option("#over", "seconds")
        page.wait_for_url("**over=seconds*")
        page.goto(f"{dashboard.url}/comparisons")
        page.click("a.card")
        page.wait_for_selector("#table tbody tr")
        assert page.url == address
    assert troubles == []


def colours(page):
    """The colours of the chart's pixels."""
    found = page.evaluate("""() => {
        const canvas = document.querySelector('#chart canvas')
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
        const seen = new Set()
        for (let i = 0; i < data.length; i += 4) {
            if (data[i + 3] === 255) seen.add([data[i], data[i + 1], data[i + 2]].join())
        }
        return [...seen]
    }""")
    return {tuple(map(int, text.split(","))) for text in found}


def test_a_killed_run_is_shown_as_stopped_and_a_dashboard_that_comes_back_goes_on(page, comparison, start):
    dashboard = start()
    page.goto(comparison_page(api_address(dashboard.url), comparison))
    page.wait_for_selector("#table tbody tr")
    page.click("[data-rows=runs]")
    record_losses(comparison / "odd", [2.0])
    close_card(comparison / "odd", "killed")
    row(page, "odd").get_by_text("stopped").wait_for()
    dashboard.stop(signal.SIGKILL)
    page.get_by_text("does not answer").wait_for()
    record_losses(comparison / "odd", [1.25], begin=2)
    start(port=dashboard.port)
    row(page, "odd").get_by_text("1.25").first.wait_for()
    assert "does not answer" not in page.inner_text("#summary")


def test_labml_s_page_has_a_link_to_the_comparison_of_its_run(page, comparison, tmp_path):
    with DashboardHere(tmp_path / "records") as dashboard:
        page.goto(f"{dashboard.url}/run/{run_id(comparison)}")
        page.click(".memformers-comparisons")
        page.wait_for_url(comparison_page(api_address(dashboard.url), comparison))


def test_only_links_that_lead_somewhere_are_printed(comparison, tmp_path, capsys):
    runs = runs_of(["transformer", "odd"], [0])
    ids = plan_runs(runs, comparison)
    with DashboardHere(tmp_path / "records") as dashboard:
        api = api_address(dashboard.url)
        show_comparison(comparison, api)
        assert f"{dashboard.url}/comparisons/" in capsys.readouterr().out
        print_links(runs, ids, api)
        assert capsys.readouterr().out == ""
        for name in ids:
            with Tracking(comparison / name, name, {}, api):
                assert f"{dashboard.url}/run/{ids[name]}" in capsys.readouterr().out
        print_links(runs, ids, api)
        link = f"{dashboard.url}/run/{ids['odd']}/compare  (odd beside transformer)"
        assert link in capsys.readouterr().out
    show_comparison(comparison, api)
    print_links(runs, ids, api)
    show_comparison(tmp_path / "nowhere", "off")
    assert capsys.readouterr().out == ""
    assert tmp_path / "nowhere" not in noted_comparisons().values()


def test_a_run_that_has_just_begun_opens_without_trouble(page, comparison, tmp_path):
    troubles = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("response", lambda answer: troubles.append(answer.url) if answer.status >= 400 else None)
    with DashboardHere(tmp_path / "records") as dashboard:
        settings = {"model": {"mem_len": 7}, "seed": 3}
        with Tracking(comparison / "odd", "odd", settings, api_address(dashboard.url), ["model.mem_len"]):
            address = f"{dashboard.url}/run/{run_id(comparison)}"
            for path in ("/compare", ""):
                page.goto(address + path)
                page.get_by_text("comparison three arms").first.wait_for()
                assert "missing" not in page.inner_text("body")
            configs = page.locator(".configs.block")
            configs.get_by_text("mem_len").wait_for()
            assert "seed" not in configs.inner_text()
            assert not page.get_by_text("Computer").is_visible()
    assert [trouble for trouble in troubles if "favicon" not in trouble] == []
