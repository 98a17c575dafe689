"""What the tests of this room share."""

import io
import zipfile
from itertools import accumulate

import numpy as np

from memformers.data.corpus_reader import read
from memformers.data.sources import CorpusSpec, find
from memformers.data.tokenize_corpus import dataset_of


def text_and_documents(path, folder, **spec):
    """What is read of a file or folder: the text, and the name and the text of each document."""
    sources = find(CorpusSpec(str(path), **spec))
    found = read(sources, CorpusSpec(str(path), **spec), folder / ".text", lambda n: None)
    text = (folder / ".text").read_bytes().decode("utf-8", errors="surrogateescape")
    (folder / ".text").unlink()
    ends = accumulate(found.lengths)
    of_each = [text[end - n : end] for n, end in zip(found.lengths, ends, strict=True)]
    return text, list(zip(found.names, of_each, strict=True)) if found.are_documents else []


def dataset(path, **spec):
    return dataset_of(CorpusSpec(str(path), **spec))


def text_in(tokens, tokenizer):
    """The text of a split or of several."""
    return b"".join(tokenizer.bytes_of(np.asarray(each.tokens).astype(np.int64)) for each in tokens).decode(
        "utf-8", errors="surrogateescape"
    )


def zipped(files):
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return raw.getvalue()


def saved(numbers):
    raw = io.BytesIO()
    np.save(raw, numbers)
    return raw.getvalue()
