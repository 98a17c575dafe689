"""Every kind of file, as the text, documents or token ids in it, or as one line that says what is wrong."""

import bz2
import gzip
import json
import lzma
import os
import pickle
import re
import shlex
import sys
from contextlib import nullcontext
from itertools import cycle, pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

from memformers import prepare_ids
from memformers.data import corpus_reader, tokenize_corpus
from memformers.data import files as reading
from memformers.data.corpus_reader import read_prompt
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import prepare
from memformers.data.tokenizer import ByteTokenizer
from tests.data.reading import as_text, contents, dataset, refused, saved, whole, write, zipped
from tests.processes import run

TEXT = "Über die Brücke – 橋を渡る 🌉.\n" * 400
RAW, WORDS, PLAIN = TEXT.encode(), "some words\n" * 9, {"x.txt": TEXT, "y": " \n", "z": Path.mkdir}
IDS = np.random.default_rng(0).integers(0, 300, 4000)
NPY, SHORT, PIECES = saved(IDS), IDS.astype("<u2").tobytes(), np.split(IDS, [1000, 3500])
DOCUMENTS = [{"id": 3, "text": "One\u2028line", "body": "other"}, {"text": "naïve\ntext", "body": "fields"}]
LINES = ("\ufeff" + "\r\n\n".join(map(json.dumps, DOCUMENTS))).encode()
PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress,
        ".zip": lambda raw: zipped({"folder/": "", "folder/x": raw})}  # fmt: skip


LATIN, WIDE = "für Gänse öffnen ".encode("latin-1"), TEXT.encode("utf-16-le")
NO_TEXT = {
    "ids": (NPY, "0x93", 0), "short.txt": (b"ab\0\1", "0x00", 2), "latin.txt": (LATIN, "0xfc", 1),
    "no-mark.txt": ("plain".encode("utf-16-le"), "0x00", 1), "end.txt": (RAW + b"\xe6\xa9", "0xe6", len(RAW)),
    "far.txt": (RAW * 99 + b"\0", "0x00", 99 * len(RAW)),
    "middle.txt": (b"\xef\xbb\xbf" + RAW * 99 + b"\xff" + RAW, "0xff", 3 + 99 * len(RAW)),
    "utf-32.txt": (b"\xff\xfe\0\0a\0\0\0", "0x00", 2),
    "half.txt": (b"\xff\xfe" + WIDE + b"\x3c\xd8a\0", "0x3c", 2 + len(WIDE)),
    "nul.txt": (b"\xff\xfe" + WIDE + b"\0\0", "0x00", 2 + len(WIDE)),
    **{f"packed{end}.x": (pack(RAW), *first) for (end, pack), first in zip(
        PACK.items(), (("0x8b", 1), ("0x", ""), ("0xfd", 0), ("0xb5", 1), ("0x", "")), strict=True)},
}  # fmt: skip
"""What is no text, and its first byte that is none: its value, and where it is."""
OF_DOCUMENTS = {
    **dict.fromkeys(("x.jsonl", "x.jsonlines", "x.ndjson", "x.JSON"), (LINES, ":1", ":3")),
    **{f"x.jsonl{end}": (pack(LINES), ":1", ":3") for end, pack in PACK.items()},
}  # fmt: skip
FOLDER = {"x/b.txt": "Zwei: ä.\n", "x/a/z.md": "One.\n", "x/c.jsonl": '{"text": "Tre"}\n{"text": "IV"}'}
IN_ORDER = [("a/z.md", "One.\n"), ("b.txt", "Zwei: ä.\n"), ("c.jsonl:1", "Tre"), ("c.jsonl:2", "IV")]
READ = [
    *[({"x.txt": f"\ufeff{TEXT}".encode(encoding)}, {}, TEXT, "")
      for encoding in ("utf-8", "utf-16-le", "utf-16-be")],
    *[({"x.txt.gz": gzip.compress(raw[:1]) + gzip.compress(raw[1:])}, {}, TEXT, "")
      for raw in (RAW, f"\ufeff{TEXT}".encode(), f"\ufeff{TEXT}".encode("utf-16-le"))],
    (PLAIN, {}, TEXT, ""), ({"x.zip": PACK[".zip"](RAW)}, {}, TEXT, ""),
    *[({f"x.txt{end}": pack(RAW[:5000]) + pack(RAW[5000:]) + bytes(zeros)}, {}, TEXT, "")
      for end, pack in PACK.items() if end != ".zip" for zeros in (0, 5, 100_000)],
    *[({name: raw}, {"tokenizer": "byte"}, as_text(raw.removeprefix(b"\xef\xbb\xbf")), "")
      for name, (raw, *_) in NO_TEXT.items()],
    *[({"x.json": text}, {}, text, "") for text in ('{\n"text": "a"}', '["a"]\n', "plain")],
    *[({folder + name: raw}, {"text_field": field}, [(name + first, a[field]), (name + second, b[field])], "")
      for name, (raw, first, second) in OF_DOCUMENTS.items() for folder in ("", "x/")
      for field in ("text", "body") for a, b in [DOCUMENTS]],
    ({"x.txt": "One\n---\nTwo\nlines\n---\n \n---\nThree\n---\n"}, {"document_separator": "\n---\n"},
     [("x.txt:1", "One"), ("x.txt:2", "Two\nlines"), ("x.txt:4", "Three")],
     r"documents without text are left out: x\.txt:3\.$"),
    *[(FOLDER | {f"x/{name}": content for name, content in others.items()}, {}, IN_ORDER, warning)
      for others, warning in (
          ({"a/.hidden": "not read", ".git/config": "not read"}, ""),
          ({"b.dat": NPY}, r"not text and left out: b.dat \(byte 0x93 at offset 0\)\.$"),
          ({"c.zip": zipped({"a": "x", "b": "y"})}, r"left out: c.zip \(an archive\)\.$"),
          ({"c.tar.gz": b"x"}, r"left out: c.tar.gz \(an archive\)\.$"),
          ({"d.txt": b"abc" * 99 + b"\xff"}, r"not text and left out: d\.txt \(byte 0xff at offset 297\)\.$"),
          ({"e.txt": " \n"}, r"documents without text are left out: e\.txt\.$"),
          ({f"{n}.png": b"\x89PNG\xff" for n in range(6)}, r"4.png \(byte 0x89 at offset 0\) and 1 more\.$"),
          *[({f"runs/x/{name}.json": "{}" for name in names}, r"runs or tokens are left out: runs/x\.$")
            for names in (["config", "run"], ["experiment", "other"], ["card", "tokenizer"])])],
    *[({f"x/{name}": "a b" for name in names}, {}, [(name, "a b") for name in names], "")
      for names in (("loire.txt", "orient_express_train.txt"), ("test.py", "train.py"),
                    ("attest.txt", "latest.txt", "restrain.txt"))],
]  # fmt: skip


@pytest.mark.parametrize(("files", "how", "expected", "warning"), READ)
def test_a_file_or_folder_is_its_text_or_its_documents(files, how, expected, warning, tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, files))
    with pytest.warns(UserWarning, match=warning) if warning else nullcontext():
        text, documents = contents(next(iter(files)).partition("/")[0], **how)
    assert (documents or text) == expected
    if documents:
        assert text == "".join(text for _, text in documents)
    elif not how:
        assert read_prompt(next(iter(files)), ByteTokenizer()) == text


def test_what_lies_across_the_portions_that_are_read_and_encoded_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(BaseProcess, "start", None)  # since a script may have no main guard
    for module, name, size in (
        (reading, "BLOCK", 1 << 14), (reading, "PIECE", 1 << 12), (tokenize_corpus, "PIECE", 1 << 12),
        (tokenize_corpus, "JOB", 1 << 15),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, size)
    texts = [f"{n} naïve kings…\r\n{'🌉 crowns, ' * (n % 30)}\n" for n in range(600)]
    text, end = "".join(texts), "<end of a document>"
    lines = "\n".join(json.dumps({"text": content}, ensure_ascii=False) for content in texts)
    across = [(n << 14) - before for n, before in enumerate((1, 9, len(end) - 1), 1)]
    parts = ["x" * (b - a - len(end)) for a, b in pairwise([-len(end), *across])]
    write(tmp_path, {"x.jsonl": lines, "x.txt": end.join([*parts, ""])})
    write(tmp_path, {"x": text.encode("utf-16"), "y": text})
    assert contents(tmp_path / "x") == (text, [])
    for name, separator, expected in (("x.jsonl", "", texts), ("x.txt", end, parts)):
        named = [(f"{name}:{n}", content) for n, content in enumerate(expected, 1)]
        assert contents(tmp_path / name, document_separator=separator) == ("".join(expected), named)
    for tokenizer in ("character", "bpe"):
        data = dataset(tmp_path / "y", tokenizer=tokenizer, vocab_size=300)
        assert (whole(data, "train"), whole(data)) == (text[: len(text) * 9 // 10], text)


BY_SPLIT, LENGTHS = {"train": torch.from_numpy(IDS[:3500]), "validation": PIECES[2:]}, [[1000, 2500], [500]]
OF_IDS = [
    *[({name: raw}, [[], []], [[], []])
      for name, raw in (("x.npy", NPY), ("x.NPY", saved(IDS.astype(np.uint16))), ("x.bin", SHORT),
                        ("x.uint32.bin", IDS.astype("<u4").tobytes()),
                        ("x.uint64.bin", IDS.astype("<u8").tobytes()))],
    ({f"x/{n}.npy": saved(ids) for n, ids in enumerate(PIECES)}, LENGTHS, [["0.npy", "1.npy"], ["2.npy"]]),
    ({"x.npy": NPY, "x_documents.npy": saved([0, 1000, 3500, 4000])}, LENGTHS,
     [["x.npy:1", "x.npy:2"], ["x.npy:3"]]),
    *[({"x": lambda path, ids=ids: prepare_ids(path, ids, vocab_size=300)}, lengths, [[], []])
      for ids, lengths in ((IDS, [[], []]), (PIECES, LENGTHS), (BY_SPLIT, [[3500], [500]]))],
]  # fmt: skip


@pytest.mark.parametrize(("files", "lengths", "names"), OF_IDS)
def test_ids_are_the_tokens_and_their_documents_in_memory_and_on_the_disk(files, lengths, names, tmp_path):
    path = write(tmp_path, files) / next(iter(files)).partition("/")[0]
    in_memory, spec = dataset(path, vocab_size=300), CorpusSpec(str(path), vocab_size=300)
    stored = dataset(path if "x" in files else prepare(spec, tmp_path / "tokens"))
    for data in (in_memory, stored):
        assert np.array_equal(np.concatenate([data.train.tokens, data.validation.tokens]), IDS)
        assert [split.documents.tolist() for split in data.splits.values()] == lengths
        assert [data.tokenizer.name, data.tokenizer.vocab_size, data.train.tokens.dtype] == ["ids", 300, "u2"]
        assert [data.info.total(what) for what in ("characters", "tokens", "bytes")] == [4000, 4000, 0]
    assert [list(split.names) for split in in_memory.splits.values()] == names


def test_a_folder_of_ids_may_have_splits_and_nothing_that_lies_beside_them_is_run(tmp_path):
    write(tmp_path, {"train.bin": SHORT[:6000], "val.bin": SHORT[6000:], "meta.pkl": pickle.dumps(Path("/"))})
    with pytest.warns(UserWarning, match=r"of no split and left out: meta\.pkl"):
        data = dataset(tmp_path, vocab_size=300)
    assert np.array_equal(np.concatenate([split.tokens for split in data.splits.values()]), IDS)
    assert [len(split.tokens) for split in data.splits.values()] == [3000, 1000]


def test_ids_of_a_program_that_are_wrong_leave_nothing(tmp_path):
    for name, ids, words in (
        ("y", {"training": IDS}, "expected splits train, validation"), ("y", {"train": IDS}, "expected spli"),
        ("y", [1, 2, 3], "numpy.array"), ("y", {"train": "abc"}, "numpy.array"),
        ("y", IDS / 2, "float64"), ("y", [IDS, IDS + 1], "got 300 at 4,"), ("y", [], "no text"),
        ("y", IDS + (1 << 32), "from 0 to 4,294,967,295, got 4,294,967,296"),
        (".", IDS, "exists already"),
    ):  # fmt: skip
        with refused(words):
            prepare_ids(tmp_path / name, ids, vocab_size=300)
    assert [path.name for path in tmp_path.iterdir()] == [".preparing.lock"]


REFUSED = [
    *[({name: raw}, f"--tokenizer {tokenizer}",
       f"expected {name} to be text in UTF-8, got byte {byte}.* at offset {f'{at:,}' if at != '' else '.*'}; "
       "convert it to UTF-8, or read its bytes with --tokenizer byte.")
      for (name, (raw, byte, at)), tokenizer in zip(NO_TEXT.items(), cycle(("character", "word", "bpe")))],
    *[({f"x{end}": pack(RAW)[:-20]}, "", f"x{end} .* use a complete file") for end, pack in PACK.items()],
    *[({"x.jsonl": b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n'}, "", rf"x\.jsonl:3: .*{words}")
      for line, words in (
          (b'{"text": "cut o', r'"text", got \'{"text": "cut o\' \('), (b'["a"]', r"""got '\["a"\]';"""),
          (b'{"txt": "a"}', "name another field with text_field"), (b'{"text": 3}', "3"),
          (b"[" * 100_000, r"got '\[{40}…' \("),
          (b'{"text": "\\ud83d"}', r"U\+D83D is not a character"),
          (b'{"text": "\\u0000"}', r"U\+0000 is not a character"))],
    ({"x.jsonl": b'{"text": "\xff"}'}, "",
     r"expected x\.jsonl to be text in UTF-8, got byte 0xff at offset 10"),
    *[({"x.json": text}, how, words) for text, how, words in (
        ('{"content": "a"}\n{"content": "b"}\n', "", r"x\.json:1: .*string \"text\", got"),
        ('{"content": "a"}\n{"content": "b"}\n', "--tokenizer byte", r"x\.json:1: .*string \"text\", got"),
        ('{\n"content": "a"}\n', "--text-field contnt", r"x\.json:1: .*string \"contnt\""))],
    *[({f"x/{name}": WORDS for name in names}, "", f"expected the splits in x to be .*, got {listed}; rename")
      for names, listed in (
          (("train.txt", "test.txt", "more.txt"), "test.txt, train.txt"),
          (("loire.val.txt", "orient_express_train.txt", "the-test.txt"),
           "loire.val.txt, orient_express_train.txt, the-test.txt"),
          (("a_train.txt", "a_valid.txt", "b_train.txt", "b_valid.txt"),
           "a_train.txt, a_valid.txt, b_train.txt, b_valid.txt"),
          (("train.txt", "valid_test.txt"), "train.txt, valid_test.txt"),
          (("en/more/train.txt", "en/more/test.txt"), "en/more/test.txt, en/more/train.txt"),
          (("train/1.txt", "eval/2.txt"), "eval, train"),
          (("more.md", "en/train.txt", "en/val.txt", "en/test.txt"), "en/test.txt, en/train.txt, en/val.txt"),
          (("more.txt", "en/train/1.txt", "en/test/2.txt"), "en/test, en/train"))],
    *[({f"x.{kind}bin": np.arange(9).astype("<u4").tobytes()}, "--vocab-size 9", f"{words}")
      for kind, words in (("", "every second id is 0, .* call it x.uint32.bin"),
                          ("uint64.", "expected ids of 8 bytes, got 36 bytes"))],
    *[({"x": content}, how, f"x {words}")
      for how, content, words in (
          ("", "", "contains no text"),
          ("", " \n", "contains no text"), ("", Path.mkdir, "contains no text"),
          ("--tokenizer byte", " \n", "contains no text"), ("enwik8 x", Path.mkdir, "to be one file"),
          ("--tokenizer character", "a", "leaves 0 tokens for train; use a longer text"),
          ("pg19 x", Path.mkdir, "to be a folder with train, valid and test"))],
    *[(PLAIN, how, words)
      for how, words in (
          ("gone.jsonl", r"gone\.jsonl doesn't exist; name a text file"), ("''", "TEXT is empty; name"),
          ("--document-separator '<end>'", r"'<end>' doesn't occur in x\.txt; give the text"),
          ("--vocab-size 9999", "9999"), ("--tokenizer letters", "'letters'"),
          *[(f"--tokenizer {name} --vocab-size 5", "vocab_size=5 applies to tokenizer='word' and 'bpe'")
            for name in ("byte", "character", "frequency")],
          ("--validation y", "leaves 0 tokens for validation"), ("--validation z", "z contains no text"),
          ("--test x.txt", "a text for test was given, and none as validation"),
          ("enwik8 x.txt", "SHA-256 2b49"), ("--out z", "z exists already"),
          ("enwik9 x.txt", "enwik8, text8, wikitext-103, pg19, python-source"),
          ("memory://far/y.txt", r"memory://far/y\.txt can't be read: .*y\.txt"),
          ("nowhere://x", "nowhere://x can't be read: Protocol not known: nowhere"))],
    *[({name: zipped(dict.fromkeys("ab"[:n], ""))}, "", f"{name} is an archive; unpack it")
      for n, name in ((0, "x.zip"), (2, "y.zip"), (0, "x.tar"), (0, "x.TAR.gz"), (0, "x.tgz"))],
    ({"x.zip": zipped({"y.jsonl": '{"text": "a"}'})}, "", r"contains y\.jsonl; call it x\.jsonl\.zip"),
    ({"x.zip": zipped({"a/y.CSV": "text\na"})}, "", r"contains a/y\.CSV; call it x\.csv\.zip"),
    ({"x.jsonl.zst": lambda path: path.write_bytes(PACK[".zst"](b"{" + b"x" * (2 << 20)))}, "",
     r"x\.jsonl\.zst:1: .* at most 1,048,576 characters"),
    ({"x/y": lambda path: path.symlink_to("/proc/self/mem")}, "", "/y can't be read: Input/output error"),
    ({"x/x.txt": TEXT}, "--document-separator x", r"divides one text, and x\.txt consists of documents"),
    ({"x.jsonl": '{"text": "a"}'}, "--document-separator x", "and x.jsonl consists of documents"),
    ({"x/card.json": "{}", "x/tokenizer.json": "{}", "x/train.npy": NPY, "x/validation.npy": NPY}, "",
     "x holds tokens and no text"),
    ({"x/input.txt": "half"}, "", "the download is incomplete, or it is another text"),
    ({"x/train": WORDS, "x/valid": WORDS, "x/val": WORDS}, "", "x/val and x/valid are all for validation"),
    *[({f"x/{split}/0.txt": WORDS for split in ("train", "valid", "test")}, f"{name} x", f"{numbers}; is the")
      for name, numbers in (("pg19 --vocab-size 256", r"\(1, 1, 1\)"), ("wikitext-103", r"\(27, 27, 27\)"))],
    ({"x.npy": NPY}, "", "x.npy .*the largest is 299, so at least 300"),
    ({"x.npy": NPY}, "--vocab-size 299", r"below vocab_size=299, got 299 at \d"),
    ({"x.npy": NPY}, "--tokenizer word", "x.npy holds token ids already; omit tokenizer"),
    ({"x/x.npy": NPY, "x/y.txt": b"a text"}, "", "x.npy holds token ids, and y.txt a text"),
    *[({name: raw} | others, "--vocab-size 300", words)
      for name, raw, words, others in (
          ("x.npy", saved(IDS - 5), "x.npy: .* from 0 to 4,294,967,295, got -5", {}),
          ("x.npy", saved(IDS / 2), r"x.npy .* of an integer type, got \[4000\] of float64", {}),
          ("x.npy", saved([IDS, IDS]), r"x.npy .* got \[2, 4000\] of int64", {}),
          ("x.npy", NPY[:-20], "x.npy can't be read as token ids", {}),
          ("x.npy", saved(np.array([IDS, None], object)), "x.npy can't be read as token ids", {}),
          ("x.bin", b"abc", "x.bin .* 2 bytes, got 3", {}), ("x.bin", b"", "x.bin .* got 0 bytes", {}),
          *[("x.npy", NPY, f"x_documents.npy to rise {words}", {"x_documents.npy": saved(places)})
            for places, words in (([0, 9, 9, 5, 4000], ".* 2 steps that don't"), ([0, 4001], "from 0"))])],
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize(("files", "how", "words"), REFUSED)
def test_what_cant_be_read_or_used_is_one_line_and_leaves_nothing(files, how, words, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_reader, "MAX_RECORD", 1 << 20)
    monkeypatch.chdir(write(tmp_path, files))
    before = set(tmp_path.rglob("*"))
    text = [] if how and how[0] != "-" else [next(iter(files)).partition("/")[0]]
    ended = run("prepare", "--out", "out/tokens", *text, *shlex.split(how))
    assert ended.code == 2
    assert re.fullmatch(f"error: .*{words}.*\n", ended.err), ended.err
    assert set(tmp_path.rglob("*")) - before <= {tmp_path / "out", tmp_path / "out" / ".preparing.lock"}


def test_links_are_followed_once_and_those_that_lead_nowhere_are_named(tmp_path):
    write(tmp_path, {"disk/a.txt": "linked", "x/own.txt": "own"})
    (tmp_path / "x/more").symlink_to(tmp_path / "disk")
    (tmp_path / "disk/again").symlink_to(tmp_path / "x")
    (tmp_path / "x/gone").symlink_to(tmp_path / "nowhere")
    with pytest.warns(UserWarning, match="left out") as warnings:
        assert contents(tmp_path / "x")[1] == [("more/a.txt", "linked"), ("own.txt", "own")]
    words = {str(warning.message).partition(": ")[2] for warning in warnings}
    assert words >= {"folders that are read already are left out: more/again.",
                     "links that lead nowhere are left out: gone."}  # fmt: skip


def test_ids_have_four_bytes_where_so_many_are_different(tmp_path):
    ids = np.arange(20_000) * 5 % 100_000
    ids.astype("<u4").tofile(tmp_path / "x.bin")
    assert np.array_equal(dataset(tmp_path / "x.bin", vocab_size=100_000).train.tokens, ids[:18_000])


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
