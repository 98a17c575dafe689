"""From files of any kind to one text: what it looks like decides, and what can't be read is one line."""

import array
import bz2
import codecs
import gzip
import json
import lzma
import os
import pickle

import numpy as np
import pyarrow
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv, parquet

from memformers.common.errors import UserError
from memformers.data import files
from memformers.data.corpus_reader import read_text
from memformers.data.utf8 import bytes_of, not_text, text_of
from tests.data.reading import dataset, saved, text_and_documents, text_in, zipped

TEXT = "Über die Brücke – 橋を渡る 🌉.\n" * 400
PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
        ".zst": zstandard.compress, ".zip": lambda raw: zipped({"folder/": "", "folder/x": raw})}  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 50_000, 4000)
NO_TEXT = {
    "ids": (saved(IDS), "a NumPy array; end its name with .npy"),
    "ids.dat": (IDS.astype(np.uint16).tobytes(), "end its name with .bin"),
    "characters.txt": ((IDS % 65).astype(np.uint16).tobytes(), "16-bit token ids"),
    "meta.txt": (pickle.dumps({"vocab_size": 65, "itos": "abc" * 9}), "a pickle"),
    "no-mark.txt": (("plain text " * 500).encode("utf-16-le"), "UTF-16 without a byte order mark"),
    "latin.txt": (("für Gänse öffnen " * 300).encode("latin-1"), "another encoding"),
    **{
        f"packed{end}.x": (pack(TEXT.encode()), f"end its name with {end}")
        for end, pack in PACK.items()
        if end
    },
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_no_text_is_refused_with_what_it_looks_like_and_read_as_bytes_if_asked(name, tmp_path):
    raw, words = NO_TEXT[name]
    path = tmp_path / name
    path.write_bytes(raw)
    for tokenizer in ("character", "word", "bpe"):
        with pytest.raises(UserError, match=words) as error:
            dataset(path, tokenizer=tokenizer)
        assert name in str(error.value)
        assert "\n" not in str(error.value)
    found = dataset(path, tokenizer="byte")
    assert bytes_of(text_in(found.splits.values(), found.tokenizer)) == raw


def test_a_folder_leaves_out_what_is_no_text_and_says_so(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.txt").write_text(TEXT)
    for name, raw, said in (
        ("b.dat", saved(IDS), r"not text and left out: b.dat \(a NumPy array\)\.$"),
        ("c.zip", zipped({"a": "x", "b": "y"}), r"left out: c.zip \(not one file, but several\)\.$"),
        ("d.txt", b"abc" * 99 + b"\xff", r"not UTF-8 and left out: d\.txt\.$"),
        ("e.txt", b" \n", r"documents without text are left out: e\.txt\.$"),
    ):
        (tmp_path / "x" / name).write_bytes(raw)
        with pytest.warns(UserWarning, match=said):
            assert text_and_documents(tmp_path / "x", tmp_path)[0] == TEXT
        (tmp_path / "x" / name).unlink()
    for n in range(6):
        (tmp_path / "x" / f"{n}.png").write_bytes(b"\x89PNG\xff")
    with pytest.warns(UserWarning, match=r"4.png \(a PNG image\) and 1 more\.$"):
        text_and_documents(tmp_path / "x", tmp_path)


@pytest.mark.parametrize(
    "raw", [b"a\r\nb\r\n", b"a\rb", "a\u2028é€".encode(), b"abc\xff\xfe", bytes(range(256))]
)
def test_text_is_the_bytes_that_it_was_read_from(raw, tmp_path):
    (tmp_path / "x.txt").write_bytes(raw)
    assert text_and_documents(tmp_path / "x.txt", tmp_path, tokenizer="byte")[0] == text_of(raw)
    assert read_text(str(tmp_path / "x.txt")) == text_of(raw) == text_of(codecs.BOM_UTF8 + raw)
    assert bytes_of(text_of(raw)) == raw


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-32-be"])
def test_a_text_is_read_in_the_encoding_that_its_byte_order_mark_says(encoding, tmp_path):
    path, mark = tmp_path / "x.txt", {"be": "\ufeff", "le": "\ufeff"}.get(encoding[-2:], "")
    path.write_bytes((mark + TEXT).encode(encoding))
    assert text_and_documents(path, tmp_path) == (TEXT, [])
    assert read_text(str(path)) == TEXT


@pytest.mark.parametrize("padding", [b"", b"\0" * 5, b"\0" * 100_000])
@pytest.mark.parametrize("end", [".gz", ".bz2", ".xz", ".zst", ".zip"])
def test_archives_of_several_parts_that_zeros_fill_up_are_one_text(end, padding, tmp_path):
    path, half = tmp_path / f"x.txt{end}", len(TEXT) // 2
    raw = PACK[end](TEXT[:half].encode()) + PACK[end](TEXT[half:].encode()) + padding
    path.write_bytes(PACK[end](TEXT.encode()) if end == ".zip" else raw)
    assert text_and_documents(path, tmp_path)[0] == TEXT
    path.write_bytes(path.read_bytes()[: -20 - len(padding)])
    with pytest.raises(UserError, match="give a complete file"):
        text_and_documents(path, tmp_path)


def test_an_archive_of_several_files_or_of_none_is_refused(tmp_path):
    for held, words in (({"a": "x", "b": "y"}, "holds 2 files"), ({}, "holds 0 files")):
        (tmp_path / "x.zip").write_bytes(zipped(held))
        with pytest.raises(UserError, match=words):
            text_and_documents(tmp_path / "x.zip", tmp_path)


DOCUMENTS = [{"id": 3, "text": "One\u2028line", "body": "other"}, {"text": "naïve\ntext", "body": "fields"}]


def lines():
    return "\ufeff" + "\r\n\n".join(map(json.dumps, DOCUMENTS))


@pytest.mark.parametrize("end", ["", ".gz", ".zip"])
@pytest.mark.parametrize("field", ["text", "body"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson", "x.JSON", "one.json", "indented.json"])
def test_json_lines_and_arrays_are_documents(name, field, end, tmp_path):
    whole = {"one.json": json.dumps(DOCUMENTS), "indented.json": json.dumps(DOCUMENTS, indent=2)}
    path = tmp_path / "texts" / (name + end)
    path.parent.mkdir()
    path.write_bytes(PACK[end](whole.get(name, lines()).encode()))
    for place in (path, path.parent):
        text, documents = text_and_documents(place, tmp_path, text_field=field)
        assert [document for _, document in documents] == [each[field] for each in DOCUMENTS]
        assert text == "".join(each[field] for each in DOCUMENTS)


@pytest.mark.parametrize("end", [".parquet", ".csv", ".csv.gz"])
def test_columns_of_tables_are_documents(end, tmp_path):
    table = pyarrow.table({"n": [1, 2], "body": [each["body"] for each in DOCUMENTS],
                           "text": [each["text"] for each in DOCUMENTS]})  # fmt: skip
    path = tmp_path / f"x{end}"
    if end == ".parquet":
        parquet.write_table(table, path)
    else:
        csv.write_csv(table, tmp_path / "x.csv")
        path.write_bytes(PACK[end[4:]]((tmp_path / "x.csv").read_bytes()))
    for field in ("text", "body"):
        _, documents = text_and_documents(path, tmp_path, text_field=field)
        assert documents == [(f"x{end}:{n}", each[field]) for n, each in enumerate(DOCUMENTS, 1)]
    wrong = {
        "title": "the column 'title' can't be read after row 0",
        "n": "row 1: expected a text as 'n', got 1",
    }
    for field, words in [*wrong.items()][: 2 if end == ".parquet" else 1]:  # a number in CSV is a text
        with pytest.raises(UserError, match=words):
            text_and_documents(path, tmp_path, text_field=field)
    path.write_bytes(b"PAR1 of nothing" if end == ".parquet" else b"")
    with pytest.raises(UserError, match="can't be read after row 0"):
        text_and_documents(path, tmp_path)


@pytest.mark.parametrize("text", ['{\n"text": "a"}', '["a"]\n', '{"txt": "a"}\n', "plain"])
def test_other_json_is_a_text(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    assert text_and_documents(tmp_path / "x.json", tmp_path) == (text, [])


@pytest.mark.parametrize(
    ("line", "message"),
    [(b'{"text": "cut o', '"text", got \'{"text": "cut o\' \\('),
     (b'["text"]', r"""got '\["text"\]';"""),
     (b'{"txt": "a"}', "name another field with text_field"),
     (b'{"text": 3}', "3"),
     (b'{"text": "\xff"}', "codec"),
     (b"[" * 100_000, r"got '\[{40}…' \("),
     (b"x" * 400_000, "at most"),
     (b'{"text": "\\ud83d"}', "half of a surrogate pair")],
)  # fmt: skip
def test_a_line_that_is_no_document_is_an_error_that_names_it(line, message, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 300_000)
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    with pytest.raises(UserError, match=rf"^x\.jsonl:3: .*{message}") as error:
        text_and_documents(tmp_path / "x.jsonl", tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [('[{"text": "a"}, {"title": "b"}]', 'element 2: .*string "text".*title'),
     ('[{"text": "a"}', "JSON array"), ('[{"text": "a"}, 5]', "element 2")],
)  # fmt: skip
def test_an_array_without_texts_is_one_line_that_names_the_place(content, words, tmp_path):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=words):
        text_and_documents(tmp_path / "x.json", tmp_path)


def test_a_separator_cuts_a_text_into_documents_named_by_their_places(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("One\n---\nTwo\nlines\n---\n \n---\nThree\n---\n")
    with pytest.warns(UserWarning, match=r"documents without text are left out: x\.txt:3\.$"):
        _, documents = text_and_documents(path, tmp_path, document_separator="\n---\n")
    assert documents == [("x.txt:1", "One"), ("x.txt:2", "Two\nlines"), ("x.txt:4", "Three")]
    with pytest.raises(UserError, match=r"document_separator='<end>' doesn't occur in x\.txt; give the text"):
        text_and_documents(path, tmp_path, document_separator="<end>")
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    for of_documents in (tmp_path, tmp_path / "x.jsonl"):
        with pytest.raises(UserError, match=r"divides a single text, but .* consists of documents"):
            text_and_documents(of_documents, tmp_path, document_separator="|")


def test_a_file_without_text_or_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "x.txt"
    for raw in (b"", b" \n"):
        path.write_bytes(raw)
        with pytest.raises(UserError, match="contains no text"):
            text_and_documents(path, tmp_path, tokenizer="byte") if raw else text_and_documents(
                path, tmp_path
            )
    path.write_text(TEXT)
    blocks = files.blocks_of(path)
    next(blocks)
    os.utime(path, (1, 1))
    with pytest.raises(UserError, match=r"x.txt has changed"):
        list(blocks)
    with pytest.raises(UserError, match=r"gone\.jsonl doesn't exist; name a text file"):
        text_and_documents(tmp_path / "gone.jsonl", tmp_path)


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=300))
def test_no_text_in_utf_8_looks_like_something_else(text):
    raw = ("plain: " + text).encode()
    assert not_text(raw) == ""
    assert all(not_text(raw[:end]) == "" for end in range(len(raw)))


def test_numbers_of_any_size_are_no_text():
    for kind in "hilq":
        assert not_text(array.array(kind, range(1000)).tobytes())
    assert not_text(codecs.BOM_UTF8 + b"a") == ""
