"""What a file looks like: text of any encoding that says so is read, and what is no text is refused."""

import array
import bz2
import codecs
import gzip
import io
import json
import lzma
import pickle
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memformers.common.errors import UserError
from memformers.data.corpora import load_corpus
from memformers.data.gathering import Recipe
from memformers.data.kinds import not_text
from memformers.data.preparing import prepare
from memformers.data.store import open_store
from memformers.data.texts import read_text

TEXT = "Über die Brücke – 橋を渡る 🌉.\n" * 400


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


IDS = np.random.default_rng(0).integers(0, 50_000, 4000)
REFUSED = {
    "ids.npy": (saved(IDS), "a NumPy array"),
    "train.bin": (IDS.astype(np.uint16).tobytes(), "convert"),
    "characters.bin": ((IDS % 65).astype(np.uint16).tobytes(), "16-bit token ids"),
    "meta.pkl": (pickle.dumps({"vocab_size": 65, "itos": "abc" * 9}), "a pickle"),
    "no-mark.txt": (("plain text " * 500).encode("utf-16-le"), "UTF-16 without a byte order mark"),
    "latin.txt": (("für Gänse öffnen " * 300).encode("latin-1"), "another encoding"),
    "packed-1": (gzip.compress(TEXT.encode()), "end its name with .gz"),
    "packed-2": (bz2.compress(TEXT.encode()), "end its name with .bz2"),
    "packed-3": (lzma.compress(TEXT.encode()), "end its name with .xz"),
    "packed-4": (zipped({"a.txt": TEXT}), "a ZIP archive"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_text_is_refused_with_what_it_looks_like_and_read_as_bytes_if_asked(name, tmp_path):
    raw, words = REFUSED[name]
    path = tmp_path / name
    path.write_bytes(raw)
    for tokenizer in ("character", "word", "bpe"):
        for read in (
            lambda how=tokenizer: load_corpus(str(path), tokenizer=how),
            lambda how=tokenizer: prepare(Recipe(path, tokenizer=how), tmp_path / "out"),
        ):
            with pytest.raises(UserError, match=words) as error:
                read()
            assert name in str(error.value)
            assert "\n" not in str(error.value)
    store = open_store(prepare(Recipe(path, tokenizer="byte"), tmp_path / "bytes"))
    assert bytes(np.concatenate([store.splits[part].tokens for part in ("train", "validation")])) == raw


def test_a_folder_leaves_out_what_is_no_text_and_says_so(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.npy").write_bytes(saved(IDS))
    with pytest.warns(UserWarning, match=r"not text and left out: b.npy \(a NumPy array\)"):
        assert load_corpus(str(tmp_path)).text == TEXT
    (tmp_path / "b.npy").unlink()
    (tmp_path / "c.zip").write_bytes(zipped({"a": "x", "b": "y"}))
    with pytest.warns(UserWarning, match=r"left out: c.zip \(not one file, but several\)"):
        assert load_corpus(str(tmp_path)).text == TEXT


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-32-be"])
def test_a_text_is_read_in_the_encoding_that_its_byte_order_mark_says(encoding, tmp_path):
    path, mark = tmp_path / "x.txt", {"be": "\ufeff", "le": "\ufeff"}.get(encoding[-2:], "")
    path.write_bytes((mark + TEXT).encode(encoding))
    assert load_corpus(str(path)).text == TEXT == read_text(str(path))
    store = open_store(prepare(Recipe(path), tmp_path / "tokens"))
    assert store.card.sha256 == load_corpus(str(path)).sha256


@pytest.mark.parametrize("padding", [b"", b"\0" * 5, b"\0" * 100_000])
@pytest.mark.parametrize(
    ("name", "pack"), [("x.txt.gz", gzip.compress), ("x.txt.bz2", bz2.compress), ("x.txt.xz", lzma.compress)]
)
def test_archives_of_several_parts_that_zeros_fill_up_are_one_text(name, pack, padding, tmp_path):
    half = len(TEXT) // 2
    (tmp_path / name).write_bytes(pack(TEXT[:half].encode()) + pack(TEXT[half:].encode()) + padding)
    assert load_corpus(str(tmp_path / name)).text == TEXT


def test_a_zip_archive_of_one_file_is_its_text_and_others_are_refused(tmp_path):
    path = tmp_path / "x.jsonl.zip"
    path.write_bytes(zipped({"folder/": "", "folder/x": '{"text": "a b"}\n{"text": "c"}\n'}))
    corpus = load_corpus(str(path))
    assert (corpus.text, corpus.documents) == ("a bc", (3, 1))
    for raw, words in (
        (zipped({"a": "x", "b": "y"}), "holds 2 files"), (zipped({}), "holds 0 files"),
        (path.read_bytes()[:40], "complete"), (b"abc", "complete"),
    ):  # fmt: skip
        path.write_bytes(raw)
        with pytest.raises(UserError, match=words):
            load_corpus(str(path))


@pytest.mark.parametrize("name", ["x.json", "x.ndjson", "x.jsonl", "x.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_and_json_lines_are_documents(name, indent, tmp_path):
    documents = [{"text": "first\ntext"}, {"id": 3, "text": "second"}]
    written = json.dumps(documents, indent=indent) if "json" in name else ""
    if "l" in name or "nd" in name:
        written = "\n".join(map(json.dumps, documents))
    raw = written.encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    corpus = load_corpus(str(tmp_path / name))
    assert (corpus.text, corpus.documents) == ("first\ntextsecond", (10, 6))


@pytest.mark.parametrize(
    ("content", "words"),
    [('[{"text": "a"}, {"title": "b"}]', 'element 2: .*string "text"'), ('[{"text": "a"}', "JSON array"),
     ('[{"text": "a"}, 5]', "element 2")],
)  # fmt: skip
def test_an_array_without_texts_is_one_line_that_names_the_place(content, words, tmp_path):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=words):
        load_corpus(str(tmp_path / "x.json"))


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=300))
def test_no_text_in_utf_8_looks_like_something_else(text):
    raw = ("plain: " + text).encode()
    assert not_text(raw) == ""
    assert all(not_text(raw[:end]) == "" for end in range(len(raw)))


def test_numbers_of_any_size_are_no_text():
    for kind in "hilq":
        assert not_text(array.array(kind, range(1000)).tobytes())
    assert not_text(codecs.BOM_UTF8 + b"a") == ""
