"""The earlier place of folders that appear whole."""

from memformers.common.files import (
    BROKEN,
    MANIFEST,
    atomic_dir,
    check_manifest,
    checksum,
    has_manifest,
    newest_that_loads,
    numbered,
    remove,
    remove_leftovers,
    write_manifest,
)
from memformers.common.files import UNFINISHED as LEFTOVER
from memformers.common.files import move as moved

__all__ = [
    "BROKEN", "LEFTOVER", "MANIFEST", "atomic_dir", "check_manifest", "checksum", "has_manifest", "moved",
    "newest_that_loads", "numbered", "remove", "remove_leftovers", "write_manifest",
]  # fmt: skip
