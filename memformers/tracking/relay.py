"""The process that sends a run's ``metrics.jsonl`` to labml and to a running dashboard.

It is a separate process, so nothing that labml or a dashboard does (wait, retry, fail, store a copy of all
output) can stop, slow or crash a training. When the training is killed, it ends by itself.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

from memformers.common.processes import module_command, module_environment
from memformers.runs.folder import CARD, LOG, METRICS, TOKENS, Metrics, close_card, read_card
from memformers.tracking.discovery import DASHBOARD, LABML_URL, sent_to
from memformers.tracking.feeding import SHARE, feed, thin

DRAIN_SECONDS = 3.0
"""How many seconds labml may take after the last record; then the relay ends, even if records are left."""
UNSENT = 3
"""The relay's exit code when a dashboard didn't take everything in that time."""
POLL_SECONDS = 1.0


def start_relay(folder: Path, dashboard: str) -> "subprocess.Popen[str]":
    """Start the process that sends the records in ``folder`` to labml; it ends after its input ends. Raises
    OSError if no process can be started."""
    with open(folder / LOG, "a", encoding="utf-8") as log:
        return subprocess.Popen(
            module_command("memformers.tracking.relay", str(folder)),
            env=module_environment() | {DASHBOARD: dashboard, LABML_URL: ""},
            stdin=subprocess.PIPE, stdout=log, stderr=log, encoding="utf-8", errors="replace",
            start_new_session=True,  # Ctrl-C is for the training, which then ends the relay
        )  # fmt: skip


def stop_relay(process: "subprocess.Popen[str]", status: str) -> int:
    """Tell the relay how the run ended, wait a few seconds; returns its exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(status, timeout=DRAIN_SECONDS + 1.0)
    if process.poll() is None:
        process.kill()
    return process.wait()


def relay(folder: Path) -> None:
    """Feed labml and a dashboard with a run's records until standard input ends, then end within
    DRAIN_SECONDS; exits with UNSENT if a dashboard didn't get everything by then."""
    ended, status, is_sent = threading.Event(), ["killed"], [False]

    def wait_for_end() -> None:
        status[0] = sys.stdin.read() or "killed"
        if status[0] == "killed":  # else the training has said so itself
            with contextlib.suppress(OSError, ValueError):
                close_card(folder, status[0])
        ended.set()
        time.sleep(DRAIN_SECONDS)
        os._exit(UNSENT)  # whatever labml is waiting for, it had its time

    def send() -> None:
        is_sent[0] = feed(folder, lambda: sent_to(os.environ[DASHBOARD]), ended)

    threading.Thread(target=wait_for_end, daemon=True).start()

    from labml import experiment, lab, tracker
    from labml.internal.computer.configs import computer_singleton

    # labml lists the projects of this computer in the user's home. Some homes can't be written, and of runs
    # that begin at once, one fails at an entry that another has just removed. So it gets a home of its own.
    (folder / "labml").mkdir(exist_ok=True)
    before = dict(os.environ)
    os.environ.update(HOME=str(folder / "labml"), USERPROFILE=str(folder / "labml"))
    computer_singleton()  # looks for the home once, here
    os.environ.clear()
    os.environ.update(before)
    sender = threading.Thread(target=send, daemon=True)
    sender.start()

    card = read_card(folder)
    lab.configure({"path": str(folder), "experiments_path": "labml", "check_repo_dirty": False})
    experiment.create(name=card.name, writers={"file"}, python_file=str(folder / CARD))
    experiment.configs(dict(card.config))
    with contextlib.suppress(RunEndedBadly), experiment.start():
        metrics, more, rest = Metrics(folder / METRICS), True, 0.0
        while more:
            more = not ended.wait(max(POLL_SECONDS, rest))
            begun = time.thread_time()
            for record in thin(list(metrics.read())):
                values = {name: value for name, value in record.items() if name != TOKENS}
                tracker.save(int(record[TOKENS]), values)
            rest = (time.thread_time() - begun) / SHARE
        if status[0] != "completed":
            raise RunEndedBadly(status[0])  # labml marks the run as crashed, with this reason
    for thread in threading.enumerate():
        if not (thread.daemon or thread is threading.main_thread()):
            thread.join()  # labml's writer; the watchdog above bounds the wait
    sender.join()
    if not is_sent[0]:
        os._exit(UNSENT)


class RunEndedBadly(Exception):
    """Tells labml that the training didn't end well."""


if __name__ == "__main__":
    try:
        relay(Path(sys.argv[1]))
    except Exception:  # the training must not care; the log says it, and the exit code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
