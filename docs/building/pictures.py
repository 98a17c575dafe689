"""Take the pictures of comparisons in README and in the guide to the dashboard, with Chromium, by Playwright.

``python -m docs.building.pictures report FOLDER`` opens the report of the comparison in FOLDER: in README,
that of ``memformers compare``. ``python -m docs.building.pictures live FOLDER`` opens the live page: in the
guide, that of ``memformers compare --scale 0.1 --seeds 3``.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, Page, sync_playwright

from docs.building.results import ROOT

IMAGES = ROOT / "docs/images"
REPORT_SIZE = (1020, 610)
"""Pixels of the beginning of a report."""
MARGIN = 20
"""Pixels above its title."""
LIVE_WIDTH = 960
IMPORT_SECONDS = 60


@contextmanager
def live_page(folder: Path) -> Iterator[str]:
    """A block in which a separate dashboard shows the comparison in ``folder``; its address."""
    with TemporaryDirectory() as state:
        command = [sys.executable, "-m", "memformers", "dashboard", "--port", "0"]
        command += ["--folder", f"{state}/records", "--import", str(folder)]
        environment = os.environ | {"XDG_STATE_HOME": state, "PYTHONUNBUFFERED": "1"}
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout
            yield server.stdout.readline().split()[1]  # dashboard: http://127.0.0.1:5005 …
        finally:
            server.terminate()
            server.wait()


def open_page(browser: Browser, address: str, width: int) -> Page:
    page = browser.new_page(viewport={"width": width, "height": 600}, color_scheme="light")
    page.goto(address, timeout=0)  # a busy machine needs minutes
    return page


def take_report(browser: Browser, folder: Path) -> None:
    """The beginning of a report, from its title on."""
    width, height = REPORT_SIZE
    page = open_page(browser, (folder / "report.html").resolve().as_uri(), width)
    title = page.locator("h1").bounding_box()
    assert title
    clip = {"x": 0, "y": title["y"] - MARGIN, "width": width, "height": height}
    page.screenshot(path=IMAGES / "report.png", full_page=True, clip=clip)  # type: ignore[arg-type]


def take_live_page(browser: Browser, address: str) -> None:
    """The whole live page, which the dashboard opens once the comparison has been imported."""
    page = open_page(browser, address, LIVE_WIDTH)
    for _ in range(IMPORT_SECONDS):
        if "/comparisons/" in page.url and page.locator("#chart .legend").count():
            break
        page.wait_for_timeout(1000)
        if "/comparisons/" not in page.url:
            page.goto(address, timeout=0)  # a busy machine needs minutes
    page.screenshot(path=IMAGES / "comparison.png", full_page=True)


def main(subject: str, folder: Path) -> None:
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        if subject == "report":
            take_report(browser, folder)
        else:
            with live_page(folder) as address:
                take_live_page(browser, address)
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", choices=["report", "live"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    main(arguments.subject, arguments.folder)
