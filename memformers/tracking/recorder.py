"""Metrics of a run: written to its folder, and shown by labml.

``metrics.jsonl`` is the source of truth: one JSON object per line, flushed when it is recorded. Unless the
dashboard is off, a second process, the relay, copies it to labml's own files and to a labml server. Whatever
these do, no training stops, slows down or crashes. The relay ends when the training is killed.
"""

import contextlib
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from memformers.common.command_line import command_here
from memformers.common.network import split_login
from memformers.common.processes import module_command, module_environment
from memformers.runs import folder as runs
from memformers.tracking import discovery
from memformers.tracking.discovery import AUTO, DASHBOARD, LABML_URL, OFF, page_address

LABML = "labml"
"""The folder of labml's own files, in a run's."""
POLL_SECONDS, RETRY_SECONDS = 2.0, 3.0
"""Between two looks at the metrics, and before labml starts again after an error."""
DRAIN_SECONDS, IMPORT_SECONDS = 3.0, 60.0
"""How long labml may take after the last record, and for a whole run; then the relay ends."""
UNSENT = 3
"""The relay's exit code when a server didn't get everything."""
KINDS = {"": "in progress", "completed": "completed", "crashed: KeyboardInterrupt": "interrupted"}
"""What labml calls the ends of runs; it calls any other end crashed."""


@dataclass
class Tracking:
    """Records a run's metrics, as a context around its first and last step: ``name`` is what labml calls it,
    ``config`` its hyper-parameters as nested dicts, ``dashboard`` what
    [`find_dashboard`][memformers.tracking.discovery.find_dashboard] takes. An address may contain a token, so
    it is never written to a file."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    dashboard: str = ""

    def __post_init__(self) -> None:
        self.dashboard = discovery.find_dashboard(self.dashboard)

    def __enter__(self) -> "Tracking":
        self._file = open(self.folder / runs.METRICS, "a", encoding="utf-8")
        card = runs.open_card(self.folder, self.name, dict(runs.flatten(self.config)))
        self._relay = None
        if self.dashboard == OFF:
            return self
        trouble = "" if self.dashboard == AUTO else discovery.check_dashboard(self.dashboard)
        if trouble:
            _warn(f"{page_address(self.dashboard)} {trouble}; the training continues without it.")
        else:
            is_alone = not (self.folder.parent / runs.EXPERIMENT).exists()
            is_shown = is_alone and discovery.show_comparison(self.folder, self.dashboard)
            if not is_shown and (api := discovery.sent_to(self.dashboard)):
                print(f"dashboard: {page_address(api)}/run/{card.run}", flush=True)
        try:
            self._relay = start_relay(self.folder, self.dashboard)
        except OSError as error:  # there may be no process left for this user
            _warn(f"labml gets nothing, since no process could be started for it: {error}.")
        return self

    def record(self, values: Mapping[str, float]) -> None:
        """Write one record; its ``tokens`` is the step at which labml draws it."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with contextlib.suppress(OSError):  # record() has raised the error of a full disk already
            self._file.close()
        with contextlib.suppress(OSError, ValueError):
            status = "completed" if error is None else f"crashed: {type(error).__name__} {error}"
            runs.close_card(self.folder, status)
        exit_code = stop_relay(self._relay, DRAIN_SECONDS + 1.0) if self._relay else 0
        if exit_code == UNSENT:
            again = command_here(f"dashboard --import {shlex.quote(str(self.folder))}")
            _warn(f"not all metrics reached the dashboard; all are in {self._file.name}. Send them: {again}")
        elif exit_code:
            _warn(
                f"labml stopped with exit code {exit_code}; see {self.folder / runs.LOG}. No metric is lost."
            )


def _warn(message: str) -> None:
    print(f"tracking: {message}", file=sys.stderr)


def start_relay(folder: Path, dashboard: str, files: Path | None = None) -> "subprocess.Popen[bytes]":
    """Start the process that copies the run in ``folder`` to labml until its standard input ends; labml's own
    files are in the run's folder, or, to import a run, in ``files``. OSError if none can be started."""
    arguments = map(str, (folder, files or folder / LABML))
    with open(folder / runs.LOG, "a", encoding="utf-8") as log:
        return subprocess.Popen(
            module_command("memformers.tracking.recorder", *arguments),
            env=module_environment() | {DASHBOARD: dashboard, LABML_URL: ""},
            stdin=subprocess.PIPE, stdout=log, stderr=log,
            start_new_session=True,  # Ctrl-C is for the training, which then ends the relay
        )  # fmt: skip


def stop_relay(process: "subprocess.Popen[bytes]", seconds: float) -> int:
    """End the relay's input, and return its exit code; ``UNSENT`` if it hasn't ended after ``seconds``."""
    try:
        process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return UNSENT
    return process.returncode


def import_run(folder: Path, api: str) -> bool:
    """Send the whole run in ``folder`` to the labml server at ``api``; whether everything arrived."""
    with TemporaryDirectory() as files:
        return stop_relay(start_relay(folder, api, Path(files)), IMPORT_SECONDS + 1.0) == 0


def relay(folder: Path, files: Path) -> int:
    """Copy a run's records to labml until standard input ends; returns the exit code. At a new dashboard or a
    server's error, labml starts again from the first record; our dashboard ignores what it has already."""
    ended, is_import = threading.Event(), files != folder / LABML

    def wait_for_end() -> None:
        sys.stdin.read()
        with contextlib.suppress(OSError, ValueError):
            if not (is_import or runs.read_card(folder).status):  # else the training has written it itself
                runs.close_card(folder, "killed")
        ended.set()
        time.sleep(IMPORT_SECONDS if is_import else DRAIN_SECONDS)
        os._exit(UNSENT)

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        copy_to_labml(folder, files, os.environ[DASHBOARD], ended)
    except RuntimeError:  # labml's client stops at the first answer with an error
        traceback.print_exc()
        if ended.wait(RETRY_SECONDS):
            return UNSENT
        restart()
    return 0


def restart() -> None:
    sys.stderr.flush()
    os.execv(sys.executable, module_command("memformers.tracking.recorder", *sys.argv[1:]))


def copy_to_labml(folder: Path, files: Path, dashboard: str, ended: threading.Event) -> None:
    """Track the run as an experiment of labml's until it ends; RuntimeError if a server refuses it."""
    from labml import experiment, tracker
    from labml.internal.experiment import experiment_singleton

    import_module("labml.internal.app.logs")
    for stream in (sys.stdout, sys.stderr):
        vars(stream).pop("write", None)  # labml's, which sends this process's output too
    card = runs.read_card(folder)
    running = discovery.running() if dashboard == AUTO else {}
    api = discovery.sent_to(dashboard)
    create_experiment(card, folder, files, api)
    experiment.start()
    labml = experiment_singleton()
    if labml.app_experiment:
        labml.app_experiment.data["started"] = card.started  # which our dashboard shows
    metrics, is_over = runs.Metrics(folder / runs.METRICS), False
    while not is_over:
        is_over = ended.wait(POLL_SECONDS)
        for record in metrics.read():
            values = {n: v for n, v in record.items() if n != runs.TOKENS and math.isfinite(v)}
            tracker.save(int(record[runs.TOKENS]), values)
        metrics.check()
        check_accepted(labml)
        if dashboard == AUTO and not is_over and discovery.running() not in ({}, running):
            restart()
    status = runs.read_card(folder).status
    labml.finish(KINDS.get(status.strip(), "crashed"), status or "in progress")
    while [thread for thread in threading.enumerate() if not thread.daemon][1:]:  # labml's, which still send
        check_accepted(labml)
        time.sleep(0.05)


def check_accepted(labml: Any) -> None:
    if labml.app_experiment and labml.app_experiment.app_tracker.thread.errored:
        raise RuntimeError("the server refuses the run")


def create_experiment(card: runs.Card, folder: Path, files: Path, api: str) -> None:
    from labml import experiment, lab
    from labml.internal.computer.configs import computer_singleton

    shutil.rmtree(files, ignore_errors=True)  # an earlier copy: all records are copied again
    files.mkdir()
    # labml lists the projects of this computer in the user's home. Some homes can't be written, and of runs
    # that start at once, one fails at an entry that another has just removed. So it gets a home for this run.
    home = os.environ.get("HOME", "")
    os.environ["HOME"] = str(files)
    computer_singleton()  # looks for the home once, here
    os.environ["HOME"] = home
    settings = {"path": str(files), "experiments_path": ".", "check_repo_dirty": False}
    if api:
        settings["app_url"], opener = split_login(api)
        urllib.request.install_opener(opener)
    lab.configure(settings | {"app_open_browser": False})
    experiment.create(
        uuid=card.run, name=card.name, comment=card.comment, python_file=str(folder / runs.CARD),
        writers={"file", "app"} if api else {"file"},
    )  # fmt: skip
    names = runs.short_names(card.config)
    config = {names[name]: value for name, value in card.config.items()}
    experiment.configs(config, config)  # the second: labml's page hides the others at first


if __name__ == "__main__":
    try:
        code = relay(Path(sys.argv[1]), Path(sys.argv[2]))
    except BaseException:  # the training must not care; the log says it, and the exit code
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # labml's threads may still wait
