"""The relay: a process beside a training that copies its records to labml's own files and to a labml server.
So nothing that labml does can disturb the training."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from memformers.common.network import split_login
from memformers.common.processes import module_command, module_environment
from memformers.runs.card import RunCard, close_card, read_card
from memformers.runs.folder import CARD, LOG, METRICS, short_names
from memformers.runs.metrics import Metrics
from memformers.tracking import discovery
from memformers.tracking.discovery import AUTO, DASHBOARD, LABML_URL
from memformers.tracking.trackers import split_record

LABML = "labml"
"""The folder of labml's own files, in a run's."""
POLL_SECONDS = 2.0
"""Seconds between two looks at the metrics."""
RETRY_SECONDS = 3.0
"""Seconds before labml starts again after an error."""
DRAIN_SECONDS = 3.0
"""How long labml may take after the last record; then the relay ends."""
IMPORT_SECONDS = 60.0
"""How long labml may take for a whole run."""
UNSENT = 3
"""The relay's exit code when a server didn't get everything."""
KINDS = {"": "in progress", "completed": "completed", "crashed: KeyboardInterrupt": "interrupted"}
"""What labml calls the ends of runs; it calls any other end crashed."""


def start_relay(folder: Path, dashboard: str, files: Path | None = None) -> "subprocess.Popen[bytes]":
    """Start the process that copies the run in ``folder`` to labml until its standard input ends; labml's own
    files are in the run's folder, or, to import a run, in ``files``. OSError if none can be started."""
    arguments = [str(folder), str(files or folder / LABML)]
    with open(folder / LOG, "a", encoding="utf-8") as log:
        return subprocess.Popen(
            module_command("memformers.tracking.relay", *arguments),
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
    ended = threading.Event()
    is_import = files != folder / LABML

    def wait_for_end() -> None:
        sys.stdin.read()
        with contextlib.suppress(OSError, ValueError):
            if not (is_import or read_card(folder).status):  # else the training has written it itself
                close_card(folder, "killed")
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
    os.execv(sys.executable, module_command("memformers.tracking.relay", *sys.argv[1:]))


def copy_to_labml(folder: Path, files: Path, dashboard: str, ended: threading.Event) -> None:
    """Track the run as an experiment of labml's until it ends; RuntimeError if a server refuses it."""
    from labml import experiment, tracker
    from labml.internal.experiment import experiment_singleton

    # labml sends what this process prints too, unless its write methods are removed.
    import_module("labml.internal.app.logs")
    for stream in (sys.stdout, sys.stderr):
        vars(stream).pop("write", None)

    # Start
    card = read_card(folder)
    running = discovery.running() if dashboard == AUTO else {}
    api = discovery.sent_to(dashboard)
    create_experiment(card, folder, files, api)
    experiment.start()
    labml = experiment_singleton()
    if labml.app_experiment:
        labml.app_experiment.data["started"] = card.started  # which our dashboard shows

    # Copy what is recorded
    metrics = Metrics(folder / METRICS)
    is_over = False
    while not is_over:
        is_over = ended.wait(POLL_SECONDS)
        for record in metrics.read():
            values, step = split_record(record)
            tracker.save(step, values)
        metrics.check()
        check_accepted(labml)
        if dashboard == AUTO and not is_over and discovery.running() not in ({}, running):
            restart()

    # End, and wait for labml's threads, which still send
    status = read_card(folder).status
    labml.finish(KINDS.get(status.strip(), "crashed"), status or "in progress")
    while [thread for thread in threading.enumerate() if not thread.daemon][1:]:
        check_accepted(labml)
        time.sleep(0.05)


def check_accepted(labml: Any) -> None:
    if labml.app_experiment and labml.app_experiment.app_tracker.thread.errored:
        raise RuntimeError("the server refuses the run")


def create_experiment(card: RunCard, folder: Path, files: Path, api: str) -> None:
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
        uuid=card.run, name=card.name, comment=card.comment, python_file=str(folder / CARD),
        writers={"file", "app"} if api else {"file"},
    )  # fmt: skip
    names = short_names(card.config)
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
