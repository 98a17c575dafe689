"""From what is read to a dataset of tokens, in memory and in a folder."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memformers.common.errors import UserError
from memformers.common.files import read_json, write_json
from memformers.data import benchmarks, dataset, files, tokenize_corpus
from memformers.data.builtin import write_play
from memformers.data.dataset import CARD, open_store
from memformers.data.sources import CorpusSpec, find
from memformers.data.tokenize_corpus import dataset_of, in_cache, prepare, split_of
from memformers.data.tokenizers import OWN
from tests.data.reading import text_in
from tests.processes import finish, program, run, start, wait_for

LINES = [f"Line {n}: naïve kings — and {'crowns ' * (n % 7)}…" for n in range(400)]
TEXT = "\n".join(LINES) + "\n"
SHAKESPEARE = Path(os.environ.get("MEMFORMERS_DATA", "/nowhere")) / "tinyshakespeare" / "input.txt"
BEFORE = {
    "shakespeare": "bc4437a5b4e9d037 7332bdc347bf713d dbcfebea3add320e 4d9f8ad370818fff 26e53625528d49f6",
    "play": "3a564635170e6f4d 0e68852b1435c3a3 24e03e20a623fb1f 1d4cee1c5161b189 ee9808a8e1f97bff",
    "lines.jsonl": "ae25c6da176eb0b4 353f876b0d0bcf03 297f4bee0e7f210c 78d160b901e06943 f84b47aea9941173",
    "books": "c930c1ac800aa2ce 99c9ddb7a16b5e1c 5638eaf315ad3b4d 4eebbab23961b10b f16ed939a41bb301",
    "divided": "ae25c6da176eb0b4 353f876b0d0bcf03 297f4bee0e7f210c 78d160b901e06943 f84b47aea9941173",
    "enwik8": "- - f59556cfeba579a7 - -",
    "text8": "300af649a76d81dd - - - -",
    "wikitext-103": "- - - 20fab90cc9e76923 -",
}
"""The checksums of tokens, documents, tokenizer and counts, as the third version made them, for characters by
alphabet and by frequency, bytes, words and subwords; - where there is none."""


def written(name, folder):
    """A file or folder of texts."""
    path = folder / name
    if name == "shakespeare":
        return SHAKESPEARE
    if name == "play":
        path.write_text(write_play(300_000))
    elif name == "lines.jsonl":
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    elif name == "books":
        for i in range(12):
            book = path / ("b" if i % 2 else "") / f"{i}.txt"
            book.parent.mkdir(parents=True, exist_ok=True)
            book.write_text("\n".join(LINES[i * 20 : i * 20 + 5 + i * 3]))
    elif name == "divided":
        path.write_text("<end>".join(LINES))
    elif name == "enwik8":
        path.write_bytes(("naïve " * 200).encode()[:1000])
    elif name == "text8":
        path.write_text(("a quick brown fox " * 60)[:1000])
    else:
        path.mkdir()
        for split, begin, end in (("train", 0, 300), ("valid", 300, 350), ("test", 350, 400)):
            (path / f"wiki.{split}.tokens").write_text("\n \n".join(LINES[begin:end]) + "\n")
    return path


def checksum(found):
    digest = hashlib.sha256()
    for name, split in found.splits.items():
        digest.update(name.encode())
        digest.update(np.asarray(split.tokens).astype("<i8").tobytes())
        digest.update(split.documents.astype("<i8").tobytes())
    digest.update(json.dumps(found.tokenizer.saved()).encode())
    sizes = {n: (c.bytes, c.characters, c.words, c.tokens, c.documents) for n, c in found.info.splits.items()}
    return digest.hexdigest()[:16] if not digest.update(repr(sizes).encode()) else ""


@pytest.mark.parametrize(
    ("source", "name", "expected"),
    [
        (source, name, checksum)
        for source, checksums in BEFORE.items()
        for name, checksum in zip(OWN, checksums.split(), strict=True)
        if checksum != "-" and (source != "shakespeare" or SHAKESPEARE.is_file())
    ],
)
def test_tokens_are_those_of_the_version_before_in_memory_and_on_the_disk(
    source, name, expected, tmp_path, monkeypatch
):
    path, known = written(source, tmp_path), source if "-" in BEFORE[source] else ""
    small = {"sizes": (901, 49, 50), "sha256": ""} if known[-1:] == "8" else {"words": ()}
    if known:
        changed = replace(benchmarks.BENCHMARKS[known], **small)
        monkeypatch.setitem(benchmarks.BENCHMARKS, known, changed)
    separator, size = "<end>" * (source == "divided"), 400 if name == "bpe" else None
    spec = CorpusSpec(str(path), "", "", separator, "text", name, size, known)
    in_memory = dataset_of(spec)
    for module, constant, small_one in (
        (files, "BLOCK", 777), (tokenize_corpus, "JOB", 5000),
    ):  # fmt: skip
        monkeypatch.setattr(module, constant, small_one if source != "shakespeare" else 300_000)
    stored = open_store(prepare(spec, tmp_path / "tokens"))
    assert [checksum(in_memory), checksum(stored)] == [expected, expected]
    assert isinstance(stored.train.tokens, np.memmap)
    assert not isinstance(in_memory.train.tokens, np.memmap)
    assert stored.train.tokens.dtype == (np.uint8 if stored.tokenizer.vocab_size <= 256 else np.uint16)
    assert in_memory.info == stored.info
    monkeypatch.setattr(tokenize_corpus, "BIG", 0)
    monkeypatch.setattr(tokenize_corpus.platformdirs, "user_cache_dir", lambda _: str(tmp_path / "cache"))
    assert checksum(dataset_of(spec)) == expected
    assert sorted(path.name for path in tmp_path.iterdir() if "tokens" in path.name) == ["tokens"]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
@example([2, 110])
@example([50, 50])
@example([110, 2])
def test_about_a_tenth_is_held_out_in_whole_documents_where_these_come_near_it(lengths):
    length, cut = sum(lengths), split_of(sum(lengths), lengths)
    shares = {sum(lengths[:n]): sum(lengths[n:]) / length for n in range(1, len(lengths))}
    if near := [share for share in shares.values() if 0.05 <= share <= 0.2]:
        assert abs(shares[cut] - 0.1) == pytest.approx(min(abs(share - 0.1) for share in near))
    else:
        assert cut == length * 9 // 10


def test_the_checksum_is_that_of_the_text_and_its_boundaries(tmp_path):
    found = []
    for n, text in enumerate(("abcdefghij" * 9, "abcdefghij<>" * 9, "abcde<>fghij<>" * 9)):
        (tmp_path / f"{n}.txt").write_text(text)
        spec = CorpusSpec(str(tmp_path / f"{n}.txt"), document_separator="<>" * (n > 0))
        found.append(dataset_of(spec).info)
    assert len({info.sha256 for info in found}) == 3
    assert found[0].sha256 == hashlib.sha256(b"abcdefghij" * 9).hexdigest()
    assert [info.documents for info in found] == [0, 9, 18]


NAMES = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["x", "train", "a b", "ünï", "-", "valid", "meta", "x_documents"]),
        st.sampled_from(
            ["", ".txt", ".json", ".jsonl", ".ndjson", ".csv", ".parquet", ".npy", ".bin", ".pkl"]
        ),
        st.sampled_from(["", ".gz", ".bz2", ".xz", ".zst", ".zip"]),
    ),
)
CONTENTS = st.one_of(
    st.binary(max_size=400),
    st.text(max_size=200).map(str.encode),
    st.text(max_size=200).map(lambda text: text.encode("utf-16")),
    st.lists(st.text(max_size=40), max_size=5).map(
        lambda texts: "\n".join(json.dumps({"text": text}) for text in texts).encode()
    ),
    st.lists(st.integers(0, 300), max_size=99).map(lambda ids: np.array(ids, "<u2").tobytes()),
)


@settings(max_examples=300)
@given(
    st.dictionaries(NAMES, CONTENTS, min_size=1, max_size=3), st.booleans(), st.sampled_from(["bpe", "byte"])
)
@example({"x.npy": b"\x93NUMPY\x01\x00v\x00{'descr'"}, False, "bpe")
def test_any_file_becomes_a_dataset_that_decodes_to_it_or_one_line(
    tmp_path_factory, held, is_folder, tokenizer
):
    folder = tmp_path_factory.mktemp("any")
    for name, raw in held.items():
        (folder / name).write_bytes(raw)
    source = folder if is_folder else folder / next(iter(held))
    spec = CorpusSpec(str(source), tokenizer=tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            found, said = open_store(prepare(spec, folder / "out" / "tokens")), ""
        except UserError as error:
            said = str(error)
    if said:
        assert "\n" not in said
        assert not (folder / "out" / "tokens").exists()
        return
    read = text_in(found.splits.values(), found.tokenizer).encode("utf-8", "surrogateescape")
    is_raw = tokenizer == "byte" and source.suffix in ("", ".bin", ".npy", ".csv")
    is_text = source.suffix == ".txt" and not (is_folder or source.read_bytes().startswith(b"\xff\xfe"))
    if is_text or (is_raw and not is_folder):
        assert read == source.read_bytes().removeprefix(b"\xef\xbb\xbf")


def text(content, name="x.txt"):
    raw = content if isinstance(content, bytes) else content.encode()
    return name, lambda path: path.write_bytes(raw)


def store_without_manifest(path):
    path.mkdir()
    for name in ("card.json", "tokenizer.json", "train.npy"):
        (path / name).write_text("{}")


REFUSED = [
    (text(TEXT.encode() + b"\xff"), {}, f"0xff at offset {len(TEXT.encode())} "),
    (text(b"abc\xc3"), {}, "0xc3 at offset 3 "),
    (text(" \n"), {}, "no text"), (text("a"), {}, "train"),
    (("x.txt", lambda path: None), {}, "x.txt"), (("x", Path.mkdir), {}, "no text"),
    (text(TEXT), {"tokenizer": "bpe", "vocab_size": 9999}, "9999"),
    (text(TEXT), {"tokenizer": "letters"}, "'letters'"),
    (("x", store_without_manifest), {}, "x holds tokens and no text"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "how", "words"), REFUSED)
def test_a_text_that_cant_be_prepared_is_an_error_of_one_line(source, how, words, tmp_path):
    name, write = source
    write(tmp_path / name)
    with pytest.raises(UserError, match=words) as error:
        prepare(CorpusSpec(str(tmp_path / name), **how), tmp_path / "out" / "tokens")
    assert "\n" not in str(error.value)
    assert not [path for path in tmp_path.glob("out/*") if path.name != ".preparing.lock"]


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "x.txt").write_text(TEXT)
    return CorpusSpec(str(tmp_path / "x.txt"))


def test_a_full_disk_leaves_nothing_behind_and_what_a_killed_one_left_goes(spec, tmp_path, monkeypatch):
    (tmp_path / "out" / ".unfinished-1").mkdir(parents=True)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dataset.SplitWriter, "add", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*/out/tokens'"):
            prepare(spec, tmp_path / "out" / "tokens")
    assert [path.name for path in tmp_path.glob("out/*")] == [".preparing.lock"]
    prepare(spec, tmp_path / "out" / "tokens")
    assert {path.name for path in tmp_path.glob("out/*")} == {".preparing.lock", "tokens"}


def test_a_killed_preparation_leaves_nothing_for_the_next_one_which_begins_anew(spec, tmp_path):
    (tmp_path / "x.txt").write_text(TEXT * (24_000_000 // len(TEXT)))
    command = program("prepare", spec.data, "--tokenizer", "character", "--out", tmp_path / "out" / "x")
    preparation = start(command, stderr=subprocess.PIPE)
    tokens = wait_for(
        lambda: [path for path in tmp_path.glob("out/*/train.npy") if path.stat().st_size > 10_000]
    )
    children = Path(f"/proc/{preparation.pid}/task").glob("*/children")
    assert not any(task.read_text().split() for task in children)
    preparation.kill()
    preparation.communicate(timeout=60)
    assert tokens[0].exists()
    assert not (tmp_path / "out" / "x").exists()
    (tmp_path / "x.txt").write_text(TEXT)
    prepare(spec, tmp_path / "out" / "x")
    assert {path.name for path in tmp_path.glob("out/*")} == {".preparing.lock", "x"}


def test_ctrl_c_ends_the_learning_of_subwords(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "x.txt").write_bytes(
        rng.choice(list(b"abcdefghijklmnopqrstuvwxyz   "), 20_000_000).astype("u1")
    )
    preparation = start(
        program("prepare", tmp_path / "x.txt", "--vocab-size", 30_000, "--out", tmp_path / "x")
    )
    wait_for(
        lambda: [path for path in tmp_path.glob(".unfinished-*/text") if path.stat().st_size > 19_000_000]
    )
    time.sleep(2)  # in which it reads pieces, and begins to learn
    preparation.send_signal(signal.SIGINT)
    begun = time.monotonic()
    assert preparation.wait(timeout=60) != 0
    assert time.monotonic() - begun < 10
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_script_without_a_main_guard_trains_on_a_large_text(tmp_path):
    (tmp_path / "x.txt").write_text(TEXT * (50_000 // len(TEXT)))
    (tmp_path / "script.py").write_text(
        "from memformers import ModelConfig, TrainConfig, train\n"
        "from memformers.data import tokenize_corpus\n"
        "tokenize_corpus.BIG, tokenize_corpus.JOB = 30_000, 10_000\n"
        "small = ModelConfig(n_layers=1, d_model=8, heads=1, d_ff=8)\n"
        "train(TrainConfig(small, 'x.txt', tokenizer='byte', tokens=4096, evaluations=1), 'run')\n"
    )
    cache = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    ended = finish([sys.executable, "script.py"], cwd=tmp_path, env=cache)
    assert ended.returncode == 0, ended.stderr


def test_a_text_is_prepared_in_the_cache_once_for_each_of_its_states(spec, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tokenize_corpus.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache"))

    def made(**changes):
        changed = replace(spec, **changes)
        return in_cache(find(changed), changed)

    first, second = made(), made()
    assert first == second
    assert capsys.readouterr().err.count("prepared once") == 1
    assert made(vocab_size=open_store(first).tokenizer.vocab_size) == first
    (tmp_path / "x.txt").write_text(TEXT + "more")
    assert len({made(), made(tokenizer="byte"), made(document_separator="naïve"), first}) == 4


def test_of_two_preparations_at_once_the_second_finds_what_the_first_has_made(spec, tmp_path, monkeypatch):
    read, calls, both = tokenize_corpus.read, [], threading.Barrier(2, timeout=60)

    def slowly(*arguments):
        calls.append(arguments)
        both.wait()
        time.sleep(0.2)  # while the other one comes to the lock
        return read(*arguments)

    monkeypatch.setattr(tokenize_corpus, "read", slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(prepare, spec, tmp_path / "tokens")
        both.wait()
        second = pool.submit(prepare, spec, tmp_path / "tokens")
        assert first.result(60) == second.result(60) == tmp_path / "tokens"
    assert len(calls) == 1
    open_store(tmp_path / "tokens")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [("train.npy", Path.unlink, "train.npy"),
     ("train.npy", lambda path: path.write_bytes(path.read_bytes()[:-5]), "train.npy"),
     ("validation.npy", lambda path: np.save(path, np.zeros((2, 3), np.uint8)), "validation.npy"),
     ("train_documents.npy", lambda path: np.save(path, np.load(path)[::-1]), "rise from 0 .* steps back"),
     ("train_documents.npy", lambda path: np.save(path, np.load(path) + 1), "train_documents.npy to rise"),
     (CARD, lambda path: write_json(path, read_json(path) | {"format": 9}), "format.* 9"),
     ("tokenizer.json", lambda path: path.write_text("{}"), "tokenizer.json"),
     ("manifest.json", Path.unlink, "manifest.json")],
)  # fmt: skip
def test_a_folder_that_has_changed_is_an_error(name, change, words, spec, tmp_path):
    folder = prepare(replace(spec, document_separator="\n"), tmp_path / "tokens")
    change(folder / name)
    with pytest.raises(UserError, match=words):
        open_store(folder)


def test_the_command_prepares_and_says_what_there_is(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = run("prepare", "x.txt", "--tokenizer", "word", "--vocab-size", "50")
    assert ended.code == 0
    info = open_store(Path("tokens/x.txt-word")).info
    assert f"{info.splits['train'].tokens:,} tokens" in ended.out
    assert "exists already" in run("prepare", "x.txt", "--tokenizer", "word").err
    for name in ("byte", "character", "frequency"):
        assert "vocab_size=5 is" in run("prepare", "x.txt", "--tokenizer", name, "--vocab-size", "5").err
    assert run("prepare", "no.txt").err.startswith("error: no.txt")
    assert run("prepare", "").err.startswith("error: TEXT is empty; name")
    assert finish(program("prepare", "-", "--out", "piped"), input=TEXT)
    assert open_store(Path("piped")).info.sha256 == info.sha256


def test_a_folder_that_another_process_made_meanwhile_of_another_text_is_an_error(
    spec, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("y.txt").write_text(TEXT * 2)

    def after_another(spec, out, **sources):
        prepare(CorpusSpec("y.txt", tokenizer="byte"), out)
        return prepare(spec, out, **sources)

    monkeypatch.setattr("memformers.commands.prepare.prepare", after_another)
    ended = run("prepare", "x.txt", "--out", "tokens")
    assert ended.code == 2
    assert ended.err.endswith("tokens was made from y.txt meanwhile; name another folder as --out.\n")
