"""The published corpora of the papers: how they are divided, and how to recognize that they are complete."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from memformers.common.errors import UserError
from memformers.data import SPLITS

PYTHON_SOURCE = "python-source"
"""The sources of this interpreter and its packages, which differ between machines."""


@dataclass(frozen=True)
class Benchmark:
    tokenizer: str
    vocab_size: int | None = None  # of subwords
    sizes: tuple[int, ...] = ()  # bytes of each split in its one file; empty: each split is a file or folder
    sha256: str = ""  # of that file, if it is published
    documents: tuple[int, ...] = ()  # how many each split has, each a file; empty: a split is one text
    words: tuple[int, ...] = ()  # how many words and ends of lines each split has

    def ends(self, total: int, sha256: str) -> dict[str, int]:
        """Where each split ends in its one file of ``total`` bytes."""
        if total != sum(self.sizes) or (self.sha256 and sha256 != self.sha256):
            raise UserError(
                f"expected the published file of {sum(self.sizes):,} bytes, SHA-256 {self.sha256 or 'any'}, "
                f"got {total:,} bytes, {sha256}; download it again, or prepare it without the corpus's name."
            )
        return dict(zip(SPLITS, accumulate(self.sizes), strict=False))

    def check(self, counts: Mapping[str, Any], tokenizer: str) -> None:
        """Raise UserError unless splits of these [`Counts`][memformers.data.dataset.Counts] are complete."""
        # If tokens are words, each word of the text is one.
        n_words = self.words if tokenizer == "word" else ()
        for unit, expected in (("documents", self.documents), ("tokens", n_words)):
            numbers = tuple(getattr(count, unit) for count in counts.values())
            if expected and numbers != expected:
                raise UserError(f"expected {expected} {unit}, got {numbers}; is the corpus complete?")


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


def benchmark(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise UserError(f"corpus={name!r} is unknown; use one of {', '.join([*BENCHMARKS, PYTHON_SOURCE])}.")
    return BENCHMARKS[name]
