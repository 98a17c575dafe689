"""What can't be read, or not with these options: one line that says what is wrong, and nothing is left."""

import re
import shlex
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from memformers.data import corpus_reader
from tests.data.reading import saved, write, zipped
from tests.data.test_reading import IDS, NO_TEXT, NPY, PACK, RAW, TEXT
from tests.processes import run

WORDS = "some words\n" * 9
PLAIN = {"x.txt": TEXT, "y": " \n", "z": Path.mkdir}


class Case(NamedTuple):
    """Files; the command's arguments, which name a text unless they begin with an option; and its error."""

    files: dict[str, Any]
    arguments: str
    message: str


def list_bytes():
    """Files that are no text in UTF-8."""
    for (name, (raw, byte, offset)), tokenizer in zip(NO_TEXT.items(), cycle(("character", "word", "bpe"))):
        shown_offset = f"{offset:,}" if offset != "" else ".*"
        message = (
            f"expected {name} to be text in UTF-8, got byte {byte}.* at offset {shown_offset}; "
            "convert it to UTF-8, or read its bytes with --tokenizer byte."
        )
        yield Case({name: raw}, f"--tokenizer {tokenizer}", message)
    for ending, pack in PACK.items():
        yield Case({f"x{ending}": pack(RAW)[:-20]}, "", f"x{ending} .* use a complete file")
    not_utf_8 = r"expected x\.jsonl to be text in UTF-8, got byte 0xff at offset 10"
    yield Case({"x.jsonl": b'{"text": "\xff"}'}, "", not_utf_8)


# The third line of a file of JSON, and what is said of it.
WRONG_LINES = [
    (b'{"text": "cut o', r'"text", got \'{"text": "cut o\' \('),
    (b'["a"]', r"""got '\["a"\]';"""),
    (b'{"txt": "a"}', "name another field with text_field"),
    (b'{"text": 3}', "3"),
    (b"[" * 100_000, r"got '\[{40}…' \("),
    (b'{"text": "\\ud83d"}', r"U\+D83D is not a character"),
    (b'{"text": "\\u0000"}', r"U\+0000 is not a character"),
]


def list_lines():
    """Lines of JSON."""
    for line, message in WRONG_LINES:
        raw = b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n'
        yield Case({"x.jsonl": raw}, "", rf"x\.jsonl:3: .*{message}")
    two_lines = {"x.json": '{"content": "a"}\n{"content": "b"}\n'}
    yield Case(two_lines, "", r"x\.json:1: .*string \"text\", got")
    yield Case(two_lines, "--tokenizer byte", r"x\.json:1: .*string \"text\", got")
    one_object = {"x.json": '{\n"content": "a"}\n'}
    yield Case(one_object, "--text-field contnt", r"x\.json:1: .*string \"contnt\"")

    def write_long_line(path):
        path.write_bytes(PACK[".zst"](b"{" + b"x" * (2 << 20)))

    yield Case({"x.jsonl.zst": write_long_line}, "", r"x\.jsonl\.zst:1: .* at most 1,048,576 characters")


# The files of a folder, and those that sound like splits.
WRONG_SPLITS = [
    (("train.txt", "test.txt", "more.txt"), "test.txt, train.txt"),
    (("loire.val.txt", "orient_express_train.txt", "the-test.txt"),
     "loire.val.txt, orient_express_train.txt, the-test.txt"),
    (("a_train.txt", "a_valid.txt", "b_train.txt", "b_valid.txt"),
     "a_train.txt, a_valid.txt, b_train.txt, b_valid.txt"),
    (("train.txt", "valid_test.txt"), "train.txt, valid_test.txt"),
    (("en/more/train.txt", "en/more/test.txt"), "en/more/test.txt, en/more/train.txt"),
    (("train/1.txt", "eval/2.txt"), "eval, train"),
    (("more.md", "en/train.txt", "en/val.txt", "en/test.txt"), "en/test.txt, en/train.txt, en/val.txt"),
    (("more.txt", "en/train/1.txt", "en/test/2.txt"), "en/test, en/train"),
]  # fmt: skip


def list_splits():
    for names, listed in WRONG_SPLITS:
        files = {f"x/{name}": WORDS for name in names}
        yield Case(files, "", f"expected the splits in x to be .*, got {listed}; rename")
    twice = {"x/train": WORDS, "x/valid": WORDS, "x/val": WORDS}
    yield Case(twice, "", "x/val and x/valid are all for validation")
    splits = {f"x/{split}/0.txt": WORDS for split in ("train", "valid", "test")}
    yield Case(splits, "pg19 --vocab-size 256 x", r"\(1, 1, 1\); is the")
    yield Case(splits, "wikitext-103 x", r"\(27, 27, 27\); is the")


EMPTY = [
    ("", "", "contains no text"),
    ("", " \n", "contains no text"),
    ("", Path.mkdir, "contains no text"),
    ("--tokenizer byte", " \n", "contains no text"),
    ("enwik8 x", Path.mkdir, "to be one file"),
    ("--tokenizer character", "a", "leaves 0 tokens for train; use a longer text"),
    ("pg19 x", Path.mkdir, "to be a folder with train, valid and test"),
]
WRONG_OPTIONS = [
    ("gone.jsonl", r"gone\.jsonl doesn't exist; name a text file"),
    ("''", "TEXT is empty; name"),
    ("--document-separator '<end>'", r"'<end>' doesn't occur in x\.txt; give the text"),
    ("--vocab-size 9999", "9999"),
    ("--tokenizer letters", "'letters'"),
    ("--tokenizer byte --vocab-size 5", "vocab_size=5 applies to tokenizer='word' and 'bpe'"),
    ("--tokenizer character --vocab-size 5", "vocab_size=5 applies to tokenizer='word' and 'bpe'"),
    ("--tokenizer frequency --vocab-size 5", "vocab_size=5 applies to tokenizer='word' and 'bpe'"),
    ("--validation y", "leaves 0 tokens for validation"),
    ("--validation z", "z contains no text"),
    ("--test x.txt", "a text for test was given, and none as validation"),
    ("enwik8 x.txt", "SHA-256 2b49"),
    ("--out z", "z exists already"),
    ("enwik9 x.txt", "enwik8, text8, wikitext-103, pg19, python-source"),
    ("memory://far/y.txt", r"memory://far/y\.txt can't be read: .*y\.txt"),
    ("nowhere://x", "nowhere://x can't be read: Protocol not known: nowhere"),
]


def list_options():
    """Texts that are empty, and options that don't fit the text."""
    for arguments, content, message in EMPTY:
        yield Case({"x": content}, arguments, f"x {message}")
    for arguments, message in WRONG_OPTIONS:
        yield Case(PLAIN, arguments, message)
    divided = r"divides one text, and x\.txt consists of documents"
    yield Case({"x/x.txt": TEXT}, "--document-separator x", divided)
    one_line = {"x.jsonl": '{"text": "a"}'}
    yield Case(one_line, "--document-separator x", "and x.jsonl consists of documents")
    tokens = {"x/card.json": "{}", "x/tokenizer.json": "{}", "x/train.npy": NPY, "x/validation.npy": NPY}
    yield Case(tokens, "", "x holds tokens and no text")
    yield Case({"x/input.txt": "half"}, "", "the download is incomplete, or it is another text")

    def link_to_memory(path):
        path.symlink_to("/proc/self/mem")

    yield Case({"x/y": link_to_memory}, "", "/y can't be read: Input/output error")


def list_archives():
    for n_files, name in ((0, "x.zip"), (2, "y.zip"), (0, "x.tar"), (0, "x.TAR.gz"), (0, "x.tgz")):
        archive = zipped(dict.fromkeys("ab"[:n_files], ""))
        yield Case({name: archive}, "", f"{name} is an archive; unpack it")
    lines = {"x.zip": zipped({"y.jsonl": '{"text": "a"}'})}
    yield Case(lines, "", r"contains y\.jsonl; call it x\.jsonl\.zip")
    table = {"x.zip": zipped({"a/y.CSV": "text\na"})}
    yield Case(table, "", r"contains a/y\.CSV; call it x\.csv\.zip")


WRONG_IDS = [
    ("x.npy", saved(IDS - 5), "x.npy: .* from 0 to 4,294,967,295, got -5"),
    ("x.npy", saved(IDS / 2), r"x.npy .* of an integer type, got \[4000\] of float64"),
    ("x.npy", saved([IDS, IDS]), r"x.npy .* got \[2, 4000\] of int64"),
    ("x.npy", NPY[:-20], "x.npy can't be read as token ids"),
    ("x.npy", saved(np.array([IDS, None], object)), "x.npy can't be read as token ids"),
    ("x.bin", b"abc", "x.bin .* 2 bytes, got 3"),
    ("x.bin", b"", "x.bin .* got 0 bytes"),
]


def list_ids():
    nine = np.arange(9).astype("<u4").tobytes()
    yield Case({"x.bin": nine}, "--vocab-size 9", "every second id is 0, .* call it x.uint32.bin")
    yield Case({"x.uint64.bin": nine}, "--vocab-size 9", "expected ids of 8 bytes, got 36 bytes")
    yield Case({"x.npy": NPY}, "", "x.npy .*the largest is 299, so at least 300")
    yield Case({"x.npy": NPY}, "--vocab-size 299", r"below vocab_size=299, got 299 at \d")
    yield Case({"x.npy": NPY}, "--tokenizer word", "x.npy holds token ids already; omit tokenizer")
    both = {"x/x.npy": NPY, "x/y.txt": b"a text"}
    yield Case(both, "", "x.npy holds token ids, and y.txt a text")
    for name, raw, message in WRONG_IDS:
        yield Case({name: raw}, "--vocab-size 300", message)
    for ends, message in (([0, 9, 9, 5, 4000], ".* 2 steps that don't"), ([0, 4001], "from 0")):
        files = {"x.npy": NPY, "x_documents.npy": saved(ends)}
        yield Case(files, "--vocab-size 300", f"x_documents.npy to rise {message}")


CASES = [
    *list_bytes(), *list_lines(), *list_splits(), *list_options(), *list_archives(), *list_ids(),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize("case", CASES)
def test_what_cant_be_read_is_one_line_and_leaves_nothing(case, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_reader, "MAX_RECORD", 1 << 20)
    monkeypatch.chdir(write(tmp_path, case.files))
    paths = set(tmp_path.rglob("*"))
    arguments = shlex.split(case.arguments)
    names_text = case.arguments and not case.arguments.startswith("-")
    if not names_text:
        name, _, _ = next(iter(case.files)).partition("/")
        arguments = [name, *arguments]
    ended = run("prepare", "--out", "out/tokens", *arguments)
    assert ended.code == 2
    assert re.fullmatch(f"error: .*{case.message}.*\n", ended.err), ended.err
    assert set(tmp_path.rglob("*")) - paths <= {tmp_path / "out", tmp_path / "out" / ".preparing.lock"}
