"""Every kind of file, as the text, documents or token ids in it, or as one line that says what is wrong."""

import bz2
import gzip
import json
import lzma
import os
import pickle
import re
import sys
from contextlib import nullcontext
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import zstandard

from memformers import prepare_ids
from memformers.data import files as files_module
from memformers.data import tokenize_corpus
from memformers.data.corpus_reader import read_prompt
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import prepare
from memformers.data.tokenizer import ByteTokenizer
from tests.data.reading import as_text, contents, dataset, refused, saved, whole, write, zipped

TEXT = "Über die Brücke – 橋を渡る 🌉.\n" * 400
RAW = TEXT.encode()
# The byte order mark.
MARK = "\ufeff"
# What makes a compressed file, by its ending.
PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
    ".zip": lambda raw: zipped({"folder/": "", "folder/x": raw}),
}

# What is no text, and its first byte that is none: its value, and where it is.
UTF_16 = b"\xff\xfe" + TEXT.encode("utf-16-le")
NO_TEXT = {
    "ids": (saved(np.arange(9)), "0x93", 0),
    "short.txt": (b"ab\0\1", "0x00", 2),
    "latin.txt": ("für Gänse öffnen ".encode("latin-1"), "0xfc", 1),
    "no-mark.txt": ("plain".encode("utf-16-le"), "0x00", 1),
    "end.txt": (RAW + b"\xe6\xa9", "0xe6", len(RAW)),
    "far.txt": (RAW * 99 + b"\0", "0x00", 99 * len(RAW)),
    "middle.txt": (b"\xef\xbb\xbf" + RAW * 99 + b"\xff" + RAW, "0xff", 3 + 99 * len(RAW)),
    "utf-32.txt": (b"\xff\xfe\0\0a\0\0\0", "0x00", 2),
    "half.txt": (UTF_16 + b"\x3c\xd8a\0", "0x3c", len(UTF_16)),
    "nul.txt": (UTF_16 + b"\0\0", "0x00", len(UTF_16)),
    "packed.gz.x": (PACK[".gz"](RAW), "0x8b", 1),
    "packed.bz2.x": (PACK[".bz2"](RAW), "0x", ""),
    "packed.xz.x": (PACK[".xz"](RAW), "0xfd", 0),
    "packed.zst.x": (PACK[".zst"](RAW), "0xb5", 1),
    "packed.zip.x": (PACK[".zip"](RAW), "0x", ""),
}


NO_OPTIONS: dict[str, str] = {}


class Case(NamedTuple):
    """Files, of which the first is named, and the text or the documents with their names that are read."""

    files: dict[str, Any]
    expected: str | list[tuple[str, str]]
    options: dict[str, str] = NO_OPTIONS
    warning: str = ""


def list_texts():
    """One text, in any encoding, compressed or not."""
    for encoding in ("utf-8", "utf-16-le", "utf-16-be"):
        yield Case({"x.txt": f"{MARK}{TEXT}".encode(encoding)}, TEXT)
    # The first of two compressed parts may hold half of a character or of a mark.
    for raw in (RAW, f"{MARK}{TEXT}".encode(), f"{MARK}{TEXT}".encode("utf-16-le")):
        yield Case({"x.txt.gz": gzip.compress(raw[:1]) + gzip.compress(raw[1:])}, TEXT)
    yield Case({"x.txt": TEXT, "y": " \n", "z": Path.mkdir}, TEXT)
    yield Case({"x.zip": PACK[".zip"](RAW)}, TEXT)
    for ending, pack in PACK.items():
        for n_zeros in (0, 5, 100_000):  # of padding
            if ending != ".zip":
                packed = pack(RAW[:5000]) + pack(RAW[5000:]) + bytes(n_zeros)
                yield Case({f"x.txt{ending}": packed}, TEXT)
    for name, (raw, *_) in NO_TEXT.items():
        yield Case({name: raw}, as_text(raw.removeprefix(b"\xef\xbb\xbf")), {"tokenizer": "byte"})
    for text in ('{\n"text": "a"}', '["a"]\n', "plain"):  # no lines of JSON
        yield Case({"x.json": text}, text)


FIRST_DOCUMENT = {"id": 3, "text": "One\u2028line", "body": "other"}
SECOND_DOCUMENT = {"text": "naïve\ntext", "body": "fields"}
LINES = f"{MARK}{json.dumps(FIRST_DOCUMENT)}\r\n\n{json.dumps(SECOND_DOCUMENT)}".encode()


def list_documents():
    """Lines of JSON, alone and in a folder, and one text with separators."""
    names = dict.fromkeys(("x.jsonl", "x.jsonlines", "x.ndjson", "x.JSON"), LINES)
    for ending, pack in PACK.items():
        names[f"x.jsonl{ending}"] = pack(LINES)
    for name, raw in names.items():
        for folder in ("", "x/"):
            for field in ("text", "body"):
                documents = [(f"{name}:1", FIRST_DOCUMENT[field]), (f"{name}:3", SECOND_DOCUMENT[field])]
                yield Case({folder + name: raw}, documents, {"text_field": field})
    yield Case(
        {"x.txt": "One\n---\nTwo\nlines\n---\n \n---\nThree\n---\n"},
        [("x.txt:1", "One"), ("x.txt:2", "Two\nlines"), ("x.txt:4", "Three")],
        {"document_separator": "\n---\n"},
        r"documents without text are left out: x\.txt:3\.$",
    )


FOLDER = {"x/b.txt": "Zwei: ä.\n", "x/a/z.md": "One.\n", "x/c.jsonl": '{"text": "Tre"}\n{"text": "IV"}'}
IN_ORDER = [("a/z.md", "One.\n"), ("b.txt", "Zwei: ä.\n"), ("c.jsonl:1", "Tre"), ("c.jsonl:2", "IV")]
# What a folder may have besides its documents, and the warning.
LEFT_OUT = [
    ({"a/.hidden": "not read", ".git/config": "not read"}, ""),
    ({"b.dat": saved(np.arange(9))}, r"not text and left out: b.dat \(byte 0x93 at offset 0\)\.$"),
    ({"c.zip": zipped({"a": "x", "b": "y"})}, r"left out: c.zip \(an archive\)\.$"),
    ({"c.tar.gz": b"x"}, r"left out: c.tar.gz \(an archive\)\.$"),
    ({"d.txt": b"abc" * 99 + b"\xff"}, r"not text and left out: d\.txt \(byte 0xff at offset 297\)\.$"),
    ({"e.txt": " \n"}, r"documents without text are left out: e\.txt\.$"),
    ({f"{n}.png": b"\x89PNG\xff" for n in range(6)}, r"4.png \(byte 0x89 at offset 0\) and 1 more\.$"),
    ({"runs/x/config.json": "{}", "runs/x/run.json": "{}"}, r"runs or tokens are left out: runs/x\.$"),
    ({"runs/x/experiment.json": "{}", "runs/x/other.json": "{}"}, r"or tokens are left out: runs/x\.$"),
    ({"runs/x/card.json": "{}", "runs/x/tokenizer.json": "{}"}, r"or tokens are left out: runs/x\.$"),
]
# Names that sound like splits.
NO_SPLITS = [
    ("loire.txt", "orient_express_train.txt"),
    ("test.py", "train.py"),
    ("attest.txt", "latest.txt", "restrain.txt"),
]


def list_folders():
    for others, warning in LEFT_OUT:
        in_folder = {f"x/{name}": content for name, content in others.items()}
        yield Case(FOLDER | in_folder, IN_ORDER, warning=warning)
    for names in NO_SPLITS:
        files = {f"x/{name}": "a b" for name in names}
        yield Case(files, [(name, "a b") for name in names])


@pytest.mark.parametrize("case", [*list_texts(), *list_documents(), *list_folders()])
def test_a_file_or_folder_is_its_text_or_its_documents(case, tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, case.files))
    first_file = next(iter(case.files))
    name, _, _ = first_file.partition("/")
    with pytest.warns(UserWarning, match=case.warning) if case.warning else nullcontext():
        text, documents = contents(name, **case.options)
    assert (documents or text) == case.expected
    if documents:
        assert text == "".join(text for _, text in documents)
    elif not case.options:
        assert read_prompt(first_file, ByteTokenizer()) == text


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks that are read and encoded are smaller than these texts."""
    # A script may have no main guard, so that no process may start.
    monkeypatch.setattr(BaseProcess, "start", None)
    monkeypatch.setattr(files_module, "BLOCK", 1 << 14)
    monkeypatch.setattr(files_module, "PIECE", 1 << 12)
    monkeypatch.setattr(tokenize_corpus, "PIECE", 1 << 12)
    monkeypatch.setattr(tokenize_corpus, "JOB", 1 << 15)


MANY = [f"{n} naïve kings…\r\n{'🌉 crowns, ' * (n % 30)}\n" for n in range(600)]


@pytest.mark.usefixtures("small_blocks")
def test_a_text_of_many_blocks_is_whole(tmp_path):
    text = "".join(MANY)
    write(tmp_path, {"x": text.encode("utf-16"), "y": text})
    assert contents(tmp_path / "x") == (text, [])
    for tokenizer in ("character", "bpe"):
        data = dataset(tmp_path / "y", tokenizer=tokenizer, vocab_size=300)
        assert whole(data, "train") == text[: len(text) * 9 // 10]
        assert whole(data) == text


def numbered(name, texts):
    """The documents of a file with these ``texts``."""
    return [(f"{name}:{number}", text) for number, text in enumerate(texts, 1)]


@pytest.mark.usefixtures("small_blocks")
def test_lines_of_many_blocks_are_whole(tmp_path):
    lines = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in MANY)
    write(tmp_path, {"x.jsonl": lines})
    assert contents(tmp_path / "x.jsonl") == ("".join(MANY), numbered("x.jsonl", MANY))


@pytest.mark.usefixtures("small_blocks")
def test_a_separator_across_two_blocks_is_found(tmp_path):
    separator = "<end of a document>"
    # Each begins so many characters before the end of a block.
    begins = [(1 << 14) - 1, (2 << 14) - 9, (3 << 14) - len(separator) + 1]
    ends_of_separators = [-len(separator), *begins]
    texts = ["x" * (end - begin - len(separator)) for begin, end in pairwise(ends_of_separators)]
    write(tmp_path, {"x.txt": separator.join([*texts, ""])})
    documents = numbered("x.txt", texts)
    assert contents(tmp_path / "x.txt", document_separator=separator) == ("".join(texts), documents)


# Token ids.

IDS = np.random.default_rng(0).integers(0, 300, 4000)
NPY = saved(IDS)
PIECES = np.split(IDS, [1000, 3500])
LENGTHS = [[1000, 2500], [500]]
NO_DOCUMENTS = [[], []]
BY_SPLIT = {"train": torch.from_numpy(IDS[:3500]), "validation": PIECES[2:]}


class IdsCase(NamedTuple):
    """Files of IDS; the lengths and the names of documents, by split."""

    files: dict[str, Any]
    lengths: list[list[int]]
    names: list[list[str]]


def list_ids():
    for name, raw in {
        "x.npy": NPY,
        "x.NPY": saved(IDS.astype(np.uint16)),
        "x.bin": IDS.astype("<u2").tobytes(),
        "x.uint32.bin": IDS.astype("<u4").tobytes(),
        "x.uint64.bin": IDS.astype("<u8").tobytes(),
    }.items():
        yield IdsCase({name: raw}, NO_DOCUMENTS, NO_DOCUMENTS)
    files = {f"x/{number}.npy": saved(ids) for number, ids in enumerate(PIECES)}
    yield IdsCase(files, LENGTHS, [["0.npy", "1.npy"], ["2.npy"]])
    with_documents = {"x.npy": NPY, "x_documents.npy": saved([0, 1000, 3500, 4000])}
    yield IdsCase(with_documents, LENGTHS, [["x.npy:1", "x.npy:2"], ["x.npy:3"]])
    for ids, lengths in ((IDS, NO_DOCUMENTS), (PIECES, LENGTHS), (BY_SPLIT, [[3500], [500]])):
        of_program = {"x": lambda path, ids=ids: prepare_ids(path, ids, vocab_size=300)}
        yield IdsCase(of_program, lengths, NO_DOCUMENTS)


@pytest.mark.parametrize("case", [*list_ids()])
def test_ids_are_the_tokens_in_memory_and_on_the_disk(case, tmp_path):
    """With their documents."""
    name, _, _ = next(iter(case.files)).partition("/")
    path = write(tmp_path, case.files) / name
    in_memory = dataset(path, vocab_size=300)
    is_prepared = "x" in case.files
    if not is_prepared:
        path = prepare(CorpusSpec(str(path), vocab_size=300), tmp_path / "tokens")
    for data in (in_memory, dataset(path)):
        assert np.array_equal(np.concatenate([data.train.tokens, data.validation.tokens]), IDS)
        assert [split.documents.tolist() for split in data.splits.values()] == case.lengths
        assert (data.tokenizer.name, data.tokenizer.vocab_size) == ("ids", 300)
        assert data.train.tokens.dtype == "u2"
        assert [data.info.total(unit) for unit in ("characters", "tokens", "bytes")] == [4000, 4000, 0]
    assert [list(split.names) for split in in_memory.splits.values()] == case.names


def test_a_folder_of_ids_has_splits_and_runs_nothing_beside_them(tmp_path):
    raw = IDS.astype("<u2").tobytes()
    write(tmp_path, {"train.bin": raw[:6000], "val.bin": raw[6000:], "meta.pkl": pickle.dumps(Path("/"))})
    with pytest.warns(UserWarning, match=r"of no split and left out: meta\.pkl"):
        data = dataset(tmp_path, vocab_size=300)
    assert np.array_equal(np.concatenate([split.tokens for split in data.splits.values()]), IDS)
    assert [len(split.tokens) for split in data.splits.values()] == [3000, 1000]


@pytest.mark.parametrize(
    ("name", "ids", "message"),
    [("y", {"training": IDS}, "expected splits train, validation"), ("y", {"train": IDS}, "expected spli"),
     ("y", [1, 2, 3], "numpy.array"), ("y", {"train": "abc"}, "numpy.array"), ("y", IDS / 2, "float64"),
     ("y", [IDS, IDS + 1], "got 300 at 4,"), ("y", [], "no text"),
     ("y", IDS + (1 << 32), "from 0 to 4,294,967,295, got 4,294,967,296"), (".", IDS, "exists already")],
)  # fmt: skip
def test_ids_of_a_program_that_are_wrong_leave_nothing(name, ids, message, tmp_path):
    with refused(message):
        prepare_ids(tmp_path / name, ids, vocab_size=300)
    assert {path.name for path in tmp_path.iterdir()} <= {".preparing.lock"}


def test_ids_have_four_bytes_where_so_many_are_different(tmp_path):
    ids = np.arange(20_000) * 5 % 100_000
    ids.astype("<u4").tofile(tmp_path / "x.bin")
    assert np.array_equal(dataset(tmp_path / "x.bin", vocab_size=100_000).train.tokens, ids[:18_000])


# Folders and tables.


def test_links_are_followed_once_and_dead_ones_are_named(tmp_path):
    write(tmp_path, {"disk/a.txt": "linked", "x/own.txt": "own"})
    (tmp_path / "x/more").symlink_to(tmp_path / "disk")
    (tmp_path / "disk/again").symlink_to(tmp_path / "x")
    (tmp_path / "x/gone").symlink_to(tmp_path / "nowhere")
    with pytest.warns(UserWarning, match="left out") as warnings:
        _, documents = contents(tmp_path / "x")
    assert documents == [("more/a.txt", "linked"), ("own.txt", "own")]
    messages = {str(warning.message).partition(": ")[2] for warning in warnings}
    assert "folders that are read already are left out: more/again." in messages
    assert "links that lead nowhere are left out: gone." in messages


def test_a_part_of_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    write(tmp_path, FOLDER)
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scandir("/gone" if str(path)[-2:] == "/a" else path))
    with refused("/gone can't be read: No such file"):
        contents(tmp_path / "x")


@pytest.mark.parametrize("name", ["x.csv", "x.parquet", "x.json", "hf://datasets/roneneldan/TinyStories"])
def test_a_table_names_the_extra_if_it_is_missing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, dict.fromkeys(("x.csv", "x.parquet", "x.json"), '[{"text": "a"}]')))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(rf"{re.escape(name)} is a table.*: pip install datasets"):
        contents(name)
