"""The parts of the guide on token ids that copy what other libraries load, on data that these wrote.

A library that isn't installed is skipped: MosaicML streaming and its torchvision need their own environment.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from memformers import prepare_ids
from memformers.data.dataset import open_store
from tests.data.reading import dataset
from tests.docs.test_code_blocks import MIXED, ROOT, blocks, imported_loader

PIECES = [np.random.default_rng(n).integers(0, 200, 30 + n) for n in range(40)]


# Kinds of columns of MosaicML streaming, and how the guide reads them.
COLUMNS = [("ndarray:uint16", 'sample["tokens"]'), ("bytes", 'np.frombuffer(sample["tokens"], np.int64)')]


def code_in_guide(library):
    """The guide's blocks of code for a ``library``."""
    return [code for _, code in blocks(ROOT / MIXED) if imported_loader(code) == library]


def run_code(code):
    """Run a block as a user of the page does."""
    exec(compile(code, "block", "exec"), {"prepare_ids": prepare_ids, "np": np})


def piece_as_tensor(number):
    return torch.from_numpy(PIECES[number])


def check_documents(folder):
    """The tokens and documents in ``folder`` are PIECES."""
    splits = open_store(Path(folder)).splits.values()
    lengths = [length for split in splits for length in split.documents.tolist()]
    assert lengths == [len(piece) for piece in PIECES]
    assert np.array_equal(np.concatenate([split.tokens for split in splits]), np.concatenate(PIECES))


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("kind", "cell"), COLUMNS)
def test_documents_of_streaming_are_prepared(kind, cell):
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming is not installed")
    with streaming.MDSWriter(out="mds", columns={"tokens": kind}, size_limit=9_000) as writer:
        for piece in PIECES:
            writer.write({"tokens": piece.astype("u2") if kind != "bytes" else piece.tobytes()})
    (code,) = code_in_guide("streaming")
    assert cell in (ROOT / MIXED).read_text(encoding="utf-8")
    run_code(code.replace(COLUMNS[0][1], cell))
    check_documents("tokens/mds")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # of torch, in litdata
def test_documents_and_blocks_of_litdata_are_prepared(tmp_path, monkeypatch):
    litdata = pytest.importorskip("litdata", reason="litdata is not installed")
    monkeypatch.setenv("DATA_OPTIMIZER_CACHE_FOLDER", str(tmp_path / "cache"))
    inputs = list(range(len(PIECES)))
    for folder, loader in (("litdata", None), ("blocks", litdata.TokensLoader())):
        options = {"chunk_bytes": 1 << 20, "num_workers": 1, "item_loader": loader}
        litdata.optimize(piece_as_tensor, inputs, folder, **options)
    for code in code_in_guide("litdata"):
        run_code(code)
    check_documents("tokens/litdata")
    tokens = np.concatenate(PIECES)
    read = dataset("blocks.uint16.bin", vocab_size=200).splits.values()
    assert np.array_equal(np.concatenate([split.tokens for split in read]), tokens[: len(tokens) // 16 * 16])


def test_documents_of_webdataset_are_prepared():
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    with webdataset.ShardWriter("shards-%06d.tar", maxcount=15, verbose=0) as writer:
        for number, piece in enumerate(PIECES):
            writer.write({"__key__": f"{number:06d}", "tokens.npy": piece.astype("u2")})
    (code,) = code_in_guide("webdataset")
    run_code(code)
    check_documents("tokens/webdataset")
