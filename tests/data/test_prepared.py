"""From what is read to a dataset of tokens, in memory and in a folder."""

import hashlib
import json
import os
import resource
import signal
import subprocess
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memformers.common.errors import UserError
from memformers.data import tokenize_corpus
from memformers.data.benchmarks import BENCHMARKS
from memformers.data.builtin import write_play
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import dataset_of, prepare
from memformers.data.tokenizers import OWN
from tests.data.reading import contents, dataset, refused, saved, whole, write
from tests.processes import program, run, start, wait_for

REAL = Path(os.environ.get("MEMFORMERS_DATA", "/nowhere")) / "tinyshakespeare" / "input.txt"
LINES = [f"Line {n}: naïve kings — and {'crowns ' * (n % 7)}…" for n in range(400)]
TEXT = "\n".join(LINES) + "\n"
CORPORA = {"enwik8": {"sizes": (901, 49, 50), "sha256": ""}, "text8": {"sizes": (901, 49, 50)},
           "wikitext-103": {"words": (3596, 602, 596)},
           "pg19": {"documents": (3, 1, 2), "vocab_size": 400}}  # fmt: skip
PARTS = [("train", 0, 300), ("valid", 300, 350), ("test", 350, 400)]
BOOKS = [("train", 0), ("train", 1), ("train", 2), ("validation", 1), ("test", 0), ("test", 2)]
SOURCES = [
    ({"play": write_play(300_000)}, "3a564635 0e68852b 24e03e20 1d4cee1c ee9808a8"),
    ({"x.jsonl": "\n".join(json.dumps({"text": line}) for line in LINES)},
     "ae25c6da 353f876b 297f4bee 78d160b9 f84b47ae"),
    ({f"books/{'b/' * (n % 2)}{n}.txt": "\n".join(LINES[20 * n :][: 5 + 3 * n]) for n in range(12)},
     "c930c1ac 99c9ddb7 5638eaf3 4eebbab2 f16ed939"),
    ({"divided": "<end>".join(LINES)}, "ae25c6da 353f876b 297f4bee 78d160b9 f84b47ae"),
    ({"enwik8": ("naïve " * 200).encode()[:1000]}, "- - f59556cf - -"),
    ({"text8": ("a quick brown fox " * 60)[:1000]}, "300af649 - - - -"),
    ({f"wikitext-103/wiki.{part}.tokens": "\n \n".join(LINES[a:b]) + "\n" for part, a, b in PARTS},
     "- - - 20fab90c -"),
    ({f"pg19/{part}/{n}.txt": "\n".join(LINES[n::3]) for part, n in BOOKS}, "- - - - 423b8d31"),
]  # fmt: skip
"""Files, and the checksums of their tokens, documents, tokenizer and counts as they were first made: for
characters by alphabet and by frequency, bytes, words and subwords."""
if REAL.is_file():
    SOURCES.append(({"shakespeare": REAL.read_bytes()}, "bc4437a5 7332bdc3 dbcfebea 4d9f8ad3 26e53625"))
MADE = [(*each, made) for files, all_made in SOURCES for each, made in zip(
    ((files, name) for name in OWN), all_made.split(), strict=True) if made != "-"]  # fmt: skip


def checksum(found):
    digest = hashlib.sha256()
    for name, split in found.splits.items():
        for part in (name.encode(), np.asarray(split.tokens).astype("<i8"), split.documents.astype("<i8")):
            digest.update(part)
    sizes = {n: (c.bytes, c.characters, c.words, c.tokens, c.documents) for n, c in found.info.splits.items()}
    digest.update(f"{json.dumps(found.tokenizer.saved())}{sizes}".encode())
    return digest.hexdigest()[:8]


@pytest.mark.parametrize(("files", "tokenizer", "made"), MADE)
def test_tokens_are_always_the_same_in_memory_and_on_the_disk(files, tokenizer, made, tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, files))
    name = next(iter(files)).partition("/")[0]
    separator, size = "<end>" * (name == "divided"), 400 if tokenizer == "bpe" else None
    spec = CorpusSpec(name, "", "", separator, "text", tokenizer, size, name if name in CORPORA else "")
    folder = Path("tokens", f"{name}-{tokenizer}")
    if name in CORPORA:  # of which the command knows the tokenizer
        monkeypatch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], **CORPORA[name]))
        said = run("prepare", name, name).out
        assert f"{dataset(folder, tokenizer=tokenizer).info.splits['test'].tokens:,} tokens" in said
    in_memory, stored = dataset_of(spec), dataset(prepare(spec, folder), tokenizer=tokenizer)
    monkeypatch.setattr(tokenize_corpus, "BIG", 0)
    in_cache = dataset_of(spec)
    assert [checksum(found) for found in (in_memory, stored, in_cache)] == [made] * 3
    assert in_memory.info == stored.info == in_cache.info
    assert [isinstance(found.train.tokens, np.memmap) for found in (in_memory, stored)] == [False, True]
    assert stored.train.tokens.dtype == (np.uint8 if stored.tokenizer.vocab_size <= 256 else np.uint16)


def long_text(lines):
    return "".join(f"{n} naïve kings…\r\n{'🌉 crowns, ' * (n % 9)}\n" for n in range(lines))


@pytest.mark.parametrize(("tokenizer", "lines"), [("character", 70_000), ("byte", 70_000), ("bpe", 35_000)])
def test_a_text_of_megabytes_is_divided_and_encoded_as_a_whole(tokenizer, lines, tmp_path, monkeypatch):
    monkeypatch.setattr(BaseProcess, "start", None)  # since a script may have no main guard
    text = long_text(lines)
    found = dataset(write(tmp_path, {"x": text}) / "x", tokenizer=tokenizer, vocab_size=300)
    assert (whole(found, "train"), whole(found)) == (text[: len(text) * 9 // 10], text)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 40))
@example([2, 110])
@example([50, 50])
@example([110, 2])
def test_about_a_tenth_is_held_out_in_whole_documents_where_these_come_near_it(tmp_path_factory, lengths):
    path = tmp_path_factory.mktemp("documents") / "x.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in lengths))
    length, cut = sum(lengths), len(dataset(path).train.tokens)
    shares = {sum(lengths[:n]): sum(lengths[n:]) / length for n in range(1, len(lengths))}
    if near := [share for share in shares.values() if 0.05 <= share <= 0.2]:
        assert abs(shares[cut] - 0.1) == pytest.approx(min(abs(share - 0.1) for share in near))
    else:
        assert cut == length * 9 // 10


def test_the_checksum_is_that_of_the_text_and_its_boundaries(tmp_path):
    write(tmp_path, {"x": "abcdefghij" * 9, "y": "abcdefghij<>" * 9, "z": "abcde<>fghij<>" * 9})
    found = [dataset(tmp_path / name, document_separator="<>" * (name > "x")).info.sha256 for name in "xyz"]
    assert len({*found}) == 3
    assert found[0] == hashlib.sha256(b"abcdefghij" * 9).hexdigest()


NAMES = st.tuples(
    st.sampled_from(["x", "train", "a b", "ünï", "-", "valid", "meta", "x_documents"]),
    st.sampled_from(["", ".txt", ".json", ".jsonl", ".csv", ".parquet", ".npy", ".bin", ".pkl"]),
    st.sampled_from(["", ".gz", ".bz2", ".xz", ".zst", ".zip"]),
).map("".join)  # fmt: skip
RAW = (
    st.binary(max_size=400) | st.text(max_size=200).map(str.encode)
    | st.text(max_size=200).map(lambda text: text.encode("utf-16"))
    | st.lists(st.builds(dict, text=st.text(max_size=40)).map(json.dumps), max_size=5).map("\n".join)
    | st.lists(st.integers(0, 300), max_size=99).map(lambda ids: np.array(ids, "<u2").tobytes())
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=300)
@given(st.dictionaries(NAMES, RAW, min_size=1, max_size=3), st.booleans(), st.sampled_from(["bpe", "byte"]))
@example({"x.npy": b"\x93NUMPY\x01\x00v\x00{'descr'"}, False, "bpe")
def test_any_file_becomes_tokens_that_decode_to_it_or_one_line(tmp_path_factory, files, is_folder, tokenizer):
    folder = write(tmp_path_factory.mktemp("any"), files)
    source, out = folder if is_folder else folder / next(iter(files)), folder / "out" / "tokens"
    try:
        prepare(CorpusSpec(str(source), tokenizer=tokenizer), out)
    except UserError as error:
        assert ("\n" in str(error), out.exists()) == (False, False)  # noqa: PT017
        return
    read, raw = whole(dataset(out, tokenizer=tokenizer)), b"" if is_folder else source.read_bytes()
    as_it_is = [".bin", ".npy", ".csv"] if tokenizer == "byte" else [] if raw[:2] == b"\xff\xfe" else [".txt"]
    if raw and source.suffix in as_it_is:
        assert read.encode("utf-8", "surrogateescape") == raw.removeprefix(b"\xef\xbb\xbf")


@pytest.fixture
def spec(tmp_path):
    return CorpusSpec(str(write(tmp_path, {"x.txt": TEXT}) / "x.txt"))


def test_a_full_disk_is_one_line_and_leaves_nothing_behind(spec, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(TEXT) // 2, limits[1]))
    try:
        ended = run("prepare", spec.data, "--out", tmp_path / "out" / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.said(f"File too large: '{tmp_path}/out/x'"), ended.err
    assert [path.name for path in tmp_path.glob("out/*")] == [".preparing.lock"]


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path):
    path = write(tmp_path, {"x.txt": long_text(30_000)}) / "x.txt"
    changing = start(["sh", "-c", 'while :; do echo more >> "$0"; done', path])
    try:
        with refused(r"x\.txt has changed while it was read"):
            contents(path)
    finally:
        changing.kill()


@pytest.mark.parametrize("how", ["kill", "Ctrl-C", ""])
def test_another_preparation_waits_for_one_and_takes_its_place_if_it_ends_early(how, spec, tmp_path):
    learned = ["--vocab-size", 300_000] * (how == "Ctrl-C")  # which takes ten seconds
    first = start(program("prepare", "-", "--out", "x", *learned), cwd=tmp_path, stdin=subprocess.PIPE)
    first.stdin.write(TEXT)  # it waits for more
    wait_for(lambda: [*tmp_path.glob(".unfinished-*/text")])
    second = start(program("prepare", "x.txt", "--out", "x"), cwd=tmp_path, stderr=subprocess.PIPE)
    assert "waiting for another process that prepares a text" in second.stderr.readline()
    if how == "kill":
        first.kill()
    elif how:
        first.stdin.write("".join(np.random.default_rng(0).choice(list("abcdefghijkl "), 4_000_000)))
    first.stdin.close()
    if how == "Ctrl-C":
        time.sleep(2)
        first.send_signal(signal.SIGINT)
    assert (first.wait(timeout=5 if how else 60) == 0) == (not how)
    said = second.communicate(timeout=60)[1]
    assert ("x was made from - meanwhile; name another folder as --out.\n" in said) == (not how)
    assert {path.name for path in tmp_path.iterdir()} == {"x.txt", "x", ".preparing.lock"}
    assert dataset(tmp_path / "x", tokenizer="bpe").info.source == ("x.txt" if how else "-")


def test_a_large_text_is_prepared_in_the_cache_once_for_each_of_its_states(spec, monkeypatch, capsys):
    monkeypatch.setattr(tokenize_corpus, "BIG", 0)

    def made(**changes):
        return Path(dataset_of(replace(spec, **changes)).train.tokens.filename).parent

    first, second = made(), made()
    assert first == second == made(vocab_size=len({*TEXT}))
    assert capsys.readouterr().err.count("prepared once") == 1
    Path(spec.data).write_text(TEXT + "more")
    assert len({made(), made(tokenizer="byte"), made(document_separator="naïve"), first}) == 4


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [("train.npy", None, "train.npy"), ("train.npy", lambda raw: raw[:-5], "train.npy"),
     ("validation.npy", lambda _: saved(np.zeros((2, 3), np.uint8)), "validation.npy"),
     ("train_documents.npy", lambda raw: raw[:128] + raw[:127:-1], "train_documents.npy to rise"),
     ("card.json", lambda raw: raw.replace(b'"format": 1', b'"format": 9'), "format.* 9"),
     ("tokenizer.json", lambda _: b"{}", "tokenizer.json")],
)  # fmt: skip
def test_a_folder_that_has_changed_is_an_error(name, change, words, spec, tmp_path):
    folder = prepare(replace(spec, document_separator="\n"), tmp_path / "tokens")
    raw = (folder / name).read_bytes()
    (folder / name).unlink()
    write(folder, {name: change(raw)} if change else {})
    with refused(words):
        dataset(folder)
