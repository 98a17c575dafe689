"""Metrics of a run: kept in its folder, and shown by labml.

``metrics.jsonl`` is the source of truth: one JSON object a line, flushed as it is recorded. labml
gets the same records from a process of its own, the relay, which reads that file and feeds labml's
tracker. So nothing that labml or its server does (wait, retry, fail, keep a copy of all output) can
stop, slow or crash a training, and a training that is killed leaves a relay that ends by itself.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from memformers.files import write_json
from memformers.network import get
from memformers.processes import module_command, module_environment

LABML_URL = "labml_app_url"
"""The environment variable by which labml finds its server."""
METRICS, RELAY_CONFIG, RELAY_LOG = "metrics.jsonl", "labml.json", "labml.log"
CHECK_SECONDS = 2.0
"""How long a dashboard may take to answer before a run starts."""
DRAIN_SECONDS = 3.0
"""How long labml may take after the last record; then the relay ends, whatever is left."""
UNSENT = 3
"""The relay's exit code when labml's server didn't take everything in that time."""
POLL_SECONDS = 1.0
RECORDS_A_POLL = 100
"""labml gets at most so many records a poll, evenly thinned; evaluations are never left out."""


class Tracking:
    """Records a run's metrics, as a context: entered before the first step, left after the last.

    ``folder`` is the run's, ``name`` what labml calls it, ``config`` its hyper-parameters as nested
    dicts, ``dashboard`` the address of a labml server, ``http://host:port/api/v1/token`` (empty:
    labml's own ``$labml_app_url``, else none). The address may hold a token: it is written nowhere.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], dashboard: str = ""):
        self.folder = folder
        self.name = name
        self.config = config
        self.dashboard = find_dashboard(dashboard)

    def __enter__(self) -> "Tracking":
        if self.dashboard and (trouble := check_dashboard(self.dashboard)):
            host = urllib.parse.urlsplit(self.dashboard).netloc.rpartition("@")[2]
            _say(f"the dashboard at {host} {trouble}; training goes on without waiting.")
        self._file = open(self.folder / METRICS, "a", encoding="utf-8")
        self._relay = start_relay(self.folder, self.name, self.config, self.dashboard)
        return self

    def record(self, values: Mapping[str, float]) -> None:
        """Keep one record; ``tokens`` in it is the step that labml draws it at."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        status = "completed" if error is None else f"crashed: {kind.__name__ if kind else ''} {error}"
        exit_code = stop_relay(self._relay, status)
        if exit_code == UNSENT and self.dashboard:
            _say(f"not all metrics reached the dashboard; all are in {self._file.name}.")
        elif exit_code not in (0, UNSENT):
            log = self.folder / RELAY_LOG
            _say(
                f"labml stopped with exit code {exit_code} (see {log}); all metrics are in {self._file.name}."
            )


def find_dashboard(url: str) -> str:
    """The address ``url``, or labml's own from the environment, or none; ValueError for one that is
    no web address."""
    url = url or os.environ.get(LABML_URL, "").strip()
    if url and not url.startswith(("http://", "https://")):
        raise ValueError(f"dashboard={url!r} is no http:// or https:// address.")
    return url


def check_dashboard(url: str) -> str:
    """What is wrong with the labml server at ``url``, or an empty string; within two seconds."""
    try:
        status, _ = get(url, CHECK_SECONDS)
    except OSError as error:
        return f"doesn't answer ({error})"
    # labml's address takes posts only, so "not found" is a good answer.
    return f"answers with an error, {status}" if status >= 500 else ""


def start_relay(
    folder: Path, name: str, config: Mapping[str, Any], dashboard: str
) -> "subprocess.Popen[str]":
    """Start the process that feeds labml from ``folder``; its input's end is its sign to end."""
    write_json(folder / RELAY_CONFIG, {"name": name, "config": dict(flatten(config))})
    with open(folder / RELAY_LOG, "a", encoding="utf-8") as log:
        return subprocess.Popen(
            module_command("memformers.tracking", str(folder)),
            env=module_environment() | {LABML_URL: dashboard},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the training, which then ends the relay
        )


def stop_relay(process: "subprocess.Popen[str]", status: str) -> int:
    """Tell the relay how the run ended, wait a few seconds; returns its exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(status, timeout=DRAIN_SECONDS + 1.0)
    if process.poll() is None:
        process.kill()
    return process.wait()


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested dicts as pairs of dotted names and plain values, for labml's flat configs."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """All whole records of a run; a last line that a crash cut short is left out."""
    path = folder / METRICS
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _say(message: str) -> None:
    print(f"tracking: {message}", file=sys.stderr)


# What follows runs in the relay's process.


def relay(folder: Path) -> None:
    """Feed labml with a run's records until standard input ends, then end within DRAIN_SECONDS."""
    ended, status = threading.Event(), ["killed"]

    def wait_for_end() -> None:
        status[0] = sys.stdin.read() or "killed"
        ended.set()
        time.sleep(DRAIN_SECONDS)
        os._exit(UNSENT)  # whatever labml is waiting for, it had its time

    threading.Thread(target=wait_for_end, daemon=True).start()
    settings = json.loads((folder / RELAY_CONFIG).read_text(encoding="utf-8"))
    dashboard = os.environ[LABML_URL]
    give_labml_a_home(folder)

    from labml import experiment, lab, tracker

    lab.configure(
        {
            "path": str(folder),
            "experiments_path": "labml",
            "check_repo_dirty": False,
            "app_url": dashboard or None,
            "app_open_browser": False,
            "app_track_frequency": POLL_SECONDS,
        }
    )
    writers = {"file", "app"} if dashboard else {"file"}
    experiment.create(name=settings["name"], writers=writers, python_file=str(folder / RELAY_CONFIG))
    experiment.configs(settings["config"])
    with contextlib.suppress(RunEndedBadly), experiment.start():
        with open(folder / METRICS, encoding="utf-8") as file:
            more = True
            while more:
                more = not ended.wait(POLL_SECONDS)
                for record in thin(new_records(file)):
                    tracker.save(int(record.pop("tokens")), record)
        if status[0] != "completed":
            raise RunEndedBadly(status[0])  # labml marks the run as crashed, with this reason
    for thread in threading.enumerate():  # labml's senders; the watchdog above bounds the wait
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


class RunEndedBadly(Exception):
    """Tells labml that the training didn't end well."""


def give_labml_a_home(folder: Path) -> None:
    """Let labml keep its ``~/.labml`` in the run's folder where the home can't be written."""
    try:
        (Path.home() / ".labml").mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        os.environ["HOME"] = str(folder / "labml")


def new_records(file: IO[str]) -> list[dict[str, float]]:
    """The whole lines that were appended since the last call."""
    records: list[dict[str, float]] = []
    while True:
        start = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(start)
            return records
        records.append(json.loads(line))


def thin(records: list[dict[str, float]]) -> list[dict[str, float]]:
    """At most RECORDS_A_POLL of the training's records, evenly spread, and all evaluations."""
    stride = -(-len(records) // RECORDS_A_POLL) or 1
    return [r for i, r in enumerate(records) if i % stride == 0 or "loss.valid" in r]


if __name__ == "__main__":
    try:
        relay(Path(sys.argv[1]))
    except Exception:  # the training must not care; the log says it, and the exit code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
