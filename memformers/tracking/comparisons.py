"""Which comparisons there are on this machine: a note for each, by which a dashboard finds its folder.

A note outlives the comparison and the dashboard, so one that is started later shows it too.
"""

import contextlib
import hashlib
import json
from pathlib import Path

import platformdirs

from memformers.common.files import write_json
from memformers.common.network import get
from memformers.tracking.discovery import ANSWER_SECONDS, OFF, page_address, sent_to

COMPARISONS = "/comparisons"
"""Where a dashboard has its page of them."""


def comparison_notes() -> Path:
    """Where the notes are."""
    return platformdirs.user_state_path("memformers") / "comparisons"


def comparison_id(folder: Path) -> str:
    """What a dashboard calls the comparison in ``folder``: 16 hexadecimal digits."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


def note_comparison(folder: Path) -> None:
    """Let dashboards on this machine show the runs in ``folder``; notes of folders that are gone go too.
    Raises OSError where the note can't be written."""
    notes = comparison_notes()
    notes.mkdir(parents=True, exist_ok=True)
    for identity, other in noted_comparisons().items():
        if not other.is_dir():
            (notes / f"{identity}.json").unlink(missing_ok=True)
    write_json(notes / f"{comparison_id(folder)}.json", {"folder": str(folder.resolve())})


def noted_comparisons() -> dict[str, Path]:
    """The folders of all comparisons, by their ids; that which was begun last comes first."""
    found: dict[str, tuple[float, Path]] = {}
    for note in comparison_notes().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            folder = Path(json.loads(note.read_text(encoding="utf-8"))["folder"])
            if comparison_id(folder) == note.stem:
                found[note.stem] = (note.stat().st_mtime, folder)
    newest_first = sorted(found.items(), key=lambda item: item[1][0], reverse=True)
    return {identity: folder for identity, (_, folder) in newest_first}


def show_comparison(folder: Path, dashboard: str) -> None:
    """Let dashboards on this machine show all runs in ``folder`` in one chart, and print where one does so;
    ``dashboard`` is what [`find_dashboard`][memformers.tracking.discovery.find_dashboard] gave."""
    if dashboard == OFF:
        return
    with contextlib.suppress(OSError):  # where the user's own folders can't be written
        note_comparison(folder)
    if page := comparison_page(sent_to(dashboard), folder):
        print(f"dashboard: {page}  (all runs in one chart)", flush=True)


def comparison_page(api: str, folder: Path) -> str:
    """Where the dashboard that takes runs at ``api`` shows the comparison in ``folder``; empty where it
    doesn't."""
    path = f"{COMPARISONS}/{comparison_id(folder)}"
    with contextlib.suppress(OSError):
        if api and get(f"{api.partition('/api/')[0]}{path}", ANSWER_SECONDS)[0] == 200:
            return page_address(api) + path
    return ""
