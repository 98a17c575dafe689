"""Every kind of file, as what is in it: a text, documents or token ids; or as one line that says where it is
broken and what to do, with nothing left behind."""

import array
import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv, parquet

from memformers import prepare_ids
from memformers.data.corpus_reader import read_text
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import prepare
from tests.data.reading import as_text, contents, dataset, refused, saved, whole, write, zipped
from tests.processes import run

TEXT = "Über die Brücke – 橋を渡る 🌉.\n" * 400
RAW, WORDS, PLAIN = TEXT.encode(), "some words\n" * 9, {"x.txt": TEXT}
IDS = np.random.default_rng(0).integers(0, 300, 4000)
NPY, SHORT, PIECES = saved(IDS), IDS.astype("<u2").tobytes(), [IDS[:1000], IDS[1000:3500], IDS[3500:]]
DOCUMENTS = [{"id": 3, "text": "One\u2028line", "body": "other"}, {"text": "naïve\ntext", "body": "fields"}]
LINES, ARRAY = ("\ufeff" + "\r\n\n".join(map(json.dumps, DOCUMENTS))).encode(), json.dumps(DOCUMENTS).encode()
PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress,
        ".zip": lambda raw: zipped({"folder/": "", "folder/x": raw})}  # fmt: skip


def table(write):
    raw = io.BytesIO()
    write(pyarrow.Table.from_pylist(DOCUMENTS), raw)
    return raw.getvalue()


def llm_c(ids, magic=20240520, kind="<u2"):
    return np.array([magic, 1, len(ids), *[0] * 253], "<u4").tobytes() + ids.astype(kind).tobytes()


CSV, PARQUET = table(csv.write_csv), table(parquet.write_table)
NO_TEXT = {
    "ids": (NPY, "a NumPy array; end its name with .npy"), "short.txt": (SHORT, "16-bit token ids"),
    **{f"{kind}.dat": (array.array(kind, range(1000)).tobytes(), "end its name with .bin") for kind in "ilq"},
    "meta.txt": (pickle.dumps({"vocab_size": 65, "itos": "abc" * 9}), "a pickle"),
    "no-mark.txt": (("plain text " * 500).encode("utf-16-le"), "UTF-16 without a byte order mark"),
    "latin.txt": (("für Gänse öffnen " * 300).encode("latin-1"), "another encoding"),
    **{f"packed{end}.x": (pack(RAW), f"end its name with {end}") for end, pack in PACK.items()},
}  # fmt: skip
OF_DOCUMENTS = {
    **dict.fromkeys(("x.jsonl", "x.ndjson", "x.JSON"), (LINES, ":1", ":3")),
    **{f"x.jsonl{end}": (pack(LINES), ":1", ":3") for end, pack in PACK.items()},
    "x.json": (ARRAY, ", element 1", ", element 2"), "x.csv": (CSV, ":1", ":2"),
    "y.json": (json.dumps(DOCUMENTS, indent=2).encode(), ", element 1", ", element 2"),
    "x.csv.gz": (PACK[".gz"](CSV), ":1", ":2"), "x.parquet": (PARQUET, ":1", ":2"),
}  # fmt: skip
FOLDER = {"x/b.txt": "Zwei: ä.\n", "x/a/z.md": "One.\n", "x/c.jsonl": '{"text": "Tre"}\n{"text": "IV"}'}
IN_ORDER = [("a/z.md", "One.\n"), ("b.txt", "Zwei: ä.\n"), ("c.jsonl:1", "Tre"), ("c.jsonl:2", "IV")]
READ = [
    *[({"x.txt": (mark + TEXT).encode(encoding)}, {}, TEXT, "")
      for encoding, mark in [("utf-8", ""), ("utf-8-sig", ""), ("utf-16", ""), ("utf-32", ""),
                             ("utf-16-be", "\ufeff"), ("utf-16-le", "\ufeff"), ("utf-32-be", "\ufeff")]],
    *[({f"x.txt{end}": pack(RAW[:5000]) + pack(RAW[5000:]) + bytes(zeros)}, {}, TEXT, "")
      for end, pack in PACK.items() if end != ".zip" for zeros in (0, 5, 100_000)],
    ({"x.zip": PACK[".zip"](RAW)}, {}, TEXT, ""),
    *[({name: raw}, {"tokenizer": "byte"}, as_text(raw), "") for name, (raw, _) in NO_TEXT.items()],
    *[({"x.json": text}, {}, text, "") for text in ('{\n"text": "a"}', '["a"]\n', '{"txt": "a"}\n', "plain")],
    *[({folder + name: raw}, {"text_field": field}, [(name + first, a[field]), (name + second, b[field])], "")
      for name, (raw, first, second) in OF_DOCUMENTS.items() for folder in ("", "x/")
      for field in ("text", "body") for a, b in [DOCUMENTS]],
    ({"x.txt": "One\n---\nTwo\nlines\n---\n \n---\nThree\n---\n"}, {"document_separator": "\n---\n"},
     [("x.txt:1", "One"), ("x.txt:2", "Two\nlines"), ("x.txt:4", "Three")],
     r"documents without text are left out: x\.txt:3\.$"),
    *[(FOLDER | {f"x/{name}": content for name, content in others.items()}, {}, IN_ORDER, said)
      for others, said in (
          ({"a/.hidden": "not read", ".git/config": "not read"}, ""),
          ({"b.dat": NPY}, r"not text and left out: b.dat \(a NumPy array\)\.$"),
          ({"c.zip": zipped({"a": "x", "b": "y"})}, r"left out: c.zip \(not one file, but several\)\.$"),
          ({"d.txt": b"abc" * 99 + b"\xff"}, r"not UTF-8 and left out: d\.txt\.$"),
          ({"e.txt": " \n"}, r"documents without text are left out: e\.txt\.$"),
          ({f"{n}.png": b"\x89PNG\xff" for n in range(6)}, r"4.png \(a PNG image\) and 1 more\.$"),
          *[({f"runs/x/{name}.json": "{}" for name in names}, r"runs or tokens are left out: runs/x\.$")
            for names in (["config", "run"], ["experiment", "other"], ["card", "tokenizer"])])],
]  # fmt: skip


@pytest.mark.parametrize(("files", "how", "expected", "said"), READ)
def test_a_file_or_folder_is_its_text_or_its_documents(files, how, expected, said, tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, files))
    with pytest.warns(UserWarning, match=said) if said else nullcontext():
        text, documents = contents(next(iter(files)).partition("/")[0], **how)
    assert (documents or text) == expected
    if documents:
        assert text == "".join(text for _, text in documents)
    elif not how:
        assert read_text(next(iter(files))) == text


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=300))
def test_every_text_in_utf_8_is_read(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("text") / "x"
    path.write_bytes(("plain: " * 3 + text).encode())
    assert contents(path)[0] == "plain: " * 3 + text


def test_what_lies_across_the_blocks_in_which_a_file_is_read_is_whole(tmp_path):
    texts, end = [f"{n} naïve{'🌉' * (n % 50)}" for n in range(30_000)], "<the end of a document>"
    lines = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    write(tmp_path, {"x.jsonl": lines, "x.txt": end.join(texts), "x": "".join(texts).encode("utf-16")})
    assert contents(tmp_path / "x") == ("".join(texts), [])
    for name, how in {"x.jsonl": {}, "x.txt": {"document_separator": end}}.items():
        named = [(f"{name}:{n}", text) for n, text in enumerate(texts, 1)]
        assert contents(tmp_path / name, **how) == ("".join(texts), named)


OF_IDS = [
    *[({name: raw}, [[], []])
      for name, raw in (("x.npy", NPY), ("x.NPY", saved(IDS.astype(np.uint16))), ("x.bin", SHORT),
                        ("gpt2.bin", llm_c(IDS)), ("llama.bin", llm_c(IDS, 20240801, "<u4")))],
    ({f"x/{n}.npy": saved(piece) for n, piece in enumerate(PIECES)}, [["0.npy", "1.npy"], ["2.npy"]]),
    ({"x.npy": NPY, "x_documents.npy": saved([0, 1000, 3500, 4000])}, [["x.npy:1", "x.npy:2"], ["x.npy:3"]]),
]  # fmt: skip


@pytest.mark.parametrize(("files", "names"), OF_IDS)
def test_ids_are_the_tokens_and_their_documents_in_memory_and_on_the_disk(files, names, tmp_path):
    path = write(tmp_path, files) / next(iter(files)).partition("/")[0]
    in_memory, lengths = dataset(path, vocab_size=300), [[1000, 2500], [500]] if names[1] else [[], []]
    for found in (in_memory, dataset(prepare(CorpusSpec(str(path), vocab_size=300), tmp_path / "tokens"))):
        assert np.array_equal(np.concatenate([found.train.tokens, found.validation.tokens]), IDS)
        assert [split.documents.tolist() for split in found.splits.values()] == lengths
        assert (len(found.validation.tokens), found.train.tokens.dtype) == (
            500 if names[1] else 400,
            np.uint16,
        )
        assert (found.info.tokenizer, found.tokenizer.vocab_size) == ("ids", 300)
        assert [found.info.total(each) for each in ("characters", "tokens", "bytes")] == [4000, 4000, 0]
    assert [list(split.names) for split in in_memory.splits.values()] == names


def test_nanogpt_folders_have_their_splits_their_vocabulary_and_their_characters(tmp_path):
    letters, parts = "\n !abcdefgh", {"train": IDS[:3000] % 11, "val": IDS[3000:] % 11}
    meta = {"vocab_size": 11, "itos": dict(enumerate(letters)), "stoi": {c: i for i, c in enumerate(letters)}}
    files = {f"{split}.bin": ids.astype("<u2").tobytes() for split, ids in parts.items()}
    found = dataset(write(tmp_path, files | {"meta.pkl": pickle.dumps(meta)}))
    expected = ["".join(letters[i] for i in ids) for ids in parts.values()]
    assert [whole(found, split) for split in found.splits] == expected
    write(tmp_path, {"meta.pkl": pickle.dumps({"vocab_size": 11})})
    assert dataset(tmp_path).tokenizer.saved() == {"tokenizer": "ids", "vocab_size": 11}
    assert dataset(tmp_path, vocab_size=20).tokenizer.vocab_size == 20


def test_ids_of_a_program_are_prepared_or_refused_and_then_leave_nothing(tmp_path):
    by_split = {"train": torch.from_numpy(IDS[:3500]), "validation": PIECES[2:]}
    for name, ids, documents in (("x", PIECES, [1000, 2500]), ("y", by_split, [3500]), ("z", IDS, [])):
        found = dataset(prepare_ids(tmp_path / name, ids, vocab_size=300))
        assert np.array_equal(np.concatenate([found.train.tokens, found.validation.tokens]), IDS)
        assert found.train.documents.tolist() == documents
    for name, ids, words in (
        ("n", {"training": IDS}, "expected splits train, validation"), ("n", {"train": IDS}, "expected spl"),
        ("n", IDS / 2, "float64"), ("n", [IDS, IDS + 1], "got 300 at 4,"), ("n", [], "no text"),
        ("x", IDS, "exists already"),
    ):  # fmt: skip
        with refused(words):
            prepare_ids(tmp_path / name, ids, vocab_size=300)
    assert {path.name for path in tmp_path.iterdir()} == {"x", "y", "z", ".preparing.lock"}


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def endless(path):
    with open(path, "wb") as file:
        file.write(b'{"text": "a"}\n' + b"x" * 3_000_000)
        file.truncate(300 << 20)  # a hole


def damaged(path):
    path.symlink_to("/proc/self/mem")  # which can't be read at its beginning


KNOWN, CHARACTER, DIVIDED = "--vocab-size 300", "--tokenizer character", "--document-separator x"
META = r"meta\.pkl can't be read: .*; remove it, and give vocab_size"
CUT = "x.npy can't be read as token ids: "
REFUSED = [
    *[({name: raw}, f"--tokenizer {tokenizer}", f"{name} looks like .*{words}")
      for name, (raw, words) in NO_TEXT.items() for tokenizer in ("character", "word", "bpe")],
    *[({f"x{end}": pack(RAW)[:-20]}, "", f"x{end} .* give a complete file") for end, pack in PACK.items()],
    *[({"x.jsonl": b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n'}, "", rf"x\.jsonl:3: .*{words}")
      for line, words in (
          (b'{"text": "cut o', r'"text", got \'{"text": "cut o\' \('), (b'["a"]', r"""got '\["a"\]';"""),
          (b'{"txt": "a"}', "name another field with text_field"), (b'{"text": 3}', "3"),
          (b'{"text": "\xff"}', "codec"), (b"[" * 100_000, r"got '\[{40}…' \("),
          (b'{"text": "\\ud83d"}', "half of a surrogate pair"))],
    ({"x.jsonl": endless}, "", r"x\.jsonl:2: .* at most 256 MiB"),
    *[({"x.json": text}, "", rf"x\.json\b.*{words}")
      for text, words in (('[{"text": "a"}, {"title": "b"}]', 'element 2: .*string "text".*title'),
                          ('[{"text": "a"}', "JSON array"), ('[{"text": "a"}, 5]', "element 2"))],
    *[({name: raw}, f"--text-field {field}", f"{name}.*{words}")
      for name, raw, field, words in (
          ("x.csv", CSV, "title", "'title' can't be read after row 0"), ("x.csv", b"", "text", "after row 0"),
          ("x.parquet", PARQUET, "title", "'title' can't be read after row 0"),
          ("x.parquet", PARQUET, "id", "row 1: expected a text as 'id', got 3"),
          ("x.parquet", b"PAR1 of nothing", "text", "after row 0"))],
    ({"x.zip": zipped({"a": "x", "b": "y"})}, "", "x.zip holds 2 files"),
    ({"x.zip": zipped({})}, "", "x.zip holds 0 files"), ({"x.txt": b""}, "", r"x\.txt contains no text"),
    ({"x.txt": RAW + b"\xff"}, CHARACTER, rf"x\.txt .*0xff at offset {len(RAW)} of x\.txt"),
    ({"x.txt": b"abc\xc3"}, CHARACTER, "0xc3 at offset 3 "), ({"x": Path.mkdir}, "", "x contains no text"),
    ({"x.txt": " \n"}, "", r"x\.txt contains no text"), ({"x.txt": " \n"}, "--tokenizer byte", "no text"),
    ({"x.txt": "a"}, CHARACTER, "leaves 0 tokens for train; use a longer text"),
    ({"x/x.txt": damaged}, "", r"/x\.txt can't be read: Input/output error"),
    (PLAIN, "gone.jsonl", r"gone\.jsonl doesn't exist; name a text"), (PLAIN, "''", "TEXT is empty; name"),
    (PLAIN, "--document-separator '<end>'", r"'<end>' doesn't occur in x\.txt; give the text"),
    ({"x/x.txt": TEXT}, DIVIDED, r"divides a single text, but x\.txt consists of documents"),
    ({"x.jsonl": '{"text": "a"}'}, DIVIDED, "but x.jsonl consists of documents"),
    (PLAIN, "--vocab-size 9999", "9999"), (PLAIN, "--tokenizer letters", "'letters'"),
    *[(PLAIN, f"--tokenizer {name} --vocab-size 5", "vocab_size=5 is for 'word' and 'bpe'")
      for name in ("byte", "character", "frequency")],
    ({"x/card.json": "{}", "x/tokenizer.json": "{}", "x/train.npy": ""}, "", "x holds tokens and no text"),
    (PLAIN | {"out/tokens/x": ""}, "", "out/tokens exists already"),
    ({"x/input.txt": "half"}, "", "the download is incomplete, or it is another text"),
    ({"x/train": WORDS, "x/valid": WORDS, "x/val": WORDS}, "", "x/val and x/valid are all for validation"),
    (PLAIN | {"y": " \n"}, "--validation y", "leaves 0 tokens for validation"),
    (PLAIN | {"y": Path.mkdir}, "--validation y", "y contains no text"),
    (PLAIN, "--test x.txt", "a text for test was given, and none as validation"),
    ({"x.npy": NPY}, "", "x.npy .*the largest is 299, so at least 300"),
    ({"x.npy": NPY}, "--vocab-size 299", r"below vocab_size=299, got 299 at \d"),
    ({"x.npy": saved(IDS - 5)}, KNOWN, "x.npy: .* from 0 on, got -5"),
    ({"x.npy": saved(IDS / 2)}, KNOWN, r"x.npy .* of an integer type, got \[4000\] of float64"),
    ({"x.npy": saved([IDS, IDS])}, KNOWN, r"x.npy .* got \[2, 4000\] of int64"),
    ({"x.npy": NPY[:-20]}, KNOWN, CUT), ({"x.npy": saved(np.array([IDS, None], object))}, KNOWN, CUT),
    ({"x.bin": b"abc"}, KNOWN, "x.bin .* two bytes, got 3"), ({"x.bin": b""}, KNOWN, "x.bin .* got 0 bytes"),
    ({"x.bin": llm_c(IDS) + b"18"}, KNOWN, "x.bin .* says 4,000 ids, and 4,001 follow"),
    ({"x/x.npy": NPY, "x/y.txt": b"a text"}, KNOWN, "x.npy holds token ids, and y.txt a text"),
    ({"x.npy": NPY}, "--tokenizer word", "x.npy .* which are not divided again"),
    *[({"x.npy": NPY, "x_documents.npy": saved(places)}, KNOWN, f"x_documents.npy to rise {words}")
      for places, words in (([0, 9, 5, 4000], ".* 1 steps back"), ([0, 4001], "from 0"))],
    *[({"x.bin": SHORT, "meta.pkl": pickle.dumps(meta)}, KNOWN, META)
      for meta in (Evil(), [], {"vocab_size": "x"}, {"vocab_size": 2, "itos": ["a", "a"]})],
    ({"x.bin": SHORT, "meta.pkl": b"\x80\x04"}, KNOWN, META), (PLAIN, "enwik8 x.txt", "SHA-256 2b49"),
    (PLAIN, "enwik9 x.txt", "enwik8, text8, wikitext-103, pg19, python-source"),
    *[({"x": Path.mkdir}, f"{name} x", f"x to be {words}")
      for name, words in (("enwik8", "one file"), ("pg19", "a folder with train, valid and test"))],
    *[({f"x/{split}/0.txt": WORDS for split in ("train", "valid", "test")}, f"{name} x", f"{found}; is it")
      for name, found in (("pg19 --vocab-size 256", r"\(1, 1, 1\)"), ("wikitext-103", r"\(27, 27, 27\)"))],
    (PLAIN, "memory://far/y.txt", r"memory://far/y\.txt can't be read: .*y\.txt"),
    (PLAIN, "nowhere://x", "nowhere://x can't be read: Protocol not known: nowhere"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize(("files", "how", "words"), REFUSED)
def test_what_cant_be_read_or_used_is_one_line_and_leaves_nothing(files, how, words, tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, files))
    before = set(tmp_path.rglob("*"))
    text = [] if how and how[0] != "-" else [next(iter(files)).partition("/")[0]]
    ended = run("prepare", *text, *shlex.split(how), "--out", "out/tokens")
    assert ended.code == 2
    assert re.fullmatch(f"error: .*{words}.*\n", ended.err), ended.err
    assert set(tmp_path.rglob("*")) - before <= {tmp_path / "out", tmp_path / "out" / ".preparing.lock"}


def test_a_part_of_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    write(tmp_path, FOLDER)
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scandir("/gone" if str(path)[-2:] == "/a" else path))
    with refused("/gone can't be read: No such file"):
        contents(tmp_path / "x")
