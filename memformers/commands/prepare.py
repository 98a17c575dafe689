"""``memformers prepare``: texts as tokens on disk."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from memformers.common.console import counted
from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count, NonNegativeInt
from memformers.data.benchmarks import PYTHON_SOURCE, Benchmark, benchmark
from memformers.data.dataset import read_info
from memformers.data.sources import CorpusSpec, find
from memformers.data.tables import TEXT_FIELD
from memformers.data.tokenize_corpus import check_is_new, prepare


@dataclass(frozen=True)
class Prepare(Checked):
    """Tokenize a text of any size once, into a folder that --data takes. It needs little memory and encodes
    subwords on all cores.

    Example: memformers prepare books/ --tokenizer bpe --out tokens/books

    Example: memformers train --data tokens/books

    Example: memformers prepare enwik8 downloads/enwik8
    """

    text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    """A text file, - for standard input; or documents, as a folder of texts, a .jsonl file, or a .parquet or
    .csv table; or token ids, as .npy, .bin or .ds; or a folder with train.*, valid.* and perhaps test.* of
    these. Files that end with .gz, .bz2, .xz, .zst or .zip are decompressed. Or the name of a corpus, and
    then its file or folder: enwik8, text8, wikitext-103, pg19; or python-source, alone: the sources of this
    Python and its packages."""
    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[FILE]")] = ""
    """The file or the folder of a named corpus, as it is published, decompressed."""
    validation: str = ""
    """The text to validate on, of the same kinds; empty: the last 10 % of TEXT, or the split in its
    folder."""
    test: str = ""
    """The text that memformers evaluate reads; no training reads it."""
    text_field: str = TEXT_FIELD
    """Which field of a line of JSON, or which column of a table, is the text."""
    out: Path | None = None
    """The new folder; by default tokens/, then the names of the text and the tokenizer."""
    tokenizer: str = ""
    """A token is a part of a word (bpe) or a byte (byte); a word, numbered by frequency (word); or a
    character, numbered in alphabetical order (character) or by frequency (frequency). Or the path of a
    tokenizer.json of Hugging Face's. Empty: what the papers use for a corpus with a name, else bpe."""
    vocab_size: Count | None = None
    """How many words or subwords there are, by default all words, or 8192 subwords; of token ids, how many
    different ones."""
    document_separator: str = ""
    """The text between the documents of a text file; empty: the file is one text."""
    document_end: NonNegativeInt | None = None
    """The token id that ends each document, for files of token ids."""

    def run(self) -> None:
        if not self.text:
            raise UserError("TEXT is empty; name a text file or a folder, . for the one that you are in.")
        # What is read, and how: a corpus with a name has the tokenizer of the papers.
        corpus = self.text if self.file or self.text == PYTHON_SOURCE else ""
        usual = benchmark(corpus) if self.file else Benchmark("bpe")
        tokenizer = self.tokenizer or usual.tokenizer
        vocab_size = self.vocab_size or (usual.vocab_size if tokenizer == "bpe" else None)
        data = self.file or ("" if corpus else self.text)
        spec = CorpusSpec(
            data=data,
            validation=self.validation,
            test=self.test,
            document_separator=self.document_separator,
            text_field=self.text_field,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            corpus=corpus,
            document_end=self.document_end,
        )
        sources = find(spec)
        kind = "ids" if any(part.has_ids(tokenizer) for part in sources.parts) else tokenizer
        if self.vocab_size and kind in ("character", "frequency", "byte"):
            raise UserError(
                f"vocab_size={self.vocab_size} applies to tokenizer='word' and 'bpe' and to token ids, not "
                f"to tokenizer={kind!r}."
            )

        # Where the tokens go.
        name = "stdin" if data == "-" else corpus or Path(self.text).resolve().name
        out = self.out or Path("tokens") / f"{name}-{'subwords' if kind.endswith('.json') else kind}"
        check_is_new(out)

        # The tokens, and how many there are.
        card = read_info(prepare(spec, out, sources=sources))
        for split, counts in card.splits.items():
            documents = f", {counted(counts.documents, 'document')}" if counts.documents else ""
            text = f", {counts.characters:,} characters, {counts.words:,} words"
            if card.tokenizer == "ids":  # which stand for no text
                text = ""
            print(f"{split:<12}{counts.tokens:,} tokens{text}{documents}")
        print(f"tokens: {out}")
