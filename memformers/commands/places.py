"""Where runs are, and where a report is."""

from datetime import datetime
from pathlib import Path

from memformers.common.errors import UserError
from memformers.runs.atomic_dir import has_manifest
from memformers.runs.folder import CONFIG

RUNS = Path("runs")


def new_folder(name: str) -> Path:
    """A folder under runs/ that no other run has."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    folder, n = RUNS / stem, 1
    while folder.exists():
        folder, n = RUNS / f"{stem}-{n}", n + 1
    return folder


def newest_run() -> Path:
    """The run under runs/ that was begun or resumed last; ValueError if there is none."""
    configs = list(RUNS.glob(f"*/{CONFIG}"))
    if not configs:
        raise UserError(f"{RUNS} holds no run to resume; name its folder after --resume.")
    return max(configs, key=lambda path: path.stat().st_mtime).parent


def resumable(folder: Path) -> Path:
    """The folder, if a run was begun in it; else ValueError."""
    if not (folder / CONFIG).is_file() or has_manifest(folder):
        raise UserError(f"{folder} is not the folder of a run; name the run to resume.")
    return folder


def say_report(page: Path) -> None:
    """Print where a report is."""
    print(f"report: {page}\n        {page.with_suffix('.md')}")
