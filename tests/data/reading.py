"""What the tests of this room share."""

import io
import zipfile
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import pytest

from memformers.common.errors import UserError
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import dataset_of
from memformers.data.tokenizer import ByteTokenizer


def write(folder, files):
    """Write files with these texts or bytes, or by these functions of their paths; returns ``folder``."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(folder / name)
        else:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def dataset(path, **spec):
    return dataset_of(CorpusSpec(str(path), **spec))


def as_text(*raw):
    return b"".join(raw).decode("utf-8", errors="surrogateescape")


def whole(data, *splits):
    """The text of these splits of a dataset, or of all."""
    names = splits or data.splits
    return as_text(*(data.tokenizer.bytes_of(data.splits[name].tokens) for name in names))


def contents(path, **spec):
    """What is read of a file or folder: the text, and the name and the text of each document."""
    read = dataset_of(CorpusSpec(str(path), **spec), ByteTokenizer()).splits["test"]
    raw = bytes(read.tokens)
    lengths = read.documents.tolist()
    texts = []
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        texts.append(as_text(raw[end - length : end]))
    return as_text(raw), list(zip(read.names, texts, strict=True))


@contextmanager
def refused(words):
    """A block that ends with an error of one line with these ``words``."""
    with pytest.raises(UserError, match=words) as error:
        yield
    assert "\n" not in str(error.value)


def zipped(files):
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return raw.getvalue()


def saved(numbers):
    raw = io.BytesIO()
    np.save(raw, numbers)
    return raw.getvalue()
