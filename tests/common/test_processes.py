"""Modules of this package that run in other processes, and requests to servers."""

import base64
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

import memformers
from memformers.common.network import get
from memformers.common.processes import SPINS, busy_notice, run_modules, spin_less
from tests.processes import Server, finish, is_running, start, wait_for

WELL = ["timeit", "-n1", "-r1"]
BADLY = ["timeit", "--no-such-option"]


def test_each_module_runs_and_no_more_than_so_many_at_a_time(capfd):
    running = set()
    most = []

    def begin(number):
        running.add(number)
        most.append(len(running))

    for number, code in run_modules([WELL, BADLY, WELL, WELL], 2, environment={}, begin=begin):
        running.remove(number)
        assert code == (2 if number == 1 else 0)
    assert max(most) == 2
    assert not running
    assert capfd.readouterr().out.count("best of 1") == 3


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_what_runs_is_ended_with_the_program(number, code, tmp_path):
    child = f"import os, time; open(r'{tmp_path}/' + str(os.getpid()), 'w').close(); time.sleep(60)"
    commands = [["timeit", "-n1", "-r1", child]] * 2
    program = (
        f"from memformers.common.processes import run_modules as r; list(r({commands}, 2, environment={{}}))"
    )
    # nohup ignores this signal, for children too.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        process = start([sys.executable, "-c", program])
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for(lambda: len(os.listdir(tmp_path)) == 2)
    process.send_signal(number)
    assert process.wait(timeout=20) == code
    children = [int(path.name) for path in tmp_path.iterdir()]
    # A program that a signal doesn't kill at once has waited for its children.
    wait_for(lambda: not any(map(is_running, children)), 20 if code < 0 else 0.02)


def test_a_process_imports_the_package_of_its_parent(tmp_path):
    """``ours`` is imported from the current folder, ``installed`` is on the path of every process."""
    for version in ("ours", "installed"):
        package = tmp_path / version / "memformers"
        shutil.copytree(Path(memformers.__file__).parent / "common", package / "common")
        (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
        (package / "said.py").write_text(
            "import importlib.util as u, memformers as m; print(m.__version__, u.find_spec('common'))"
        )
    imports = "from memformers.common.processes import run_modules"
    program = f"{imports}; list(run_modules([['memformers.said']], 1, environment={{}}))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    ended = finish([sys.executable, "-c", program], cwd=tmp_path / "ours", env=environment)
    assert ended.stdout == "ours None\n", ended.stderr


def test_a_login_in_the_address_is_sent():
    with Server(lambda handler, body: (200, b"{}")) as server:
        assert get(f"http://ada:se%3Acret@{server.host}/api", 5.0) == (200, b"{}")
        get(f"http://{server.host}/api", 5.0)
    assert server.headers[0]["Authorization"] == "Basic " + base64.b64encode(b"ada:se:cret").decode()
    assert "Authorization" not in server.headers[1]


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:nowhere", "no.such.host.invalid", "[::1"])
def test_no_error_shows_the_password(address):
    with pytest.raises(OSError, match=r"^(?!.*secret)"):
        get(f"http://ada:secret@{address}/api", 5.0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, str(SPINS)), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)],
)
def test_threads_spin_less_unless_the_user_has_a_setting(settings, expected, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    spin_less()
    assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_a_line_says_that_other_programs_use_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.9, 0.0, 0.0))
    assert busy_notice() == ""
    monkeypatch.setattr(os, "getloadavg", lambda: (12.2, 0.0, 0.0))
    assert busy_notice() == "NOTE: 12 processes compete for 4 cores, so this takes longer than usual.\n"
