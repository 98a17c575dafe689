"""The papers' corpora, from the files in which they are published, with the published splits."""

import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.data import SPLITS


@dataclass(frozen=True)
class Benchmark:
    """A corpus that papers compare on."""

    tokenizer: str
    vocab_size: int | None = None
    """Of subwords."""
    sizes: tuple[int, ...] = ()
    """The bytes of each split in its one file, one after the other; empty: each split is a file or folder."""
    sha256: str = ""
    """Of that file, if it is published."""
    documents: tuple[int, ...] = ()
    """How many each split has, each a file; empty: a split is one text."""
    words: tuple[int, ...] = ()
    """How many words and ends of lines each split has."""

    def ends(self, total: int, sha256: str) -> dict[str, int]:
        """Where each split ends in its one file of ``total`` bytes; UserError for another file than the
        published one."""
        if total != sum(self.sizes) or (self.sha256 and sha256 != self.sha256):
            raise UserError(
                f"expected the published file of {sum(self.sizes):,} bytes"
                f"{f' and SHA-256 {self.sha256}' * bool(self.sha256)}, got {total:,} bytes and {sha256}; "
                f"download it again, or prepare it without the corpus's name."
            )
        return {split: sum(self.sizes[: i + 1]) for i, split in enumerate(SPLITS)}

    def check(self, counts: Mapping[str, Any], tokenizer: str) -> None:
        """Raise UserError unless the splits with these [`Counts`][memformers.data.dataset.Counts] have as
        many documents and words as the published ones."""
        for what, expected in (("documents", self.documents), ("words", self.words * (tokenizer == "word"))):
            found = tuple(getattr(c, "tokens" if what == "words" else what) for c in counts.values())
            if expected and found != expected:
                raise UserError(
                    f"expected {expected} {what} in {', '.join(SPLITS)}, got {found}; is it whole?"
                )


BENCHMARKS = {
    # Mahoney, mattmahoney.net/dc/textdata.html; the splits are those of the papers.
    "enwik8": Benchmark(
        "byte",
        sizes=(90_000_000, 5_000_000, 5_000_000),
        sha256="2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
    ),
    "text8": Benchmark("character", sizes=(90_000_000, 5_000_000, 5_000_000)),
    # Merity et al. 2016 (arXiv 1609.07843), table 1.
    "wikitext-103": Benchmark("word", words=(103_227_021, 217_646, 245_569)),
    # Rae et al. 2020 (arXiv 1911.05507), table 2.
    "pg19": Benchmark("bpe", 32_000, documents=(28_602, 50, 100)),
}
PYTHON_SOURCE = "python-source"
"""The sources of the running interpreter and its packages: a text to scale with that needs no network, but
not one that other machines have bit for bit."""


def benchmark(name: str) -> Benchmark:
    """The corpus called ``name``; else UserError."""
    if name not in BENCHMARKS:
        raise UserError(f"corpus={name!r} is unknown; use one of {', '.join([*BENCHMARKS, PYTHON_SOURCE])}.")
    return BENCHMARKS[name]


def python_sources() -> dict[str, Path]:
    """The Python files of the running interpreter and its packages, by name, in alphabetical order."""
    roots = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")}
    roots |= {Path(path).resolve() for path in sys.path if path.endswith("-packages")}
    outer = [
        root for root in roots if not any(root != other and root.is_relative_to(other) for other in roots)
    ]
    return {
        str(path): path for root in sorted(outer) for path in sorted(root.rglob("*.py")) if path.is_file()
    }
