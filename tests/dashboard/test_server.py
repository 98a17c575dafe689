"""The dashboard is started, found, stopped and started again, and no run loses a point by that."""

import json
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from labml_db import Key

from memformers.common.errors import UserError
from memformers.dashboard.labml import from_text, to_text, use_records
from memformers.dashboard.pages import bring_in
from memformers.runs.card import read_card
from memformers.runs.metrics import read_metrics
from memformers.runs.reader import find_runs
from memformers.tracking.discovery import announce, api_address, comparison_id, sent_to
from memformers.tracking.recorder import Tracking
from tests.dashboard.conftest import Client, DashboardHere
from tests.processes import program, run, start, wait_for

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


def answered(condition):
    """Wait for what a dashboard will answer; it isn't asked all the time."""
    return wait_for(lambda: time.sleep(0.2) or condition())


@contextmanager
def command(folder, *arguments, end=signal.SIGKILL):
    """``memformers dashboard`` as a user starts it, in a separate process."""
    folder.mkdir(exist_ok=True)
    pipe = subprocess.PIPE
    line = program("dashboard", "--folder", folder, "--port", 0, *arguments)
    process = start(line, stdout=pipe, stderr=pipe)
    try:
        yield Client(process.stdout.readline().split()[1])
        process.send_signal(end)
        err = process.communicate(timeout=20)[1]
        assert "Traceback" not in err
        assert end == signal.SIGKILL or ("has no login" in err, process.returncode) == (True, 0)
    finally:
        process.kill()


def test_a_second_dashboard_command_reuses_the_first(tmp_path, capsys):
    folder = tmp_path / "records"
    with command(folder, "--host", "0.0.0.0", end=signal.SIGINT) as dashboard:
        assert sent_to("auto") == api_address(dashboard.url)
        settings = {"model": {"mem_len": 7, "dropout": 0.0}}
        with Tracking(tmp_path, "my-model", settings) as tracking:
            (listed,) = answered(dashboard.runs)
            page = f"{dashboard.url}/comparisons/{comparison_id(tmp_path)}"
            assert capsys.readouterr().out == f"dashboard: {page}\n"
            record(tracking, range(1, 20))
            assert (listed["name"], listed["run_status"]["status"]) == ("my-model", "in progress")
            answered(lambda: dashboard.curve(listed["run_uuid"]) == expected(tmp_path))
        (listed,) = dashboard.runs()
        assert listed["run_status"]["status"] == "completed"
        data = dashboard.ask(f"/api/v1/run/{listed['run_uuid']}")
        assert (data["is_claimed"], data["is_project_run"]) == (True, True)
        (mem_len, _) = data["configs"]
        assert {"key": "mem_len", "value": 7, "is_explicitly_specified": True}.items() <= mem_len.items()
        second = run("dashboard", "--folder", folder, "--port", 0)
        assert second.says(f"belongs to the dashboard that runs at {dashboard.url}")
        assert len(second.err.splitlines()) == 1
        recorded(tmp_path / "runs" / "one")
        bringing = run("dashboard", "--folder", folder, "--import", tmp_path / "runs")
        assert (bringing.code, bringing.out.count("imported: one")) == (0, 1)
        assert {entry["name"] for entry in dashboard.runs()} == {"one", "my-model"}
    assert sent_to("auto") == ""


def test_a_late_dashboard_misses_nothing(tmp_path, capfd):
    folder = tmp_path / "model"
    records = tmp_path / "records"
    folder.mkdir()
    with ExitStack() as last, Tracking(folder, "model", {}, "auto") as tracking:
        card = read_card(folder)
        record(tracking, range(1, 30))
        with DashboardHere(records) as dashboard:
            announce(dashboard.url)
            answered(lambda: dashboard.runs() and dashboard.curve(card.run))
        record(tracking, range(30, 60))
        dashboard = last.enter_context(DashboardHere(records, port=dashboard.port))
        record(tracking, range(60, 90))
        answered(lambda: len(dashboard.curve(card.run)) == 89)
        use_records(tmp_path / "other")  # the run is forgotten, and comes again
        record(tracking, range(90, 100))
        answered(lambda: dashboard.runs() and len(dashboard.curve(card.run)) == 99)
        for name in ("loss.train", "loss.valid"):
            assert dashboard.curve(card.run, name) == expected(folder, name)
    assert "not all metrics" not in capfd.readouterr().err


@pytest.mark.filterwarnings("default:.*labml.json")
def test_earlier_runs_are_imported_once(quick_runs, tmp_path, capsys):
    names = ("broken-card", "five", "huge", "first")
    card, five, huge, good = [recorded(tmp_path / "runs" / name, range(1, 1200)) for name in names]
    assert find_runs(tmp_path / "runs") == [card, five, huge, good]
    (card / "labml.json").write_text("{")
    for folder, line in ((five, "5"), (huge, '{"tokens": 1, "x": 1' + "0" * 400 + "}")):
        (folder / "metrics.jsonl").write_text(f"{line}\n")
    with DashboardHere(tmp_path / "records") as dashboard:
        for _ in range(2):
            bring_in(find_runs(tmp_path / "runs"), dashboard.url)
            printed = capsys.readouterr().err
            assert [f for f in (card, five, huge) if f"{f} was not imported." not in printed] == []
            (listed,) = [run for run in dashboard.runs() if run["name"] == "first"]
            assert listed["run_status"]["status"] == "completed"
            assert 300 <= len(dashboard.curve(read_card(good).run)) <= 1024
            assert len(dashboard.curve(read_card(good).run, "loss.valid")) == 1199 // 7


@pytest.mark.long
def test_imports_stay_below_the_request_limit(tmp_path):
    folder = recorded(tmp_path / "long", ())
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, 3000):
            values = {f"loss.{n}": step / 3 for n in range(20)}
            values |= {"loss.valid": 2.0} if step % 300 == 0 else {}
            file.write(json.dumps({"tokens": step, **values}) + "\n")
    with DashboardHere(tmp_path / "records") as dashboard:
        bring_in([folder], dashboard.url)
        run = read_card(folder).run
        assert max(dashboard.curve(run, "loss.19")) > 2990
        assert dashboard.curve(run, "loss.valid") == expected(folder, "loss.valid")


def test_records_that_are_closer_than_the_first_two_are_kept(quick_runs, tmp_path):
    with Tracking(tmp_path, "run", {}, "off") as tracking:
        for step in (100, 300, 490, 500):
            tracking.record({"tokens": step, "loss.valid": float(step)})
    with DashboardHere(tmp_path / "records") as dashboard:
        bring_in([tmp_path], dashboard.url)
        assert dashboard.curve(read_card(tmp_path).run, "loss.valid") == expected(tmp_path, "loss.valid")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--host no.such.host.invalid", "host='no.such.host.invalid'"), ("--port 99999999", "port=99999999"),
     ("--port {busy}", "port {busy}"), ("--import /gone", "/gone")],
)  # fmt: skip
def test_what_cannot_be_started_gets_one_line(arguments, message, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        busy = listener.getsockname()[1]
        ended = run("dashboard", "--folder", tmp_path / "records", *arguments.format(busy=busy).split())
    assert ended.says(message.format(busy=busy)), ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [("User", ""), ("Project", '{"half": '), ("Project", '{"$array": "!"}'), ("indexes", "[1]")],
)
def test_an_unreadable_record_is_a_one_line_error(name, text, tmp_path):
    use_records(tmp_path)
    for path in tmp_path.glob(f"{name}/*.json"):
        path.write_text(text)
    with pytest.raises(UserError, match=f"{tmp_path}/{name}/.*can't be read.*Delete {tmp_path}, .*--import"):
        use_records(tmp_path)


def test_a_partly_sent_run_is_sent_again(quick_runs, tmp_path):
    recorded(tmp_path / "runs" / "one")
    records = tmp_path / "records"
    with DashboardHere(records) as dashboard:
        bring_in([tmp_path / "runs" / "one"], dashboard.url)
        assert len(dashboard.runs()) == 1
    for path in records.glob("RunStatus/*.json"):
        path.unlink()
    with DashboardHere(records) as dashboard:
        assert dashboard.runs() == []
        bring_in([tmp_path / "runs" / "one"], dashboard.url)
        assert [entry["name"] for entry in dashboard.runs()] == ["one"]


def test_what_labml_keeps_in_a_record_is_read_again():
    record = {
        "key": Key("Run:1"), "keys": {"a": Key("Run:2")}, "names": {"x", "y"}, "forever": float("inf"),
        "one": np.float64(0.1), "list": [1, None, "é"],
    }  # fmt: skip
    back = from_text(to_text(record | {"steps": np.array([1.0, 2.5])}))
    assert back.pop("steps").tolist() == [1.0, 2.5]
    assert back == record
