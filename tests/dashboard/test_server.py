"""The dashboard is started, found, stopped and started again, and no run loses a point by that."""

import signal
import socket
import subprocess
import sys

import pytest

from memformers.dashboard.discovery import api_address, find_running
from memformers.dashboard.runs import read_card
from memformers.tracking import Tracking, read_metrics
from tests.dashboard.conftest import wait_for


def record(tracking, steps):
    for step in steps:
        values = {"loss.train": 3.0 / step, "gradient_norm": 1.0}
        tracking.record({"tokens": step, **values, **({"loss.valid": 2.0} if step % 7 == 0 else {})})


def expected(folder, name="loss.train"):
    return {r["tokens"]: pytest.approx(r[name]) for r in read_metrics(folder) if name in r}


def run_cli(*arguments):
    command = [sys.executable, "-m", "memformers.cli", "dashboard", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_run_finds_the_dashboard_and_is_listed_claimed_and_live(start, tmp_path):
    dashboard = start()
    assert find_running() == api_address(dashboard.url)
    with Tracking(tmp_path, "my-model", {"model": {"mem_len": 7}}) as tracking:
        record(tracking, range(1, 20))
        (run,) = wait_for(dashboard.runs)
        assert run["name"] == "my-model"
        assert run["run_status"]["status"] == "in progress"
        wait_for(lambda: dashboard.curve(run["run_uuid"]) == expected(tmp_path))
    (run,) = dashboard.runs()
    assert run["run_status"]["status"] == "completed"
    data = dashboard.ask(f"/api/v1/run/{run['run_uuid']}")
    assert data["is_claimed"]
    assert data["is_project_run"]
    assert {"key": "model.mem_len", "value": 7}.items() <= data["configs"][0].items()
    assert dashboard.stop() == 0
    assert find_running() == ""


def test_a_dashboard_killed_and_started_again_in_the_middle_misses_nothing(start, tmp_path, capfd):
    dashboard = start()
    with Tracking(tmp_path, "model", {}) as tracking:
        run = read_card(tmp_path).run
        record(tracking, range(1, 30))
        wait_for(lambda: dashboard.runs() and dashboard.curve(run))
        dashboard.stop(signal.SIGKILL)
        record(tracking, range(30, 60))
        dashboard = start(port=dashboard.port)
        record(tracking, range(60, 90))
        wait_for(lambda: len(dashboard.curve(run)) == 89)
        record(tracking, range(90, 100))
    assert dashboard.curve(run) == expected(tmp_path)
    assert dashboard.curve(run, "loss.valid") == expected(tmp_path, "loss.valid")
    assert "not all metrics" not in capfd.readouterr().err


def test_a_dashboard_that_has_forgotten_the_run_gets_all_of_it_again(start, tmp_path):
    dashboard = start()
    with Tracking(tmp_path, "model", {}) as tracking:
        run = read_card(tmp_path).run
        record(tracking, range(1, 30))
        wait_for(lambda: dashboard.runs() and dashboard.curve(run))
        dashboard.stop(signal.SIGKILL)
        dashboard = start(folder=tmp_path / "another", port=dashboard.port)
        record(tracking, range(30, 60))
        wait_for(lambda: dashboard.runs() and len(dashboard.curve(run)) == 59)
        record(tracking, range(60, 100))
    assert dashboard.curve(run) == expected(tmp_path)
    assert dashboard.runs()[0]["name"] == "model"


def test_runs_made_while_none_ran_are_imported_whole_and_only_once(start, tmp_path):
    runs = tmp_path / "runs"
    for name in ("first", "second"):
        (runs / name).mkdir(parents=True)
        with Tracking(runs / name, name, {}) as tracking:
            record(tracking, range(1, 1200))
    dashboard = start("--import", str(runs))
    wait_for(lambda: [r["run_status"]["status"] for r in dashboard.runs()] == ["completed"] * 2)
    assert [r["name"] for r in dashboard.runs()] == ["second", "first"]
    once = dashboard.curve(read_card(runs / "first").run)
    assert 300 <= len(once) <= 1024
    again = run_cli("--folder", tmp_path / "records", "--import", runs)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("imported: ") == 2
    assert dashboard.curve(read_card(runs / "first").run) == once
    assert len(dashboard.runs()) == 2


def test_evaluations_closer_than_the_first_two_stay_apart(start, tmp_path):
    dashboard = start()
    with Tracking(tmp_path, "model", {}) as tracking:
        for step in (100, 300, 490, 500):
            tracking.record({"tokens": step, "loss.valid": float(step)})
    assert dashboard.curve(read_card(tmp_path).run, "loss.valid") == expected(tmp_path, "loss.valid")


def test_a_folder_belongs_to_one_dashboard(start, tmp_path):
    dashboard = start()
    second = run_cli("--folder", tmp_path / "records", "--port", 0)
    assert second.returncode == 2
    assert f"belongs to the dashboard that runs at {dashboard.url}" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    dashboard.stop(signal.SIGKILL)
    start()


def test_a_taken_port_is_said(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_cli("--folder", tmp_path / "records", "--port", port)
    assert result.returncode == 2
    assert result.stderr == (
        f"error: port {port} is taken by another program; choose one with --port, or 0 for any.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "no.such.host.invalid"], "are no address of this machine"),
        (["--port", "99999999"], "are no address of this machine"),
        (["--import", "/gone"], "/gone holds no run"),
        (["--mongo", "127.0.0.1:9"], "no MongoDB answers at 127.0.0.1:9"),
    ],
)
def test_what_cannot_be_started_gets_one_line(arguments, message, tmp_path):
    result = run_cli("--folder", tmp_path / "records", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "lost", ["User", "Project", "Folder", "Run", "Status", "RunStatus", "MetricsModel",
             "MetricsPreferencesModel", "indexes"],
)  # fmt: skip
def test_unreadable_records_are_set_aside_and_said_and_the_runs_stay(lost, start, tmp_path):
    dashboard = start()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        with Tracking(tmp_path / name, name, {}) as tracking:
            record(tracking, range(1, 10))
    assert dashboard.stop() == 0
    for path in (tmp_path / "records" / lost).glob("*.json"):
        path.write_text('{"half":')
    dashboard = start("--import", str(tmp_path / "one"), str(tmp_path / "two"))
    assert "couldn't be read and was set aside as" in dashboard.errors()
    wait_for(lambda: sorted(run["name"] for run in dashboard.runs()) == ["one", "two"])
    wait_for(lambda: dashboard.curve(read_card(tmp_path / "two").run) == expected(tmp_path / "two"))
    (tmp_path / "three").mkdir()
    with Tracking(tmp_path / "three", "three", {}) as tracking:
        record(tracking, range(1, 10))
    assert {"one", "two", "three"} == {run["name"] for run in dashboard.runs()}


def test_beyond_this_machine_it_warns_that_there_is_no_login(start):
    dashboard = start("--host", "0.0.0.0")
    wait_for(lambda: "has no login" in dashboard.errors())
    assert find_running() == api_address(dashboard.url)
