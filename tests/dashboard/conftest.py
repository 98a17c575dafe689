"""A dashboard of the tests' own, in folders of its own."""

import json
import signal
import subprocess
import threading
from array import array
from base64 import b64decode
from pathlib import Path

import pytest

from tests.processes import program, wait_for
from tests.processes import start as start_program

pytest.importorskip("labml_app", reason="the dashboard's extra is not installed")

import uvicorn

from memformers.common.files import write_json
from memformers.common.network import ask_json
from memformers.dashboard.labml import Records, prepare
from memformers.dashboard.pages import build, listen
from memformers.runs.folder import CONFIG, EXPERIMENT, METRICS, Arm, Plan, flatten


def write_plan(folder, runs, settings, arms):
    """The plan of an experiment with ``arms``, the settings of each by its name, and its runs' configs."""
    for name, run in runs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        write_json(folder / name / CONFIG, dict(flatten(settings)) | arms[run.arm] | {"seed": run.seed})
    plan = Plan("text", settings, tuple(Arm(*arm) for arm in arms.items()), runs)
    write_json(folder / EXPERIMENT, plan)


def record_losses(folder, losses, begin=1):
    """Append to a run's metrics as a training does, each ten tokens and half a second."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / METRICS, "a") as file:
        for step, loss in enumerate(losses, begin):
            file.write(json.dumps({"tokens": 10 * step, "seconds": step / 2, "loss.valid": loss}) + "\n")


class Client:
    """What a page, or a training, asks of the dashboard at ``url``."""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(self, path, question=None):
        return ask_json(self.url + path, 20.0, question)

    def runs(self):
        return self.ask("/api/v1/runs/null")["runs"]

    def curve(self, run, name="loss.train"):
        """The steps and values that labml's server has of a metric."""
        for series in self.ask(f"/api/v1/metrics/{run}", {"get_all": True})["series"]:
            if series["name"] == name:
                steps, values = (array("f", b64decode(series[key])) for key in ("step", "value"))
                return dict(zip(steps, values, strict=True))
        return {}


class Dashboard(Client):
    """``memformers dashboard`` as a user starts it: in a process of its own."""

    def __init__(self, folder: Path, *arguments: str, port: int = 0):
        command = program("dashboard", "--folder", folder, "--port", port, *arguments)
        self.log = (folder.parent / f"{folder.name}.err").open("a+")
        self.process = start_program(command, stdout=subprocess.PIPE, stderr=self.log)
        said = self.process.stdout.readline()
        assert said, self.errors()
        self.url = said.split()[1]

    def errors(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def stop(self, number=signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout=20)
        finally:
            self.process.kill()
            self.process.stdout.close()


class DashboardHere(Client):
    """The dashboard's application, served by a thread of this process, as a context: it starts in no time."""

    def __init__(self, folder: Path):
        self.said: list[str] = []
        self.records = prepare(Records(folder, self.said.append))
        application = build(frozenset({"workstation"}), self.records)
        self.listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        config = uvicorn.Config(application, log_config=None, access_log=False, server_header=False)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],), daemon=True)

    def __enter__(self):
        self.thread.start()
        wait_for(lambda: self.server.started)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()
        self.listener.close()


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """Folders of a user who has nothing yet, and whose trainings look for dashboards."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.delenv("MEMFORMERS_DASHBOARD")
        yield folder


@pytest.fixture
def start(tmp_path):
    """Start dashboards; all of them are ended when the test is."""
    started = []

    def start_one(*arguments, folder=tmp_path / "records", port=0):
        folder.mkdir(exist_ok=True)
        started.append(Dashboard(folder, *arguments, port=port))
        return started[-1]

    yield start_one
    for dashboard in started:
        dashboard.stop(signal.SIGKILL)
        dashboard.log.close()
