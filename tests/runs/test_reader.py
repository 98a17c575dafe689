"""What state a run is in."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from memformers.common.files import write_json
from memformers.common.processes import module_environment
from memformers.runs.card import close_card, open_card
from memformers.runs.folder import alone_in
from memformers.runs.reader import Run

HOLD = "import sys; from pathlib import Path; from memformers.runs.folder import alone_in\n"
HOLD += "with alone_in(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"


def state(folder):
    return Run(folder).state[0]


def test_a_silent_run_is_running_while_its_process_lives(tmp_path):
    """As in a last evaluation that takes an hour."""
    open_card(tmp_path, "run", {})
    (tmp_path / "metrics.jsonl").write_text('{"tokens": 1}\n')
    os.utime(tmp_path / "metrics.jsonl", (time.time() - 3600,) * 2)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, env=module_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        assert state(tmp_path) == "running"
        assert state(tmp_path) == "running", "looking doesn't take the lock"
        process.kill()
        process.wait()
    assert Run(tmp_path).state == ("stopped", "its process is gone")


def test_each_state_has_a_name_and_there_are_four(tmp_path):
    assert state(tmp_path) == "planned"
    with alone_in(tmp_path):
        open_card(tmp_path, "run", {})
        assert state(tmp_path) == "running"
    for status, wanted in [
        ("completed", ("finished", "")), ("killed", ("stopped", "killed")),
        ("crashed: KeyboardInterrupt ", ("stopped", "KeyboardInterrupt")),
        ("crashed: NotFiniteError the loss is nan", ("stopped", "NotFiniteError the loss is nan")),
    ]:  # fmt: skip
        close_card(tmp_path, status)
        assert Run(tmp_path).state == wanted
    open_card(tmp_path, "run", {})
    write_json(tmp_path / "result.json", {"loss": 1.0})
    assert state(tmp_path) == "finished"


def test_the_page_on_the_dashboard_lists_the_four_states():
    page = Path(__file__).parents[2] / "docs/dashboard.md"
    sentence = re.search(r"each run with its state: (.*?)\.", page.read_text(), re.DOTALL)[1]
    outside = re.sub(r"\(.*?\)", "", sentence.replace("\n", " "))
    assert re.findall(r"\w+", re.sub(r", with the reason|\bor\b", "", outside)) == [
        "planned", "running", "finished", "stopped",
    ]  # fmt: skip
