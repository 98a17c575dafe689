"""The dashboard is started, found, stopped and started again, and no run loses a point by that."""

import json
import signal
import socket

import pytest

from memformers.comparison.experiment import plan_runs
from memformers.dashboard.labml import open_records
from memformers.dashboard.pages import bring_in
from memformers.runs.folder import read_card, read_metrics, runs_of
from memformers.runs.reader import find_runs
from memformers.tracking.discovery import api_address, comparison_id, sent_to
from memformers.tracking.recorder import Tracking
from tests.dashboard.conftest import DashboardHere
from tests.processes import run, wait_for

# labml takes the mean of a curve without points; the command says nothing of it either.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def record(tracking, steps):
    for step in steps:
        values = {"loss.train": 3.0 / step, "gradient_norm": 1.0}
        tracking.record({"tokens": step, **values, **({"loss.valid": 2.0} if step % 7 == 0 else {})})


def recorded(folder, steps=range(1, 10)):
    """A finished run of the folder's name, that no dashboard has heard of."""
    folder.mkdir(parents=True)
    with Tracking(folder, folder.name, {}, "off") as tracking:
        record(tracking, steps)
    return folder


def expected(folder, name="loss.train"):
    return {r["tokens"]: pytest.approx(r[name]) for r in read_metrics(folder) if name in r}


def test_a_run_finds_the_dashboard_and_is_listed_claimed_and_live(start, tmp_path, capsys):
    dashboard = start("--host", "0.0.0.0")
    assert sent_to("auto") == api_address(dashboard.url)
    assert "has no login" in dashboard.errors()  # it is said where others than this machine reach it
    settings = {"model": {"mem_len": 7, "dropout": 0.0}}
    with Tracking(tmp_path, "my-model", settings, given=["model.mem_len"]) as tracking:
        (listed,) = wait_for(dashboard.runs)
        page = f"{dashboard.url}/comparisons/{comparison_id(tmp_path)}"
        assert capsys.readouterr().out == f"dashboard: {page}\n"
        record(tracking, range(1, 20))
        assert listed["name"] == "my-model"
        assert listed["run_status"]["status"] == "in progress"
        wait_for(lambda: dashboard.curve(listed["run_uuid"]) == expected(tmp_path))
    (listed,) = dashboard.runs()
    assert listed["run_status"]["status"] == "completed"
    data = dashboard.ask(f"/api/v1/run/{listed['run_uuid']}")
    assert data["is_claimed"]
    assert data["is_project_run"]
    mem_len, dropout = data["configs"]
    assert {"key": "mem_len", "value": 7, "is_explicitly_specified": True}.items() <= mem_len.items()
    assert not dropout["is_explicitly_specified"]
    assert dashboard.stop() == 0
    assert sent_to("auto") == ""


@pytest.mark.long
def test_a_dashboard_killed_and_started_again_in_the_middle_misses_nothing(start, tmp_path, capfd):
    dashboard = start()
    with Tracking(tmp_path, "model", {}) as tracking:
        card = read_card(tmp_path)
        record(tracking, range(1, 30))
        wait_for(lambda: dashboard.runs() and dashboard.curve(card.run))
        dashboard.stop(signal.SIGKILL)
        record(tracking, range(30, 60))
        dashboard = start(port=dashboard.port)
        record(tracking, range(60, 90))
        wait_for(lambda: len(dashboard.curve(card.run)) == 89)
        record(tracking, range(90, 100))
    for name in ("loss.train", "loss.valid"):
        assert dashboard.curve(card.run, name) == expected(tmp_path, name)
    assert "not all metrics" not in capfd.readouterr().err


def test_a_dashboard_that_has_forgotten_the_run_gets_all_of_it_again(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with (
        DashboardHere(tmp_path / "records") as dashboard,
        Tracking(folder, "model", {}, api_address(dashboard.url)) as tracking,
    ):
        run = read_card(folder).run
        record(tracking, range(1, 60))
        wait_for(lambda: dashboard.runs() and len(dashboard.curve(run)) == 59)
        open_records(tmp_path / "other", print)
        record(tracking, range(60, 64))
        wait_for(lambda: dashboard.runs() and len(dashboard.curve(run)) == 63)
        for name in ("loss.train", "loss.valid", "gradient_norm"):
            assert dashboard.curve(run, name) == expected(folder, name)


def test_a_training_that_began_first_finds_the_dashboard(start, tmp_path, capfd):
    with Tracking(tmp_path, "model", {}, "auto") as tracking:
        record(tracking, range(1, 30))
        dashboard = start()
        wait_for(dashboard.runs)
        record(tracking, range(30, 60))
    assert dashboard.curve(read_card(tmp_path).run) == expected(tmp_path)
    assert dashboard.runs()[0]["run_status"]["status"] == "completed"
    assert "not all metrics" not in capfd.readouterr().err


@pytest.mark.filterwarnings("default:.*labml.json")
def test_runs_made_while_none_ran_are_imported_whole_and_once_and_broken_ones_named(
    quick_runs, tmp_path, capsys
):
    names = ("broken-card", "five", "huge", "first", "second")
    card, five, huge, *runs = [recorded(tmp_path / "runs" / name, range(1, 1200)) for name in names]
    assert find_runs(tmp_path / "runs") == [card, five, huge, *runs]
    (card / "labml.json").write_text("{")
    for folder, line in ((five, "5"), (huge, '{"tokens": 1, "x": 1' + "0" * 400 + "}")):
        (folder / "metrics.jsonl").write_text(f"{line}\n")
    with DashboardHere(tmp_path / "records") as dashboard:
        bring_in(find_runs(tmp_path / "runs"), dashboard.url)
        said = capsys.readouterr().err
        assert [folder for folder in (card, five, huge) if f"{folder} was not imported." not in said] == []
        listed = [run for run in dashboard.runs() if run["name"] in ("first", "second")]
        assert [(run["name"], run["run_status"]["status"]) for run in listed] == [
            ("second", "completed"), ("first", "completed"),
        ]  # fmt: skip
        once = dashboard.curve(read_card(runs[0]).run)
        assert 300 <= len(once) <= 1024
        assert len(dashboard.curve(read_card(runs[0]).run, "loss.valid")) == 1199 // 7
        bring_in(runs, dashboard.url)
        assert dashboard.curve(read_card(runs[0]).run) == once
        assert len([run for run in dashboard.runs() if run["name"] == "first"]) == 1


def test_a_long_run_with_many_metrics_is_imported_within_what_a_request_may_hold(tmp_path):
    folder = recorded(tmp_path / "long", ())
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, 3000):
            values = {f"loss.{n}": step / 3 for n in range(20)}
            file.write(
                json.dumps({"tokens": step, **values, **({"loss.valid": 2.0} if step % 300 == 0 else {})})
            )
            file.write("\n")
    with DashboardHere(tmp_path / "records") as dashboard:
        bring_in([folder], dashboard.url)
        run = read_card(folder).run
        assert max(dashboard.curve(run, "loss.19")) > 2990
        assert dashboard.curve(run, "loss.valid") == expected(folder, "loss.valid")


def test_the_baseline_and_an_arm_are_set_against_each_other_once_both_are_there(quick_runs, tmp_path):
    plan_runs(runs_of(["a", "b", "c"], [0]), tmp_path)
    ids = {name: read_card(tmp_path / name).run for name in "abc"}
    with DashboardHere(tmp_path / "records") as dashboard:
        found = {}
        for name in "abc":
            with Tracking(tmp_path / name, name, {}, "off") as tracking:
                for step in (100, 300, 490, 500):  # the last two are closer than the first two
                    tracking.record({"tokens": step, "loss.valid": float(step)})
            bring_in([tmp_path / name], dashboard.url)
            assert dashboard.curve(ids[name], "loss.valid") == expected(tmp_path / name, "loss.valid")
            asked = (dashboard.ask(f"/api/v1/compare/preferences/{ids[n]}") for n in "abc" if n <= name)
            found[name] = [preferences["base_experiment"] for preferences in asked]
    assert found == {"a": [""], "b": [ids["b"], ids["a"]], "c": [ids["b"], ids["a"], ids["a"]]}


def test_a_folder_belongs_to_one_dashboard_to_which_others_bring_runs(quick_runs, start, tmp_path):
    recorded(tmp_path / "runs" / "one")
    dashboard, folder = start(), tmp_path / "records"
    second = run("dashboard", "--folder", folder, "--port", 0)
    assert second.said(f"belongs to the dashboard that runs at {dashboard.url}")
    assert len(second.err.splitlines()) == 1
    bringing = run("dashboard", "--folder", folder, "--import", tmp_path / "runs")
    assert (bringing.code, bringing.out.count("imported: one")) == (0, 1)
    dashboard.stop(signal.SIGKILL)
    dashboard = start("--import", str(tmp_path / "runs"))
    assert [entry["name"] for entry in dashboard.runs()] == ["one"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--host no.such.host.invalid", "host='no.such.host.invalid'"),
     ("--port 99999999", "port=99999999"),
     ("--port {taken}", "port {taken}"),
     ("--import /gone", "/gone")],
)  # fmt: skip
def test_what_cannot_be_started_gets_one_line(arguments, message, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        ended = run("dashboard", "--folder", tmp_path / "records", *arguments.format(taken=taken).split())
    assert ended.said(message.format(taken=taken)), ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("lost", "text"),
    [("User", ""), ("Project", '{"half": '), ("Run", "\x00\x01"), ("Status", '{"$array": "!"}'),
     ("MetricsModel", "[1]"), ("indexes", "")],
)  # fmt: skip
def test_unreadable_records_are_set_aside_and_said_and_the_runs_stay(lost, text, quick_runs, tmp_path):
    one, two, three = (recorded(tmp_path / name) for name in ("one", "two", "three"))
    with DashboardHere(tmp_path / "records") as dashboard:
        for folder in (one, two):
            bring_in([folder], dashboard.url)
    for path in (tmp_path / "records" / lost).glob("*.json"):
        path.write_text(text)
    with DashboardHere(tmp_path / "records") as dashboard:
        assert f"{tmp_path / 'records' / lost}" in dashboard.said[0]
        assert "set aside as" in dashboard.said[-1]
        for folder in (one, two, three):
            bring_in([folder], dashboard.url)
        assert sorted(entry["name"] for entry in dashboard.runs()) == ["one", "three", "two"]
        assert dashboard.curve(read_card(two).run) == expected(two)
