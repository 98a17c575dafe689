"""A dashboard of the tests' own, in a process and in folders of its own, and a browser to look at it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.processes import start as start_program

pytest.importorskip("labml_app", reason="the dashboard's extra is not installed")


class Dashboard:
    """``memformers dashboard`` as a user starts it."""

    def __init__(self, folder: Path, *arguments: str, port: int = 0):
        command = [sys.executable, "-m", "memformers.cli", "dashboard", "--folder", str(folder)]
        self.log = (folder.parent / f"{folder.name}.err").open("a+")
        self.process = start_program(
            [*command, "--port", str(port), *arguments], stdout=subprocess.PIPE, stderr=self.log
        )
        self.said = self.process.stdout.readline()
        assert self.said, self.errors()
        self.url = self.said.split()[1]
        self.port = int(self.url.rpartition(":")[2])

    def errors(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def ask(self, path, question=None, headers=None):
        body = None if question is None else json.dumps(question).encode()
        request = urllib.request.Request(
            self.url + path, body, {"Content-Type": "application/json"} | (headers or {})
        )
        with urllib.request.urlopen(request, timeout=20) as response:
            return json.loads(response.read())

    def runs(self):
        return self.ask("/api/v1/runs/null")["runs"]

    def curve(self, run, name="loss.train"):
        """The steps and values that labml's server has of a metric."""
        from array import array
        from base64 import b64decode

        for series in self.ask(f"/api/v1/metrics/{run}", {"get_all": True})["series"]:
            if series["name"] == name:
                steps, values = (array("f", b64decode(series[key])) for key in ("step", "value"))
                return dict(zip(steps, values, strict=True))
        return {}

    def stop(self, number=signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout=20)
        finally:
            self.process.kill()
            self.process.stdout.close()


def wait_for(condition, seconds=60.0):
    """What ``condition`` gives once it gives something."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.05)
    return result


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


@pytest.fixture(scope="session")
def chromium():
    """The path of Debian's Chromium, installed if that can be done."""
    pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if not shutil.which("chromium"):
        if not (shutil.which("apt-get") and os.geteuid() == 0):
            pytest.skip("Chromium is not installed, and only root could install it with apt-get")
        for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
            result = subprocess.run(["apt-get", "-qq", *command], capture_output=True, text=True, check=False)
        if not shutil.which("chromium"):
            pytest.skip(f"Chromium can't be installed: {result.stderr[-200:]}")
    return shutil.which("chromium")


@pytest.fixture
def page(chromium):
    """A page of a browser that reaches the dashboard, and nothing else."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 1000})
        page.route(lambda url: not url.startswith("http://127.0.0.1:"), lambda route: route.abort())
        yield page
        browser.close()
