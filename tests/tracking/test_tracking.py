"""Nothing that labml or its server does may stop, slow, hang or crash a run, or lose a record."""

import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from memformers.runs.folder import read_metrics
from memformers.tracking.discovery import check_dashboard, find_dashboard
from memformers.tracking.feeding import RECORDS_A_POLL, thin
from memformers.tracking.recorder import Tracking
from tests.processes import Server, finish, is_running, start, wait_for

RECORDS = [{"tokens": 10.0 * i, "loss.train": 3.0 / (i + 1)} for i in range(50)]


class LabmlServer(Server):
    """A server at labml's address that answers every post alike."""

    def __init__(self, status: int, answer: object):
        def respond(handler, body):
            missing = handler.command == "GET" and status < 500
            return (404, b"") if missing else (status, json.dumps(answer).encode())

        super().__init__(respond)
        self.url = f"http://{self.host}/api/v1/default"


@pytest.fixture
def silent_socket():
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/api/v1/default"


def track(folder, url="", seconds=2.0, records=RECORDS):
    """Record for a while, as a training would; returns how long the end took."""
    with Tracking(folder, "test", {"model": {"d_model": 8}, "seed": 1}, url) as tracking:
        for record in records:
            tracking.record(record)
            time.sleep(seconds / len(records))
        end = time.monotonic()
    return time.monotonic() - end


def labml_log(folder):
    """All values of the records in labml's own file."""
    lines = next((folder / "labml").glob("*/*/log.jsonl")).read_text().splitlines()
    values = [v for line in lines for v in json.loads(line)["track"].get("loss.train", [])]
    return {step: value[0] for step, value in values}


def test_without_a_dashboard_the_file_and_labml_have_every_record(tmp_path, capfd):
    assert track(tmp_path) < 5.0
    assert read_metrics(tmp_path) == RECORDS
    assert labml_log(tmp_path) == {r["tokens"]: pytest.approx(r["loss.train"]) for r in RECORDS}
    run = next((tmp_path / "labml").glob("test/*"))
    configs = (run / "configs.yaml").read_text()
    assert all(name in configs for name in ("model.d_model", "seed"))
    assert json.loads((run / "run_log.jsonl").read_text())["status"] == "completed"
    assert capfd.readouterr().err == ""


def test_a_good_dashboard_gets_name_config_records_and_status(tmp_path, capfd):
    with LabmlServer(200, {}) as server:
        assert track(tmp_path, server.url) < 5.0
    posts = [packet for body in server.bodies if body for packet in json.loads(body)]
    sent = {name: value for packet in posts for name, value in packet.items()}
    assert sent["name"] == "test"
    assert sent["configs"]["seed"]["value"] == 1
    assert sent["status"]["status"] == "completed"
    steps = [s for p in posts for s in p.get("track", {}).get("loss.train", {}).get("step", [])]
    assert steps[-1] == RECORDS[-1]["tokens"]
    assert "repo_remotes" not in sent or sent["repo_remotes"] == []
    assert capfd.readouterr().err == ""


REFUSAL = {"errors": [{"error": "no", "message": "go away"}]}


@pytest.mark.parametrize(
    ("kind", "said_before", "said_after"),
    [("closed", "doesn't answer", "not all metrics reached the dashboard"),
     ("silent", "doesn't answer", "not all metrics"),
     ((500, {}), "answers with an error, 500", "not all metrics"),
     ((200, REFUSAL), "", "not all metrics"),
     ((200, {"errors": [{"odd": 1}]}), "", "not all metrics"),
     ((200, [1]), "", "not all metrics")],
)  # fmt: skip
def test_no_dashboard_however_broken_stops_or_holds_a_run(
    kind, said_before, said_after, silent_socket, tmp_path, capfd
):
    closed = "http://127.0.0.1:9/api/v1/default"
    with ExitStack() as stack:
        url = {"closed": closed, "silent": silent_socket}.get(kind) if isinstance(kind, str) else None
        assert track(tmp_path, url or stack.enter_context(LabmlServer(*kind)).url, seconds=0.5) < 5.0
    assert read_metrics(tmp_path) == RECORDS
    *before, after = capfd.readouterr().err.splitlines()
    assert len(before) == bool(said_before)
    assert all(said_before in line for line in before)
    assert said_after in after


@pytest.mark.parametrize("home", ["home", "home/.labml/projects/gone.txt"])
def test_labml_neither_needs_nor_changes_the_home_that_runs_share(home, tmp_path, monkeypatch, capfd):
    """A home that is a file can't be written. Of two runs that removed the same entry from the list of
    projects in a shared one, one lost labml."""
    (tmp_path / home).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / home).write_text(str(tmp_path / "no such project"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "run").mkdir()
    track(tmp_path / "run")
    assert capfd.readouterr().err == ""
    assert labml_log(tmp_path / "run")
    assert [p for p in tmp_path.rglob("*") if p.is_file() and tmp_path / "run" not in p.parents] == [
        tmp_path / home
    ]


def test_a_relay_that_is_killed_does_not_matter(tmp_path, capfd):
    with Tracking(tmp_path, "test", {}) as tracking:
        tracking.record(RECORDS[0])
        tracking._relay.kill()
        tracking._relay.wait()
        for record in RECORDS[1:]:
            tracking.record(record)
    assert read_metrics(tmp_path) == RECORDS
    assert "labml stopped with exit code -9" in capfd.readouterr().err


def test_a_training_that_is_killed_loses_no_record_and_leaves_no_process(tmp_path):
    program = f"""
import sys, time
from pathlib import Path
from memformers.tracking.recorder import Tracking
with Tracking(Path({str(tmp_path)!r}), "test", {{}}) as tracking:
    print(tracking._relay.pid, flush=True)
    for i in range(1000):
        tracking.record({{"tokens": i, "loss.train": 1.0}})
        print(i, flush=True)
        time.sleep(0.005)
"""
    process = start([sys.executable, "-c", program], stdout=subprocess.PIPE)
    relay = int(process.stdout.readline())
    for _ in range(300):
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(read_metrics(tmp_path)) >= last + 1
    wait_for(lambda: not is_running(relay), 6.0)


def test_the_relay_needs_no_torch():
    """It shares the machine with the training: it must start fast and stay small."""
    program = "import sys, memformers.tracking.recorder; sys.exit('torch' in sys.modules)"
    assert finish([sys.executable, "-c", program]).returncode == 0


def test_a_flood_of_records_is_thinned_but_keeps_every_evaluation():
    records = [{"tokens": i, "loss.train": 1.0} for i in range(10 * RECORDS_A_POLL)]
    records[777] = {"tokens": 777, "loss.valid": 1.0}
    kept = thin(records)
    assert RECORDS_A_POLL <= len(kept) <= RECORDS_A_POLL + 1
    assert records[777] in kept
    assert thin(records[:50]) == records[:50]


def test_what_is_no_address_is_trouble_and_no_crash():
    assert "doesn't answer" in check_dashboard("http://localhost:abc/api")
    assert "doesn't answer" in check_dashboard("http://a b/c")
    with pytest.raises(ValueError, match="an address with http:// or https://"):
        find_dashboard("localhost:5005")


def test_a_token_in_the_address_is_written_nowhere(tmp_path, capfd):
    track(tmp_path, "http://me:hidden@127.0.0.1:9/api/v1/secret", seconds=0.5)
    assert "127.0.0.1:9" in capfd.readouterr().err
    for path in tmp_path.glob("*"):
        if path.is_file() and path.name != "labml.log":  # labml's own words
            assert "secret" not in path.read_text(), path
