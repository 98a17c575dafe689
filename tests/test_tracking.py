"""Nothing that labml or its server does may stop, slow, hang or crash a run, or lose a record."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from memformers.dashboard.feeding import RECORDS_A_POLL, thin
from memformers.tracking import Tracking, check_dashboard, find_dashboard, flatten, read_metrics
from tests.builders import SMALL_RUN

RECORDS = [{"tokens": 10.0 * i, "loss.train": 3.0 / (i + 1)} for i in range(50)]


class LabmlServer:
    """A server at labml's address that answers every post alike, and keeps what came."""

    def __init__(self, status: int, answer: dict):
        self.posts: list[dict] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler):
                body = handler.rfile.read(int(handler.headers["Content-Length"]))
                self.posts += json.loads(body)
                handler.send_response(status)
                handler.end_headers()
                handler.wfile.write(json.dumps(answer).encode())

            def do_GET(handler):
                handler.send_response(status if status >= 500 else 404)
                handler.end_headers()

            def log_message(self, *_):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/api/v1/default"


@pytest.fixture
def server(request):
    server = LabmlServer(*request.param)
    yield server
    server.server.shutdown()


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
    assert "model.d_model" in configs
    assert "seed" in configs
    assert json.loads((run / "run_log.jsonl").read_text())["status"] == "completed"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("server", [(200, {})], indirect=True)
def test_a_good_dashboard_gets_name_config_records_and_status(server, tmp_path, capfd):
    assert track(tmp_path, server.url) < 5.0
    sent = {k: v for post in server.posts for k, v in post.items()}
    assert sent["name"] == "test"
    assert sent["configs"]["seed"]["value"] == 1
    assert sent["status"]["status"] == "completed"
    steps = [s for p in server.posts for s in p.get("track", {}).get("loss.train", {}).get("step", [])]
    assert steps[-1] == RECORDS[-1]["tokens"]
    assert "repo_remotes" not in sent or sent["repo_remotes"] == []
    assert capfd.readouterr().err == ""


def test_a_closed_port_is_said_before_the_start_and_costs_nothing(tmp_path, capfd):
    assert track(tmp_path, "http://127.0.0.1:9/api/v1/default") < 5.0
    assert read_metrics(tmp_path) == RECORDS
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert "doesn't answer" in said[0]
    assert "not all metrics reached the dashboard" in said[1]


def test_a_server_that_never_answers_neither_stops_nor_holds_a_run(silent_socket, tmp_path, capfd):
    assert track(tmp_path, silent_socket) < 5.0
    assert read_metrics(tmp_path) == RECORDS
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert "doesn't answer" in said[0]


@pytest.mark.parametrize("server", [(500, {})], indirect=True)
def test_a_server_that_answers_500_neither_stops_nor_holds_a_run(server, tmp_path, capfd):
    assert track(tmp_path, server.url) < 5.0
    assert read_metrics(tmp_path) == RECORDS
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert "answers with an error, 500" in said[0]


@pytest.mark.parametrize(
    "server",
    [(200, {"errors": [{"error": "no", "message": "go away"}]}), (200, {"errors": [{"odd": 1}]}), (200, [1])],
    indirect=True,
)
def test_a_server_that_answers_errors_or_nonsense_neither_stops_nor_crashes_a_run(server, tmp_path, capfd):
    assert track(tmp_path, server.url) < 5.0
    assert read_metrics(tmp_path) == RECORDS
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_home_that_cannot_be_written_does_not_matter(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    (tmp_path / "run").mkdir()
    track(tmp_path / "run")
    assert capfd.readouterr().err == ""
    assert labml_log(tmp_path / "run")


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
from memformers.tracking import Tracking
with Tracking(Path({str(tmp_path)!r}), "test", {{}}) as tracking:
    print(tracking._relay.pid, flush=True)
    for i in range(1000):
        tracking.record({{"tokens": i, "loss.train": 1.0}})
        print(i, flush=True)
        time.sleep(0.005)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    relay = int(process.stdout.readline())
    for _ in range(300):
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(read_metrics(tmp_path)) >= last + 1
    deadline = time.monotonic() + 6.0
    while time.monotonic() < deadline and is_running(relay):
        time.sleep(0.1)
    assert not is_running(relay)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"tokens": 1}\n{"tok')
    assert read_metrics(tmp_path) == [{"tokens": 1}]


def test_the_relay_needs_no_torch():
    """It shares the machine with the training: it must start fast and stay small."""
    program = "import sys, memformers.tracking; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_flood_of_records_is_thinned_but_keeps_every_evaluation():
    records = [{"tokens": i, "loss.train": 1.0} for i in range(10 * RECORDS_A_POLL)]
    records[777] = {"tokens": 777, "loss.valid": 1.0}
    kept = thin(records)
    assert RECORDS_A_POLL <= len(kept) <= RECORDS_A_POLL + 1
    assert records[777] in kept
    assert thin(records[:50]) == records[:50]


def test_nested_configs_become_dotted_names():
    assert dict(flatten({"a": {"b": {"c": 1}}, "d": (1, 2)})) == {"a.b.c": 1, "d": (1, 2)}


@pytest.mark.parametrize("server", [(200, {})], indirect=True)
def test_a_dashboard_that_answers_is_no_trouble(server):
    assert check_dashboard(server.url) == ""
    assert "doesn't answer" in check_dashboard("http://127.0.0.1:9/")


def test_what_is_no_web_server_or_no_address_is_trouble_and_no_crash():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def babble():
            connection, _ = listener.accept()
            connection.sendall(b"garbage\r\n")
            connection.close()

        threading.Thread(target=babble, daemon=True).start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        assert "doesn't answer" in check_dashboard(address)
    assert "doesn't answer" in check_dashboard("http://localhost:abc/api")
    assert "doesn't answer" in check_dashboard("http://a b/c")
    with pytest.raises(ValueError, match="no http:// or https:// address"):
        find_dashboard("localhost:5005")


def test_a_token_in_the_address_is_written_nowhere(tmp_path, capfd):
    track(tmp_path, "http://me:hidden@127.0.0.1:9/api/v1/secret", seconds=0.5)
    assert "127.0.0.1:9" in capfd.readouterr().err
    for path in tmp_path.glob("*"):
        if path.is_file() and path.name != "labml.log":  # labml's own words
            assert "secret" not in path.read_text(), path


@pytest.mark.parametrize("kind", ["closed", "silent", "500", "errors"])
def test_a_training_ends_within_five_seconds_of_its_last_step(kind, tmp_path, silent_socket):
    answers = {"500": (500, {}), "errors": (200, {"errors": [{"error": "no", "message": "go away"}]})}
    server = LabmlServer(*answers[kind]) if kind in answers else None
    url = server.url if server else silent_socket if kind == "silent" else "http://127.0.0.1:9/api/v1/x"
    command = [sys.executable, "-m", "memformers.cli", "train", "--out", str(tmp_path / "run")]
    process = subprocess.run(
        [*command, "--dashboard", url, *SMALL_RUN], capture_output=True, text=True, check=False, timeout=120
    )
    ended = time.time()
    assert process.returncode == 0, process.stderr
    assert ended - (tmp_path / "run" / "metrics.jsonl").stat().st_mtime < 5.0
    if server:
        server.server.shutdown()
