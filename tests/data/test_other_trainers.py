"""Token ids as other trainers write them, with the documents that they list, or one line on what is wrong."""

import struct

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from memformers import prepare_ids
from memformers.data.corpus_reader import read_prompt
from memformers.data.tokenizer import IdTokenizer
from tests.builders import SMALL_SIZES
from tests.data.reading import dataset, refused, saved, write
from tests.processes import run

N_IDS = 50_000
SMALL = np.random.default_rng(0).integers(1, N_IDS, 4000)
LARGE = np.random.default_rng(1).integers(1, 70_000, 4000)
DOCUMENTS = np.split(SMALL, [1000, 1060, 3500])
LENGTHS = [1000, 60, 2440, 500]


def tokens_of(data):
    """All ids of a dataset, in the order in which they were read."""
    return np.concatenate([split.tokens for split in data.splits.values()])


def lengths_of(data):
    return [length for split in data.splits.values() for length in split.documents.tolist()]


def llm_c_file(ids, magic=20240520, version=1, count=None, dtype="<u2"):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    return header.tobytes() + ids.astype(dtype).tobytes()


def megatron_index(documents, code=8, width=2, bounds=None, version=1):
    """An index with a sequence for each document, as Megatron's ``preprocess_data.py`` writes it."""
    sizes = np.array([len(document) for document in documents], "<i4")
    pointers = width * np.concatenate([[0], sizes.cumsum()[:-1]])
    bounds = range(len(sizes) + 1) if bounds is None else bounds
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, len(sizes), len(bounds))
    return header + sizes.tobytes() + pointers.astype("<i8").tobytes() + np.array(bounds, "<i8").tobytes()


def datatrove_index(lengths):
    return np.cumsum(lengths).astype("<u8").tobytes()


SHORT = SMALL.astype("<u2").tobytes()


@pytest.mark.parametrize(
    ("files", "ids", "lengths"),
    [
        ({"x.bin": LARGE.astype("<u4").tobytes()}, LARGE, []),
        ({"x.uint64.bin": SMALL.astype("<u8").tobytes()}, SMALL, []),
        ({"x.bin": llm_c_file(SMALL)}, SMALL, []),
        ({"x.bin": llm_c_file(LARGE, 20240801, 7, dtype="<u4")}, LARGE, []),
        ({"x.bin": SHORT, "x.idx": megatron_index(DOCUMENTS)}, SMALL, LENGTHS),
        ({"x.bin": SHORT, "x.idx": megatron_index(DOCUMENTS, bounds=[0, 2, 2, 4])}, SMALL, [1060, 2940]),
        ({"x.bin": LARGE.astype("<i4").tobytes(), "x.idx": megatron_index([LARGE], 4, 4)}, LARGE, None),
        ({"x.ds": SHORT, "x.ds.index": datatrove_index(LENGTHS), "x.ds.metadata": b"gpt2|2\n4000\n4.00 kT"},
         SMALL, LENGTHS),
        ({"x.ds": LARGE.astype("<u4").tobytes(), "x.ds.index": datatrove_index(LENGTHS)}, LARGE, LENGTHS),
        ({"x.ds": SHORT}, SMALL, []),
        ({"x.bin": SHORT, "x_documents.npy": saved(np.cumsum([0, *LENGTHS]))}, SMALL, LENGTHS),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_folder", [False, True])
def test_ids_of_another_trainer_are_its_tokens_and_documents(files, ids, lengths, is_folder, tmp_path):
    write(tmp_path / "data", files)
    path = tmp_path / "data" if is_folder else tmp_path / "data" / next(iter(files))
    data = dataset(path, vocab_size=N_IDS if ids is SMALL else 70_000)
    assert np.array_equal(tokens_of(data), ids)
    if lengths:
        assert data.info.documents == len(lengths)
        assert sum(lengths_of(data)) == len(ids)
        # The last documents, or a part of the last one, are held out.
        assert lengths_of(data)[: len(lengths) - 1] == lengths[:-1]


def test_ids_have_the_width_that_the_tokenizer_needs(tmp_path):
    """As with --vocab-size."""
    words = {f"w{number}": number for number in range(70_000)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, {"x.bin": LARGE.astype("<u4").tobytes()})
    assert np.array_equal(
        tokens_of(dataset(tmp_path / "x.bin", tokenizer=f"{tmp_path}/tokenizer.json")), LARGE
    )


def test_shards_of_a_split_are_documents_in_order(tmp_path):
    shards = dict(
        zip(
            ("fine_train_000001.bin", "fine_train_000002.bin", "fine_val_000000.bin"),
            DOCUMENTS[1:],
            strict=True,
        )
    )
    write(tmp_path, {name: llm_c_file(ids) for name, ids in shards.items()})
    data = dataset(tmp_path, vocab_size=N_IDS)
    assert np.array_equal(data.train.tokens, np.concatenate(DOCUMENTS[1:3]))
    assert np.array_equal(data.validation.tokens, DOCUMENTS[3])
    assert data.train.documents.tolist() == [60, 2440]


def test_a_document_ends_with_the_id_that_document_end_names(tmp_path):
    ids = np.where(SMALL == 7, 8, SMALL)
    ids[[99, 2999, 3000]] = 7
    write(tmp_path, {"x.bin": ids.astype("<u2").tobytes()})
    data = dataset(tmp_path / "x.bin", vocab_size=N_IDS, document_end=7)
    assert np.array_equal(tokens_of(data), ids)
    assert lengths_of(data)[:3] == [100, 2900, 1]
    assert sum(lengths_of(data)) == 4000


def test_the_command_takes_document_end(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, {"x.bin": np.tile(np.arange(10), 40).astype("<u2").tobytes()}))
    options = ("--vocab-size", "10", "--document-end", "9", "--out", "tokens")
    assert "36 documents" in run("prepare", "x.bin", *options).out


@pytest.mark.usefixtures("quick_runs")
def test_evaluate_and_generate_read_the_ids_that_train_reads(tmp_path, monkeypatch):
    ids = np.tile(np.arange(10), 40)
    monkeypatch.chdir(write(tmp_path, {"x.bin": ids.astype("<u2").tobytes(), "x.npy": saved(ids)}))
    trained = run(
        "train", "--data", "x.bin", "--vocab-size", 10, "--document-end", 9, *SMALL_SIZES, "--out", "run"
    )
    assert trained.code == 0, trained.err
    evaluate = ("evaluate", "--checkpoint", "run", "--document-end", 9)
    assert ", in 40 documents" in run(*evaluate, "--text", "x.bin").out
    assert "document_end are for the file of --text; name it" in run(*evaluate).err
    generate = ("generate", "--checkpoint", "run", "--temperature", 0, "--tokens", 5)
    named = run(*generate, "--prompt", " ".join(map(str, ids)))
    for name in ("x.bin", "x.npy"):
        read = run(*generate, "--prompt-file", name, "--prompt", "")
        assert read.code == 0, read.err
        assert named.out.endswith(read.out)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"x.bin": np.array([7, 700], "<u2").tobytes()}, r"x\.bin to be ids from 0 to 9, got 7 to 700"),
        ({"x.jsonl": '{"text": "a"}'}, r"x\.jsonl holds documents, and a prompt is one text"),
        ({"x.parquet": b"PAR1"}, r"x\.parquet holds documents, and a prompt is one text"),
    ],
)
def test_a_prompt_that_is_not_one_text_of_the_model_is_refused(files, words, tmp_path):
    with refused(words):
        read_prompt(str(write(tmp_path, files) / next(iter(files))), IdTokenizer(10))


def test_the_bytes_of_a_file_of_ids_are_called_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, {"x.bin": SHORT}))
    assert "tokens/x.bin-byte" in run("prepare", "x.bin", "--tokenizer", "byte").out
    ended = run("prepare", "x.bin", "--tokenizer", "byte", "--vocab-size", "9")
    assert "vocab_size=9 applies to" in ended.err


def test_documents_of_a_generator_are_prepared_one_by_one(tmp_path):
    alive = []

    def documents():
        for document in DOCUMENTS:
            alive.append(len(document))
            yield document.tolist()

    data = dataset(prepare_ids(tmp_path / "tokens", documents(), vocab_size=N_IDS))
    assert np.array_equal(tokens_of(data), SMALL)
    assert alive == LENGTHS
    assert data.info.documents == 4


def test_splits_of_generators_are_splits(tmp_path):
    splits = {"train": iter(DOCUMENTS[:3]), "validation": iter(DOCUMENTS[3:])}
    data = dataset(prepare_ids(tmp_path / "tokens", splits, vocab_size=N_IDS))
    assert data.train.documents.tolist() == LENGTHS[:3]
    assert data.validation.documents.tolist() == LENGTHS[3:]


def test_a_generator_that_fails_leaves_nothing(tmp_path):
    def documents():
        yield SMALL
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        prepare_ids(tmp_path / "tokens", documents(), vocab_size=N_IDS)
    assert [path.name for path in tmp_path.iterdir()] == [".preparing.lock"]


INT64 = SMALL.astype("<i8").tobytes()


@pytest.mark.parametrize(
    ("files", "spec", "words"),
    [
        ({"x.bin": INT64}, {}, r"three of four ids are 0, so they have eight bytes; call it x\.uint64\.bin"),
        ({"x.uint32.bin": INT64}, {}, r"every second id is 0, .* eight bytes; call it x\.uint64\.bin"),
        ({"x.bin": INT64}, {"vocab_size": 70_000}, r"every second id is 0, .* eight bytes"),
        ({"x.uint16.bin": SMALL.astype("<u4").tobytes()}, {}, r"four bytes; call it x\.uint32\.bin"),
        ({"x.bin": SMALL.astype(">u4").tobytes()}, {}, "big-endian order; write them in little-endian"),
        ({"x.npy": SHORT}, {}, r"no header of NumPy's; .* call it x\.uint16\.bin or x\.uint32\.bin"),
        ({"x.npy": b""}, {}, "no header of NumPy's"),
        ({"x.bin": llm_c_file(SMALL, count=5000)}, {}, "its header says 5,000 ids of 2 bytes, got 8,000"),
        ({"x.bin": SHORT, "x.idx": b"abc"}, {}, r"x\.idx isn't an index of Megatron's or RWKV's"),
        ({"x.bin": SHORT, "x.idx": megatron_index(DOCUMENTS)[:-1]}, {}, r"x\.idx should have .* bytes, got"),
        ({"x.bin": SHORT, "x.idx": megatron_index(DOCUMENTS[:3])}, {}, "lists 7,000 bytes, got 8,000"),
        ({"x.bin": SHORT, "x.idx": megatron_index(DOCUMENTS, code=6)}, {}, "version 1 and type 6"),
        ({"x.bin": SHORT, "x.idx": megatron_index(DOCUMENTS, version=2)}, {}, "version 2 and type 8"),
        ({"x.bin": SHORT, "x.idx": megatron_index(DOCUMENTS, bounds=[0, 3])}, {}, "don't rise from 0 to 4"),
        ({"x.bin": SHORT, "x.idx": megatron_index(DOCUMENTS, width=4)}, {}, "don't follow each other"),
        ({"x.bin": SHORT, "x.idx": megatron_index(DOCUMENTS), "x_documents.npy": saved([0, 4000])}, {},
         "x_documents.npy and .*x.idx list documents; keep one"),
        ({"x.ds": SHORT, "x.ds.index": datatrove_index([4001])}, {}, "ends at 4,001 tokens, .* 8,000 bytes"),
        ({"x.ds": SHORT, "x.ds.index": b"abc"}, {}, "expected the ends of documents, of 8 bytes each"),
        ({"x.bin": SHORT}, {"document_end": 49_999_999}, r"document_end=49999999 doesn't occur in x\.bin"),
        ({"x.bin": SHORT, "x.idx": megatron_index(DOCUMENTS)}, {"document_end": 7}, "in a file beside it"),
        ({"x.txt": b"a text"}, {"document_end": 7}, r"applies to token ids, and x\.txt is a text"),
        ({"x.bin": SHORT}, {"text_field": "body"}, r"names a field .* x\.bin is neither"),
        ({"x.txt": b"a text"}, {"text_field": "body"}, r"names a field .* x\.txt is neither"),
    ],
)  # fmt: skip
def test_ids_that_are_not_what_they_seem_are_refused(files, spec, words, tmp_path):
    with refused(words):
        dataset(write(tmp_path, files) / next(iter(files)), **{"vocab_size": N_IDS, **spec})


def test_the_name_of_a_pair_of_files_or_of_its_index_is_one_line(tmp_path):
    write(tmp_path, {"x.bin": SHORT, "x.idx": megatron_index(DOCUMENTS)})
    with refused(r"doesn't exist; name .*x\.bin"):
        dataset(tmp_path / "x")
    with refused("only describes token ids in another file"):
        dataset(tmp_path / "x.idx")


@pytest.mark.parametrize(
    ("files", "library"),
    [
        ({"index.json": "{}", "shard.00000.mds": b"\0\1"}, "MosaicML streaming"),
        ({"train/index.json": "{}", "train/shard.00000.mds.zstd": b"\0\1"}, "MosaicML streaming"),
        ({"index.json": "{}", "chunk-0-0.bin": b"\0\1"}, "litdata"),
        ({"zarr.json": "{}", "c/0": b"\0\1"}, "Zarr"),
        ({"README.md": "some words", "a.tfrecord": bytes(400)}, "TFRecord"),
    ],
)  # fmt: skip
def test_a_folder_of_another_library_is_named(files, library, tmp_path):
    with refused(f"{library}.*pass the token ids to prepare_ids"):
        dataset(write(tmp_path, files))
