"""Metrics of a run: kept in its folder, and shown by labml.

``metrics.jsonl`` is the source of truth: one JSON object a line, flushed as it is recorded. labml and
its dashboard get the same records from a process of its own, the relay, which reads that file: it
feeds labml's tracker, and any dashboard that runs. So nothing that labml or a dashboard does (wait,
retry, fail, keep a copy of all output) can stop, slow or crash a training, and a training that is
killed leaves a relay that ends by itself.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from memformers.dashboard.discovery import AUTO, OFF, find_running, page_address
from memformers.dashboard.feeding import SHARE, feed, new_records, thin
from memformers.dashboard.runs import close_card, open_card, read_card
from memformers.network import get
from memformers.processes import module_command, module_environment
from memformers.run_folder import CARD, LOG, METRICS

DASHBOARD = "MEMFORMERS_DASHBOARD"
"""The environment variable that tells a training, and its relay, which dashboard to use."""
LABML_URL = "labml_app_url"
"""The one by which labml itself finds its server."""
CHECK_SECONDS = 2.0
"""How long a dashboard may take to answer before a run starts."""
DRAIN_SECONDS = 3.0
"""How long labml may take after the last record; then the relay ends, whatever is left."""
UNSENT = 3
"""The relay's exit code when a dashboard didn't take everything in that time."""
POLL_SECONDS = 1.0


class Tracking:
    """Records a run's metrics, as a context: entered before the first step, left after the last.

    ``folder`` is the run's, ``name`` what labml calls it, ``config`` its hyper-parameters as nested
    dicts, ``dashboard`` what :func:`find_dashboard` takes. An address may hold a token: it is written
    nowhere.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], dashboard: str = ""):
        self.folder = folder
        self.name = name
        self.config = config
        self.dashboard = find_dashboard(dashboard)

    def __enter__(self) -> "Tracking":
        if self.dashboard not in (AUTO, OFF) and (trouble := check_dashboard(self.dashboard)):
            host = page_address(self.dashboard).partition("://")[2]
            _say(f"the dashboard at {host} {trouble}; training goes on without waiting.")
        self._file = open(self.folder / METRICS, "a", encoding="utf-8")
        card = open_card(self.folder, self.name, dict(flatten(self.config)))
        if page := dashboard_page(self.dashboard):
            print(f"dashboard: {page}/run/{card.run}", flush=True)
        self._relay = start_relay(self.folder, self.dashboard)
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
        with contextlib.suppress(OSError):  # a full disk was said when the record was written
            self._file.close()
        status = "completed" if error is None else f"crashed: {kind.__name__ if kind else ''} {error}"
        with contextlib.suppress(OSError, ValueError):
            close_card(self.folder, status)
        exit_code = stop_relay(self._relay, status)
        if exit_code == UNSENT and self.dashboard != OFF:
            _say(
                f"not all metrics reached the dashboard; all are in {self._file.name}, and "
                f"memformers dashboard --import {self.folder} brings them there."
            )
        elif exit_code not in (0, UNSENT):
            log = self.folder / LOG
            _say(
                f"labml stopped with exit code {exit_code} (see {log}); all metrics are in {self._file.name}."
            )


def find_dashboard(wish: str) -> str:
    """Where a run is sent: the labml server's address, ``http://host:port/api/v1/token``; "off"; or
    "auto", to a dashboard that runs on this machine whenever there is one.

    An empty wish is what the environment says, ours or labml's own, else "auto". ValueError for a word
    that is none of these.
    """
    wish = wish or os.environ.get(DASHBOARD, "").strip() or os.environ.get(LABML_URL, "").strip() or AUTO
    if wish not in (AUTO, OFF) and not wish.startswith(("http://", "https://")):
        raise ValueError(f"dashboard={wish!r} is no http:// or https:// address, nor auto or off.")
    return wish


def dashboard_page(dashboard: str) -> str:
    """The page of the dashboard that a run now goes to, or an empty string."""
    api = find_running() if dashboard == AUTO else "" if dashboard == OFF else dashboard
    return page_address(api)


def check_dashboard(url: str) -> str:
    """What is wrong with the labml server at ``url``, or an empty string; within two seconds."""
    try:
        status, _ = get(url, CHECK_SECONDS)
    except OSError as error:
        return f"doesn't answer ({error})"
    # labml's address takes posts only, so "not found" is a good answer.
    return f"answers with an error, {status}" if status >= 500 else ""


def start_relay(folder: Path, dashboard: str) -> "subprocess.Popen[str]":
    """Start the process that feeds labml from ``folder``; its input's end is its sign to end."""
    with open(folder / LOG, "a", encoding="utf-8") as log:
        return subprocess.Popen(
            module_command("memformers.tracking", str(folder)),
            env=module_environment() | {DASHBOARD: dashboard, LABML_URL: ""},
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
    """Feed labml and a dashboard with a run's records until standard input ends, then end within
    DRAIN_SECONDS; exits with UNSENT where a dashboard didn't take everything by then."""
    ended, status = threading.Event(), ["killed"]

    def wait_for_end() -> None:
        status[0] = sys.stdin.read() or "killed"
        if status[0] == "killed":  # else the training has said so itself
            with contextlib.suppress(OSError, ValueError):
                close_card(folder, status[0])
        ended.set()
        time.sleep(DRAIN_SECONDS)
        os._exit(UNSENT)  # whatever labml is waiting for, it had its time

    threading.Thread(target=wait_for_end, daemon=True).start()
    is_sent = [False]
    sender = threading.Thread(target=send, args=(folder, os.environ[DASHBOARD], ended, is_sent), daemon=True)
    sender.start()
    give_labml_a_home(folder)

    from labml import experiment, lab, tracker

    card = read_card(folder)
    lab.configure({"path": str(folder), "experiments_path": "labml", "check_repo_dirty": False})
    experiment.create(name=card.name, writers={"file"}, python_file=str(folder / CARD))
    experiment.configs(dict(card.config))
    with contextlib.suppress(RunEndedBadly), experiment.start():
        with open(folder / METRICS, encoding="utf-8") as file:
            more, rest = True, 0.0
            while more:
                more = not ended.wait(max(POLL_SECONDS, rest))
                begun = time.thread_time()
                for record in thin(new_records(file)):
                    tracker.save(int(record.pop("tokens")), record)
                rest = (time.thread_time() - begun) / SHARE
        if status[0] != "completed":
            raise RunEndedBadly(status[0])  # labml marks the run as crashed, with this reason
    for thread in [t for t in threading.enumerate() if t not in (threading.current_thread(), sender)]:
        if not thread.daemon:
            thread.join()  # labml's writer; the watchdog above bounds the wait
    sender.join()
    if not is_sent[0]:
        os._exit(UNSENT)


def send(folder: Path, dashboard: str, ended: threading.Event, is_sent: list[bool]) -> None:
    """Feed a dashboard; ``is_sent`` tells, at the end, whether it got everything or there is none."""
    find: Callable[[], str] = find_running if dashboard == AUTO else lambda: dashboard
    is_sent[0] = dashboard == OFF or feed(folder, find, ended)


class RunEndedBadly(Exception):
    """Tells labml that the training didn't end well."""


def give_labml_a_home(folder: Path) -> None:
    """Let labml keep its ``~/.labml`` in the run's folder where the home can't be written."""
    try:
        (Path.home() / ".labml").mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        os.environ["HOME"] = str(folder / "labml")


if __name__ == "__main__":
    try:
        relay(Path(sys.argv[1]))
    except Exception:  # the training must not care; the log says it, and the exit code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
