"""The names of files and folders that are the splits of a text."""

import re
from collections.abc import Sequence
from pathlib import Path

from memformers.common.errors import UserError
from memformers.data import SPLITS, TEST, TRAIN, VALIDATION

# The words that Hugging Face's datasets takes for the names of splits.
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev"), VALIDATION),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), TEST),
}
LETTERS = re.compile(r"[^\W\d_]+")
DIGITS = re.compile(r"\d+")
# A program called train.py beside test.py is a document of a folder of sources.
SOURCE_CODE = (
    ".py",
    ".ipynb",
    ".c",
    ".cc",
    ".cpp",
    ".h",
    ".js",
    ".ts",
    ".go",
    ".rs",
    ".java",
    ".sh",
    ".yaml",
)


def splits_named(name: str) -> list[str]:
    """The splits that the words in the name of a file or folder stand for, each once."""
    if name.lower().endswith(SOURCE_CODE):
        return []
    words = LETTERS.findall(name.lower())
    return list(dict.fromkeys(SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS))


def name_pattern(name: str) -> str:
    """``name`` without what differs between splits: the split's word, numbers, and the endings of a file."""
    lower = name.lower()
    word = next(match for match in LETTERS.finditer(lower) if match[0] in SPLIT_WORDS)
    ending = lower[word.end() :].partition(".")[0]
    return DIGITS.sub("#", f"{lower[: word.start()]}*{ending}")


def look_like_splits(paths: Sequence[Path]) -> list[Path]:
    """Those of ``paths`` that are named as splits, if these are at least two."""
    named = [path for path in paths if splits_named(path.name)]
    splits = {split for path in named for split in splits_named(path.name)}
    return named if len(splits) > 1 else []


def splits_among(paths: Sequence[Path], folder: Path) -> dict[str, list[Path]]:
    """The files or folders of each split among those in ``folder``, in the order of the splits; empty if they
    aren't named so. UserError for names that look like splits and don't say which file belongs to which: the
    texts to test on would be learned."""
    named = look_like_splits(paths)
    by_split: dict[str, list[Path]] = {}
    for path in named:
        for split in splits_named(path.name):
            by_split.setdefault(split, []).append(path)
    if not named:
        return {}
    # One split in each name, and nothing else that differs.
    n_paths = sum(len(shards) for shards in by_split.values())
    patterns = {name_pattern(path.name) for path in named}
    is_clear = n_paths == len(named) and len(patterns) == 1
    if not is_clear or not {TRAIN, VALIDATION} <= by_split.keys():
        refuse_splits(named, folder)
    # Shards of a split differ in their numbers alone.
    for split, shards in by_split.items():
        if len({DIGITS.sub("#", path.name) for path in shards}) > 1:
            names = " and ".join(map(str, shards))
            raise UserError(f"{names} are all for {split}; keep one of them there.")
    return {split: by_split[split] for split in SPLITS if split in by_split}


def refuse_splits(named: Sequence[Path], folder: Path) -> None:
    names = ", ".join(path.relative_to(folder).as_posix() for path in named[:5])
    more = f" and {len(named) - 5:,} more" if len(named) > 5 else ""
    raise UserError(
        f"expected the splits in {folder} to be train.*, valid.* and perhaps test.*, got {names}{more}; "
        f"rename them, name their own folder, or use --data, --validation and --test."
    )
