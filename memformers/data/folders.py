"""The files in a folder of texts, and those that are not its texts."""

import os
from pathlib import Path

from memformers.data.files import raise_unreadable
from memformers.data.foreign import check_folder, check_sizes
from memformers.data.ids import is_beside_ids
from memformers.data.splits import look_like_splits, refuse_splits, splits_among
from memformers.data.tables import describes_tables, saved_shards
from memformers.runs.folder import CONFIG, EXPERIMENT, FACTS

LeftOut = dict[str, list[str]]
"""Names of what isn't read, by the reason."""
# Files that every folder of tokens has.
STORE = ("card.json", "tokenizer.json")
# Their format.
FORMAT = 2


def holds_tokens(path: Path) -> bool:
    return all((path / name).is_file() for name in STORE)


def splits_in(folder: Path, left_out: LeftOut) -> dict[str, list[Path]]:
    """The files or folders in ``folder`` that are its splits, if it has such."""
    candidates = []
    for path in visible(folder):
        if not is_beside_ids(path) and not describes_tables(path) and not holds_run(path):
            candidates.append(path)
    split_paths = splits_among(candidates, folder)
    if split_paths:
        chosen = {path for paths in split_paths.values() for path in paths}
        left_out["of no split and"] = [path.name for path in candidates if path not in chosen]
    return split_paths


def visible(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise_unreadable(error)


def files_below(folder: Path, left_out: LeftOut) -> dict[str, Path]:
    """All files in ``folder`` and below, by their paths there, but hidden ones and those of runs and tokens:
    a command may write into the folder of its texts. Links are followed, and each folder is read once.
    UserError for a folder of another library, or one whose files look like splits: they are no documents."""
    files: dict[str, Path] = {}
    seen = set[Path]()
    for parent, subfolders, names in os.walk(folder, onerror=raise_unreadable, followlinks=True):
        path = Path(parent)
        relative = path.relative_to(folder)
        if path.resolve() in seen:
            left_out["folders that are read already are"].append(relative.as_posix())
            subfolders.clear()
            continue
        seen.add(path.resolve())
        check_folder(path, names)

        # What is below is visited in this order.
        shown = sorted(name for name in subfolders if not name.startswith("."))
        runs = [name for name in shown if holds_run(path / name)]
        subfolders[:] = [name for name in shown if name not in runs]
        for name in runs:
            left_out["folders of runs or tokens are"].append((relative / name).as_posix())

        # Of a folder that datasets saved, the files that it lists.
        shards = saved_shards(path)
        texts = []
        for name in shards or names:
            file = path / name
            if name.startswith(".") or is_beside_ids(file) or describes_tables(file):
                continue
            if file.is_file():
                texts.append(file)
                files[(relative / name).as_posix()] = file
            elif not file.exists():
                left_out["links that lead nowhere are"].append((relative / name).as_posix())
        subpaths = [path / name for name in subfolders]
        if named := look_like_splits(sorted([*texts, *subpaths])):
            refuse_splits(named, folder)
    check_sizes(folder, files.values())
    return files


def holds_run(folder: Path) -> bool:
    kinds = ((EXPERIMENT,), (CONFIG, FACTS), STORE)
    return any(all((folder / name).is_file() for name in names) for names in kinds)
