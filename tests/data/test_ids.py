"""Token ids of one's own: NumPy's, nanoGPT's and llm.c's files, and arrays."""

import os
import pickle

import numpy as np
import pytest
import torch

from memformers import prepare_ids
from memformers.common.errors import UserError
from memformers.data.dataset import open_store
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import dataset_of, prepare
from memformers.data.tokenizers import IdTokenizer, load_tokenizer, save_tokenizer
from tests.data.reading import dataset, saved

IDS = np.random.default_rng(0).integers(0, 300, 4000)


def llm_c(ids, magic=20240520, kind="<u2", count=None):
    head = np.zeros(256, "<u4")
    head[:3] = magic, 1, len(ids) if count is None else count
    return head.tobytes() + ids.astype(kind).tobytes()


FILES = {
    "x.npy": saved(IDS), "small.npy": saved(IDS.astype(np.uint16)), "x.bin": IDS.astype("<u2").tobytes(),
    "gpt2.bin": llm_c(IDS), "llama.bin": llm_c(IDS, 20240801, "<u4"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_ids_of_a_file_are_the_tokens_in_memory_and_on_the_disk(name, tmp_path):
    (tmp_path / name).write_bytes(FILES[name])
    spec = CorpusSpec(str(tmp_path / name), vocab_size=300)
    for found in (dataset_of(spec), open_store(prepare(spec, tmp_path / "tokens"))):
        assert np.array_equal(np.concatenate([found.train.tokens, found.validation.tokens]), IDS)
        assert (len(found.validation.tokens), found.train.tokens.dtype) == (400, np.uint16)
        assert (found.info.tokenizer, found.tokenizer.vocab_size, found.info.documents) == ("ids", 300, 0)
        assert found.info.total("characters") == found.info.total("tokens") == 4000
        assert found.info.total("bytes") == 0


def test_nanogpt_folders_have_their_splits_their_vocabulary_and_their_characters(tmp_path):
    letters = "\n !abcdefgh"
    for split, ids in (("train", IDS[:3000] % 11), ("val", IDS[3000:] % 11)):
        (tmp_path / f"{split}.bin").write_bytes(ids.astype("<u2").tobytes())
    meta = {"vocab_size": 11, "itos": dict(enumerate(letters)), "stoi": {c: i for i, c in enumerate(letters)}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    found = dataset(tmp_path)
    assert found.tokenizer.decode(torch.from_numpy(found.train.tokens[:9])) == "".join(
        letters[i] for i in IDS[:9] % 11
    )
    assert [len(split.tokens) for split in found.splits.values()] == [3000, 1000]
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 11}))
    assert dataset(tmp_path).tokenizer.name == "ids"
    assert dataset(tmp_path, vocab_size=20).tokenizer.vocab_size == 20


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    "meta", [Evil(), [], {"vocab_size": "x"}, {"vocab_size": 2, "itos": ["a", "a"]}, b"cut"]
)
def test_a_pickle_runs_nothing_and_a_broken_one_is_one_line(meta, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.bin").write_bytes(FILES["x.bin"])
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta) if meta != b"cut" else b"\x80\x04")
    with pytest.raises(UserError, match=r"meta\.pkl can't be read: .*; remove it, and give vocab_size"):
        dataset(tmp_path / "x.bin", vocab_size=300)
    assert not (tmp_path / "evil").exists()


KNOWN = {"vocab_size": 300}
REFUSED = [
    ({"x.npy": saved(IDS)}, {}, "the largest is 299, so at least 300"),
    ({"x.npy": saved(IDS)}, {"vocab_size": 299}, r"below vocab_size=299, got 299 at \d"),
    ({"x.npy": saved(IDS - 5)}, KNOWN, "from 0 on, got -5"),
    ({"x.npy": saved(IDS / 2)}, KNOWN, r"of an integer type, got \[4000\] of float64"),
    ({"x.npy": saved(IDS.reshape(2, -1))}, KNOWN, r"got \[2, 2000\] of int64"),
    ({"x.npy": saved(IDS)[:-20]}, KNOWN, "x.npy can't be read as token ids"),
    ({"x.npy": saved(np.array([IDS, None], object))}, KNOWN, "can't be read as token ids"),
    ({"x.bin": b"abc"}, KNOWN, "ids of two bytes, got 3 bytes"),
    ({"x.bin": b""}, KNOWN, "got 0 bytes"),
    ({"x.bin": llm_c(IDS, count=9)}, KNOWN, "says 9 ids, and 4,000 follow"),
    ({"x.npy": saved(IDS), "y.txt": b"a text"}, KNOWN, "holds token ids, and y.txt a text"),
    ({"x.npy": saved(IDS)}, {"vocab_size": 300, "tokenizer": "word"}, "which are not divided again"),
    ({"x.npy": saved(IDS), "x_documents.npy": saved(np.array([0, 9, 5, 4000]))}, KNOWN, "1 steps back"),
    ({"x.npy": saved(IDS), "x_documents.npy": saved(np.array([0, 4001]))}, KNOWN, "rise from 0"),
]  # fmt: skip


@pytest.mark.parametrize(("held", "how", "words"), REFUSED)
def test_ids_that_cant_be_used_are_one_line(held, how, words, tmp_path):
    for name, raw in held.items():
        (tmp_path / name).write_bytes(raw)
    source = tmp_path if "y.txt" in held else tmp_path / next(iter(held))
    with pytest.raises(UserError, match=words) as error:
        dataset(source, **how)
    assert "\n" not in str(error.value)


def test_documents_are_files_or_places_beside_one_or_arrays_of_a_list(tmp_path):
    pieces = [IDS[:1000], IDS[1000:3500], IDS[3500:]]
    (tmp_path / "pieces").mkdir()
    for n, piece in enumerate(pieces):
        np.save(tmp_path / "pieces" / f"{n}.npy", piece)
    np.save(tmp_path / "x.npy", IDS)
    np.save(tmp_path / "x_documents.npy", np.array([0, 1000, 3500, 4000]))
    folder, others = dataset(tmp_path / "pieces", vocab_size=300), dataset(tmp_path / "x.npy", vocab_size=300)
    arrays = open_store(prepare_ids(tmp_path / "tokens", pieces, vocab_size=300))
    for found in (folder, others, arrays):
        assert found.train.documents.tolist() == [1000, 2500]
        assert found.validation.documents.tolist() == [500]
        assert np.array_equal(found.validation.tokens, pieces[2])
        assert found.info.sha256 == folder.info.sha256
    assert (folder.validation.names, others.validation.names) == (["2.npy"], ["x.npy:3"])


def test_arrays_may_have_splits_of_their_own_and_wrong_ones_leave_nothing(tmp_path):
    by_split = {"train": torch.from_numpy(IDS[:3000]), "validation": [IDS[3000:3500], IDS[3500:]]}
    found = open_store(prepare_ids(tmp_path / "tokens", by_split, vocab_size=300))
    assert np.array_equal(found.train.tokens, IDS[:3000])
    assert found.validation.documents.tolist() == [500, 500]
    for ids, words in (
        ({"training": IDS}, "expected splits train, validation"), ({"train": IDS}, "expected splits"),
        (IDS / 2, "float64"), ([IDS, IDS + 1], "got 300 at 4,"), ([], "no text"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            prepare_ids(tmp_path / "wrong", ids, vocab_size=300)
        assert not (tmp_path / "wrong").exists()
    with pytest.raises(UserError, match="exists already"):
        prepare_ids(tmp_path / "tokens", IDS, vocab_size=300)


def test_ids_in_a_prompt_are_numbers_and_are_written_as_such(tmp_path):
    tokenizer = IdTokenizer(300)
    assert tokenizer.numbers(" 12 0\n299").tolist() == [12, 0, 299]
    assert tokenizer.encode(tokenizer.decode(torch.tensor([12, 0, 299]))).tolist() == [12, 0, 299]
    assert "".join(map(tokenizer.decoder(), [12, 0])) == " 12 0"
    assert tokenizer.numbers(tokenizer.line_break).tolist() == [0]
    for wrong in ("300", "-1", "a", "1.5", "²"):
        with pytest.raises(UserError, match=f"token ids from 0 to 299, got '{wrong}'"):
            tokenizer.numbers(f"1 {wrong}")
    save_tokenizer(tokenizer, tmp_path)
    assert load_tokenizer(tmp_path).saved() == tokenizer.saved()
