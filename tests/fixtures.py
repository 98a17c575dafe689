"""Fixtures that all tests share."""

import shutil
import signal
from functools import cache
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import settings

from memformers.common.machine import git_commit
from memformers.comparison import experiment, text
from memformers.comparison.recall.setup import SETTINGS
from memformers.comparison.text import CompareConfig, compare
from memformers.data import sources
from memformers.data.sources import builtin_play, write_play
from memformers.report import plotting
from memformers.runs.folder import RESULT
from memformers.training import job, monitor
from tests.builders import small_training, tiny_recall
from tests.processes import train_first_beside, train_here
from tests.training.runs import train_run

# A machine may be busy with something else.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard():
    """Also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _pictures_are_empty(request, monkeypatch):
    """Unless a test is marked as ``drawn``: drawing takes most of the time of a report."""
    if not request.node.get_closest_marker("drawn"):
        monkeypatch.setattr(plotting, "save", lambda _, path: path.touch())


@pytest.fixture
def graph_counter():
    """A backend of ``torch.compile`` that counts its graphs. Its import takes seconds, which every process
    that collects tests would need."""
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend("aot_eager")


def shorten_samples(patch):
    """Of a small training, two thirds of the time would be spent on its samples."""
    patch.setattr(monitor, "SAMPLE_CHARACTERS", 4)
    patch.setattr(monitor, "SHORT_SAMPLE_CHARACTERS", 2)


@pytest.fixture(autouse=True)
def _samples_are_short(monkeypatch):
    shorten_samples(monkeypatch)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder is one of the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def float64():
    """Modules made in this test work in double precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# git is asked once, and not by each training.
git_commit_once = cache(git_commit)


@cache
def short_play(length=30_000, seed=0, is_stand_in=False):
    return builtin_play(length, seed, is_stand_in)


def make_tiny(patch):
    """Experiments train in this process, on recall with settings of a moment."""
    patch.setitem(SETTINGS, "near", tiny_recall())
    patch.setattr(experiment, "run_modules", train_here)


@pytest.fixture
def quick_runs(monkeypatch):
    """What takes longer than a small training is left out of it: experiments are tiny, the built-in play is
    short, and a comparison is hardly probed."""
    make_tiny(monkeypatch)
    monkeypatch.setattr(job, "git_commit", git_commit_once)
    monkeypatch.setattr(sources, "builtin_play", short_play)
    monkeypatch.setattr(text, "PROBED", 64)


@pytest.fixture(scope="session")
def for_all(tmp_path_factory, worker_id):
    """A folder for what is made once, though the tests run in several processes."""
    folder = tmp_path_factory.getbasetemp()
    return folder if worker_id == "master" else folder.parent


@pytest.fixture(scope="session")
def trained(for_all):
    """A run; to be read only."""
    folder = for_all / "trained"
    with FileLock(for_all / "trained.lock"), pytest.MonkeyPatch.context() as patch:
        shorten_samples(patch)
        if not (folder / RESULT).exists():
            # Far shorter than the built-in play, all of whose held-out text would be evaluated.
            data = for_all / "short_play.txt"
            data.write_text(write_play(30_000, 0))
            train_run(small_training(max_tokens=512, data=str(data)), folder)
    return folder


@pytest.fixture(scope="session")
def compared(for_all):
    """A comparison of all models, of which the first is trained in a separate process; to be read only."""
    folder: Path = for_all / "compared"
    with FileLock(for_all / "compared.lock"), pytest.MonkeyPatch.context() as patch:
        shorten_samples(patch)
        patch.setattr(experiment, "run_modules", train_first_beside)
        patch.setattr(text, "PROBED", 64)
        patch.setattr(plotting, "save", lambda _, path: path.touch())
        if not (folder / "report.html").exists():
            data = for_all / "play.txt"
            data.write_text(write_play(60_000, 0))
            training = small_training(model="compressive", max_tokens=1_024, data=str(data))
            compare(CompareConfig(train=training), folder)
    return folder


@pytest.fixture(scope="module")
def browser():
    """One for all tests of a module; they are skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if not (chromium := shutil.which("chromium")):
        pytest.skip("Chromium is not installed; with it, this test looks at a page")
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page that reaches this machine and nothing else."""
    page = browser.new_page(viewport={"width": 900, "height": 1000})
    page.route(lambda url: not url.startswith(("http://127.0.0.1:", "file:")), lambda route: route.abort())
    yield page
    page.context.close()
