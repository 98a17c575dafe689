"""``memformers prepare``: texts as tokens on the disk."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count
from memformers.common.files import config_from_dict, read_json
from memformers.common.words import counted
from memformers.data.benchmarks import PYTHON_SOURCE, Benchmark, benchmark
from memformers.data.files import STDIN
from memformers.data.gathering import Recipe
from memformers.data.preparing import prepare
from memformers.data.store import CARD, Card


@dataclass(frozen=True)
class Prepare(Checked):
    """Divide a text of any size into tokens, once, into a folder that --data takes. It needs little memory
    and encodes subwords on all cores.

    Example: memformers prepare books/ --tokenizer bpe --out tokens/books

    Example: memformers train --data tokens/books

    Example: memformers prepare enwik8 downloads/enwik8
    """

    text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    """A text file, - for standard input; or documents, as a folder of texts or a .jsonl file with a "text" in
    each line. Files that end with .gz, .bz2, .xz, .zst or .zip are decompressed. Or the name of a corpus, and
    then its file or folder: enwik8, text8, wikitext-103, pg19; or python-source, alone: the sources of this
    Python and its packages."""
    file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[FILE]")] = None
    """The file or the folder of a corpus that was named, as it is published, decompressed."""
    out: Path | None = None
    """The new folder; by default tokens/, then the names of the text and the tokenizer."""
    tokenizer: str = ""
    """A token is a part of a word (bpe) or a byte (byte); a word, numbered by frequency (word); or a
    character, numbered in alphabetical order (character) or by frequency (frequency). Or the path of a
    tokenizer.json of Hugging Face's. Empty: what the papers use for a corpus with a name, else bpe."""
    vocab_size: Count | None = None
    """How many words or subwords there are; by default all words, or 8192 subwords."""
    document_separator: str = ""
    """The text between the documents of a text file; empty: the file is one text."""

    def run(self) -> None:
        """Prepare, then say what there is."""
        if not self.text:
            raise UserError("TEXT is empty; name a text file or a folder, . for the one that you are in.")
        corpus = self.text if self.file or self.text == PYTHON_SOURCE else ""
        usual = benchmark(corpus) if self.file else Benchmark("bpe")
        tokenizer = self.tokenizer or usual.tokenizer
        vocab_size = self.vocab_size or (usual.vocab_size if tokenizer == "bpe" else None)
        recipe = Recipe(self.file or Path(self.text), corpus, self.document_separator, tokenizer, vocab_size)
        name = tokenizer if not tokenizer.endswith(".json") else "subwords"
        text = "stdin" if recipe.source == STDIN else corpus or Path(self.text).resolve().name
        out = self.out or Path("tokens") / f"{text}-{name}"
        if out.exists():
            raise UserError(f"{out} exists already; name a new folder as --out.")
        folder = prepare(recipe, out)
        card = config_from_dict(Card, read_json(folder / CARD), str(folder / CARD))
        if card.source != str(recipe.source):  # which was waited for
            raise UserError(f"{out} was made from {card.source} meanwhile; name another folder as --out.")
        for split, counts in card.splits.items():
            documents = f", {counted(counts.documents, 'document')}" if counts.documents else ""
            print(
                f"{split:<12}{counts.tokens:,} tokens, {counts.characters:,} characters, {counts.words:,} "
                f"words{documents}"
            )
        print(f"tokens: {folder}")
