"""From files to a folder of tokens, which is that of the text in memory."""

import errno
import gzip
import json
import lzma
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zstandard

from memformers.common.errors import UserError
from memformers.common.files import read_json, write_json
from memformers.data import files, gathering, preparing
from memformers.data.corpora import load_corpus
from memformers.data.gathering import Recipe
from memformers.data.preparing import in_cache, prepare
from memformers.data.store import CARD, open_store
from memformers.data.tokenizers import build_tokenizer
from tests.processes import finish, program, run, start, wait_for

LINES = [f"Line {n}: naïve kings — and {'crowns ' * (n % 7)}…" for n in range(400)]
TEXT = "\n".join(LINES) + "\n"
PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


def json_lines(lines):
    return "".join(json.dumps({"text": line}) + "\n\n" for line in lines)


def written(folder, packed=""):
    """A plain text, JSON lines, documents between separators, and a folder with all kinds of files."""
    pack = PACK[packed]
    (folder / "texts" / "sub").mkdir(parents=True)
    for name, text in (
        ("plain.txt", "\ufeff" + TEXT), ("lines.jsonl", json_lines([*LINES, " "])),
        ("divided.txt", "<end>".join([*LINES, "\n"])), ("texts/sub/c.jsonl", json_lines(LINES)),
        ("texts/a.txt", TEXT[:999]), ("texts/b.txt", TEXT), ("texts/blank.txt", " \n"),
        ("texts/long.txt", TEXT * 3),
    ):  # fmt: skip
        (folder / (name + packed)).write_bytes(pack(text.encode()))
    (folder / "texts" / "bad").write_bytes(b"abc\xff")
    return folder


SOURCES = [("plain.txt", ""), ("lines.jsonl", ""), ("divided.txt", "<end>"), ("texts", "")]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["character", "frequency", "byte", "word", "bpe"])
@pytest.mark.parametrize(("source", "separator"), SOURCES)
def test_tokens_are_those_of_the_text_in_memory(source, separator, name, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 777)
    monkeypatch.setattr(preparing, "JOB", 5000)
    monkeypatch.setattr(gathering, "MARK", 2000)
    path = written(tmp_path) / source
    corpus = load_corpus(str(path), separator)
    size = 300 if name == "bpe" else None
    store = open_store(prepare(Recipe(path, "", separator, name, size), tmp_path / "tokens"))
    trained_on = corpus.text if name in ("character", "frequency") else corpus.train_text
    own = build_tokenizer(name, trained_on, size) if not corpus.documents else store.tokenizer
    assert own.saved() == store.tokenizer.saved()
    assert (store.card.sha256, store.card.tokenizer) == (corpus.sha256, own.name)
    for split, text, documents in (
        ("train", corpus.train_text, corpus.train_documents),
        ("validation", corpus.validation_text, corpus.validation_documents),
    ):
        counts, found = store.card.splits[split], store.splits[split]
        expected = [own.numbers(own.ended(part)) for part in documents or (text,)]
        assert np.array_equal(found.tokens, np.concatenate(expected))
        assert list(found.documents) == (list(map(len, expected)) if documents else [])
        assert isinstance(found.tokens, np.memmap)
        assert found.tokens.dtype == (np.uint8 if own.vocab_size <= 256 else np.uint16)
        assert (counts.characters, counts.bytes) == (len(text), len(text.encode()))
        assert counts.words == sum(len(part.split()) for part in documents or (text,))
        assert (counts.tokens, counts.documents) == (len(found.tokens), len(documents))
    assert sorted(path.name for path in tmp_path.iterdir() if "tokens" in path.name) == ["tokens"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("packed", [".gz", ".xz", ".zst"])
def test_compressed_files_are_the_texts_that_they_hold(packed, tmp_path):
    plain, small = written(tmp_path / "plain"), written(tmp_path / "packed", packed)
    for source, separator in SOURCES:
        packed_source = small / (source + packed * (source != "texts"))
        corpus = load_corpus(str(plain / source), separator)
        assert load_corpus(str(packed_source), separator).sha256 == corpus.sha256
        out = prepare(Recipe(packed_source, "", separator, "byte"), small / f"tokens-{source}")
        assert open_store(out).card.sha256 == corpus.sha256


def text(content, name="x.txt"):
    raw = content if isinstance(content, bytes) else content.encode()
    return name, lambda path: path.write_bytes(raw)


def cut(kind):
    return text(PACK[kind](TEXT.encode())[:-20], f"x.txt{kind}")


def store_without_manifest(path):
    path.mkdir()
    for name in ("card.json", "tokenizer.json", "train.npy"):
        (path / name).write_text("{}")


REFUSED = [
    (text(TEXT.encode() + b"\xff"), {}, f"0xff at offset {len(TEXT.encode())} "),
    (text(b"abc\xc3"), {}, "0xc3 at offset 3 "),
    (cut(".gz"), {}, "x.txt.gz.* complete"), (cut(".xz"), {}, "complete"), (cut(".zst"), {}, "complete"),
    (text("abc", "x.gz"), {}, "x.gz"), (text(" \n"), {}, "no text"), (text("a"), {}, "train"),
    (("x.txt", lambda path: None), {}, "x.txt"), (("x", Path.mkdir), {}, "no text"),
    (text('{"text": 1}\n', "x.jsonl"), {}, "x.jsonl:1"),
    (text('{"text": "a"}\n' + "x" * 9999, "x.jsonl"), {}, "x.jsonl:2.* line"),
    (text(TEXT), {"document_separator": "<nowhere>"}, "'<nowhere>'"),
    (text('{"text": "a"}\n', "x.jsonl"), {"document_separator": "|"}, "documents already"),
    (text(TEXT), {"tokenizer": "bpe", "vocab_size": 9999}, "9999"),
    (text(TEXT), {"tokenizer": "letters"}, "'letters'"),
    *((text(TEXT), {"tokenizer": name, "vocab_size": 5}, "vocab_size=5") for name in ("byte", "character")),
    (("x", store_without_manifest), {}, "x holds tokens and no text"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "settings", "words"), REFUSED)
def test_a_text_that_cant_be_prepared_is_an_error_of_one_line(source, settings, words, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 5000)
    name, write = source
    write(tmp_path / name)
    with pytest.raises(UserError, match=words) as error:
        prepare(Recipe(tmp_path / name, **settings), tmp_path / "out" / "tokens")
    assert "\n" not in str(error.value)
    assert not [path for path in tmp_path.glob("out/*") if path.name != ".preparing.lock"]


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "x.txt"
    path.write_text(TEXT)
    blocks = files.blocks_of(path)
    next(blocks)
    os.utime(path, (1, 1))
    with pytest.raises(UserError, match=r"x.txt has changed"):
        list(blocks)


def test_a_full_disk_leaves_nothing_behind_and_what_a_killed_one_left_goes(tmp_path, monkeypatch):
    (tmp_path / "x.txt").write_text(TEXT)
    (tmp_path / "out" / ".unfinished-1").mkdir(parents=True)
    recipe, append = Recipe(tmp_path / "x.txt"), preparing.TokenFile.append

    def full(self, numbers):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(preparing.TokenFile, "append", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/out/tokens'"):
        prepare(recipe, tmp_path / "out" / "tokens")
    monkeypatch.setattr(preparing.TokenFile, "append", append)
    assert [path.name for path in tmp_path.glob("out/*")] == [".preparing.lock"]
    prepare(recipe, tmp_path / "out" / "tokens")
    assert {path.name for path in tmp_path.glob("out/*")} == {".preparing.lock", "tokens"}


def test_a_killed_preparation_leaves_nothing_for_the_next_one_which_begins_anew(tmp_path):
    (tmp_path / "x.txt").write_text(TEXT * (24_000_000 // len(TEXT)))
    command = program(
        "prepare", tmp_path / "x.txt", "--tokenizer", "character", "--out", tmp_path / "out" / "x"
    )
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
    prepare(Recipe(tmp_path / "x.txt"), tmp_path / "out" / "x")
    assert {path.name for path in tmp_path.glob("out/*")} == {".preparing.lock", "x"}


def test_a_script_without_a_main_guard_trains_on_a_large_text(tmp_path):
    (tmp_path / "x.txt").write_text(TEXT * (50_000 // len(TEXT)))
    (tmp_path / "script.py").write_text(
        "from memformers import ModelConfig, TrainConfig, train\n"
        "from memformers.data import preparing\n"
        "preparing.BIG, preparing.JOB = 30_000, 10_000\n"
        "small = ModelConfig(n_layers=1, d_model=8, heads=1, d_ff=8)\n"
        "train(TrainConfig(small, 'x.txt', tokenizer='byte', tokens=4096, evaluations=1), 'run')\n"
    )
    cache = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    ended = finish([sys.executable, "script.py"], cwd=tmp_path, env=cache)
    assert ended.returncode == 0, ended.stderr


def test_a_text_is_prepared_in_the_cache_once_for_each_of_its_states(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preparing.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache"))
    path = tmp_path / "x.txt"
    path.write_text(TEXT)
    first, second = in_cache(Recipe(path)), in_cache(Recipe(path))
    assert first == second
    assert capsys.readouterr().err.count("prepared once") == 1
    path.write_text(TEXT + "more")
    others = {
        in_cache(Recipe(path)),
        in_cache(Recipe(path, tokenizer="byte")),
        in_cache(Recipe(path, "", "naïve")),
    }
    assert len(others | {first}) == 4


def test_of_two_preparations_at_once_the_second_finds_what_the_first_has_made(tmp_path, monkeypatch):
    (tmp_path / "x.txt").write_text(TEXT)
    gather, calls, both = preparing.gather, [], threading.Barrier(2, timeout=60)

    def slowly(*arguments):
        calls.append(arguments)
        both.wait()
        time.sleep(0.2)  # while the other one comes to the lock
        return gather(*arguments)

    monkeypatch.setattr(preparing, "gather", slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(prepare, Recipe(tmp_path / "x.txt"), tmp_path / "tokens")
        both.wait()
        second = pool.submit(prepare, Recipe(tmp_path / "x.txt"), tmp_path / "tokens")
        assert first.result(60) == second.result(60) == tmp_path / "tokens"
    assert len(calls) == 1
    open_store(tmp_path / "tokens")


def changed(name, change):
    def do(folder: Path):
        change(folder / name)

    return do


@pytest.mark.parametrize(
    ("change", "words"),
    [(changed("train.npy", Path.unlink), "train.npy"),
     (changed("train.npy", lambda path: path.write_bytes(path.read_bytes()[:-5])), "train.npy"),
     (changed("validation.npy", lambda path: np.save(path, np.zeros((2, 3), np.uint8))), "validation.npy"),
     (changed(CARD, lambda path: write_json(path, read_json(path) | {"format": 9})), "format.* 9"),
     (changed("tokenizer.json", lambda path: path.write_text("{}")), "tokenizer.json"),
     (changed("manifest.json", Path.unlink), "manifest.json")],
)  # fmt: skip
def test_a_folder_that_has_changed_is_an_error(change, words, tmp_path):
    (tmp_path / "x.txt").write_text(TEXT)
    folder = prepare(Recipe(tmp_path / "x.txt"), tmp_path / "tokens")
    change(folder)
    with pytest.raises(UserError, match=words):
        open_store(folder)


def test_the_command_prepares_and_says_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text(TEXT)
    ended = run("prepare", "x.txt", "--tokenizer", "word", "--vocab-size", "50")
    assert ended.code == 0
    card = open_store(Path("tokens/x.txt-word")).card
    assert f"{card.splits['train'].tokens:,} tokens" in ended.out
    assert "exists already" in run("prepare", "x.txt", "--tokenizer", "word").err
    assert run("prepare", "no.txt").err.startswith("error: no.txt")
    assert run("prepare", "").err.startswith("error: TEXT is empty; name")
    assert finish(program("prepare", "-", "--out", "piped"), input=TEXT)
    assert open_store(Path("piped")).card.sha256 == card.sha256


def test_a_folder_that_another_process_made_meanwhile_of_another_text_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text(TEXT)
    Path("y.txt").write_text(TEXT * 2)

    def after_another(recipe, out):
        prepare(Recipe(Path("y.txt"), tokenizer="byte"), out)
        return prepare(recipe, out)

    monkeypatch.setattr("memformers.commands.prepare.prepare", after_another)
    ended = run("prepare", "x.txt", "--out", "tokens")
    assert ended.code == 2
    assert ended.err.endswith("tokens was made from y.txt meanwhile; name another folder as --out.\n")
