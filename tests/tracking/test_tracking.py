"""Whatever labml or its server does, a run does not stop, slow down, hang or crash, and loses no record."""

import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from unittest.mock import Mock

import pytest

from memformers.runs.card import read_card
from memformers.runs.metrics import read_metrics
from memformers.tracking import recorder, relay
from memformers.tracking.recorder import Tracking
from tests.processes import Server, is_running, start, wait_for

RECORDS = [{"tokens": 10.0 * i, "loss.train": 3.0 / (i + 1)} for i in range(50)]
# By their tokens; labml keeps them in float32.
LOSSES = {record["tokens"]: pytest.approx(record["loss.train"]) for record in RECORDS}


@pytest.fixture(autouse=True)
def _no_dashboard(tmp_path_factory, monkeypatch):
    """No dashboard runs, as far as this user's files say."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


def labml_server(status, answer):
    """A server at labml's address that answers every post alike."""

    def respond(handler, body):
        missing = handler.command == "GET" and status < 500
        return (404, b"") if missing else (status, json.dumps(answer).encode())

    return Server(respond)


def track(folder, url="auto"):
    """Record for a while, as a training would; its end takes no longer than it may."""
    with Tracking(folder, "test", {"model": {"d_model": 8}, "seed": 1}, url) as tracking:
        for record in RECORDS:
            tracking.record(record)
            time.sleep(0.01)
        end = time.monotonic()
    assert time.monotonic() - end < 5.0
    assert read_metrics(folder) == RECORDS


def test_dashboard_off_starts_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(relay.subprocess, "Popen", None)
    track(tmp_path, "off")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labml.json", "metrics.jsonl"]
    assert read_card(tmp_path).status == "completed"


def test_labml_gets_every_record_without_touching_home(tmp_path, monkeypatch, capfd):
    """Of two runs that removed the same entry from the list of projects in a shared home, one lost labml."""
    gone = tmp_path / "home/.labml/projects/gone.txt"
    folder = tmp_path / "run"
    gone.parent.mkdir(parents=True)
    gone.write_text(str(tmp_path / "no such project"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder.mkdir()
    track(folder)
    run = next((folder / "labml").glob("test/*"))
    losses = {}
    for line in (run / "log.jsonl").read_text().splitlines():
        for step, (loss,) in json.loads(line)["track"].get("loss.train", []):
            losses[step] = loss
    assert losses == LOSSES
    assert "d_model" in (run / "configs.yaml").read_text()
    assert json.loads((run / "run_log.jsonl").read_text())["status"] == "completed"
    assert capfd.readouterr().err == ""
    # Outside of its folder, the run wrote nothing.
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert files - {*folder.rglob("*")} == {gone}


def test_a_good_dashboard_gets_name_config_records_and_status(tmp_path, capfd):
    with labml_server(200, {}) as server:
        track(tmp_path, f"http://{server.host}/api/v1/default")
    # A later packet replaces what an earlier one said, but for the losses.
    sent = {}
    losses = {}
    for body in server.bodies:
        for packet in json.loads(body or "[]"):
            sent |= packet
            if packet.get("track"):
                track_of_loss = packet["track"]["loss.train"]
                losses |= zip(track_of_loss["step"], track_of_loss["value"], strict=True)
    assert sent["name"] == "test"
    assert sent["configs"]["seed"]["value"] == 1
    assert sent["status"]["status"] == "completed"
    assert losses == LOSSES
    assert not sent.get("repo_remotes")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("broken", "warning"),
    [("http://me:hidden@127.0.0.1:9/api/v1/secret", "127.0.0.1:9 doesn't answer"),
     # It takes connections and never answers.
     (socket.create_server, "doesn't answer"),
     ((500, {}), "answers with an error, 500"), ((200, {"errors": [{"message": "go away"}]}), ""),
     ((200, [1]), "")],
)  # fmt: skip
def test_a_broken_dashboard_does_not_stop_a_run(broken, warning, tmp_path, capfd):
    with ExitStack() as stack:
        if broken is socket.create_server:
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/api/v1/default"
        elif isinstance(broken, tuple):
            url = f"http://{stack.enter_context(labml_server(*broken)).host}/api/v1/default"
        else:
            url = broken
        track(tmp_path, url)
    *warnings, last = capfd.readouterr().err.splitlines()
    if warning:
        (first,) = warnings
        assert warning in first
    else:
        assert warnings == []
    assert "not all metrics" in last
    # No password is in any file, but for the log with labml's own words.
    for path in tmp_path.glob("*"):
        if path.is_file() and path.name != "labml.log":
            assert "secret" not in path.read_text()


def test_a_run_continues_without_a_process_for_labml(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(recorder, "start_relay", Mock(side_effect=BlockingIOError("no process is left")))
    track(tmp_path)
    assert "labml gets nothing" in capfd.readouterr().err


def test_a_relay_that_is_killed_does_not_matter(tmp_path, capfd):
    with Tracking(tmp_path, "test", {}, "auto") as tracking:
        tracking.relay.kill()
        tracking.relay.wait()
        tracking.record(RECORDS[0])
    assert read_metrics(tmp_path) == RECORDS[:1]
    assert "labml stopped with exit code -9" in capfd.readouterr().err


def test_a_killed_training_loses_no_record(tmp_path):
    """The relay shares the machine with the training: it must start fast and stay small, without PyTorch."""
    program = f"""
import sys, time
from pathlib import Path
from memformers.tracking.recorder import Tracking
with Tracking(Path({str(tmp_path)!r}), "test", {{}}, "auto") as tracking:
    print('torch' in sys.modules, tracking.relay.pid, flush=True)
    for i in range(1000):
        tracking.record({{"tokens": i, "loss.train": 1.0}})
        print(i, flush=True)
        time.sleep(0.005)
"""
    process = start([sys.executable, "-c", program], stdout=subprocess.PIPE)
    has_torch, relay = process.stdout.readline().split()
    assert has_torch == "False"
    for _ in range(300):
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(read_metrics(tmp_path)) >= last + 1
    wait_for(lambda: not is_running(int(relay)), 6.0)
    assert read_card(tmp_path).status == "killed"
