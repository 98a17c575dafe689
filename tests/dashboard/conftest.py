"""A separate dashboard for the tests, in its own folders."""

import json
import threading
import urllib.request
from array import array
from base64 import b64decode
from pathlib import Path

import pytest

from tests.processes import wait_for

pytest.importorskip("labml_app", reason="the dashboard's extra is not installed")

import uvicorn

from memformers.common.files import write_json
from memformers.dashboard.labml import use_records
from memformers.dashboard.pages import build, listen
from memformers.runs.folder import CONFIG, EXPERIMENT, METRICS, flatten
from memformers.runs.plan import Plan, PlannedArm


def write_plan(folder, runs, settings, arms):
    """The plan of an experiment with ``arms``, the settings of each by its name, and its runs' configs."""
    for name, run in runs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        write_json(folder / name / CONFIG, dict(flatten(settings)) | arms[run.arm] | {"seed": run.seed})
    plan = Plan("text", settings, tuple(PlannedArm(*arm) for arm in arms.items()), runs)
    write_json(folder / EXPERIMENT, plan)


def record_losses(folder, losses, begin=1):
    """Append to a run's metrics as a training does, each ten tokens and half a second."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / METRICS, "a") as file:
        for step, loss in enumerate(losses, begin):
            file.write(json.dumps({"tokens": 10 * step, "seconds": step / 2, "loss.valid": loss}) + "\n")


class Client:
    """What a page, or a training, asks of the dashboard at ``url``."""

    def __init__(self, url: str):
        self.url = url

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(self, path, question=None):
        body = None if question is None else json.dumps(question).encode()
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20.0) as answer:
            return json.load(answer)

    def runs(self):
        return self.ask("/api/v1/runs/null")["runs"]

    def curve(self, run, name="loss.train"):
        """The steps and values that labml's server has of a metric."""
        for series in self.ask(f"/api/v1/metrics/{run}", {"get_all": True})["series"]:
            if series["name"] == name:
                steps, values = (array("f", b64decode(series[key])) for key in ("step", "value"))
                return dict(zip(steps, values, strict=True))
        return {}


class DashboardHere(Client):
    """The dashboard's application, served by a thread of this process, as a context: it starts in no time."""

    def __init__(self, folder: Path, port: int = 0):
        use_records(folder)
        application = build(frozenset({"workstation"}))
        self.listener = listen("127.0.0.1", port)
        super().__init__(f"http://127.0.0.1:{self.listener.getsockname()[1]}")
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
