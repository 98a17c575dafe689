"""Streams of a plain text, of chunks and of documents, whose tokens are 0, 1, …"""

import hashlib
import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memformers.data.streams import (
    IGNORED,
    documents_reading,
    plain_reading,
    streams_and_places,
    training_segments,
)

DOCUMENTS = (30, 7, 1, 22, 18, 12)
KINDS = {"plain": {}, "chunks": {"chunk_len": 8}, "documents": {"documents": DOCUMENTS}}
SEEDS = st.integers(0, 2**63 - 1)


def epochs_of(n, B, S, count=2, **kind):
    """Inputs, targets and starts of the first epochs, ``[length, B]`` each."""
    segments = training_segments(torch.arange(n), B, S, **kind)
    some = itertools.takewhile(lambda segment: segment.epoch < count, segments)
    for _, group in itertools.groupby(some, lambda segment: segment.epoch):
        epoch = list(group)
        starts = [s.doc_starts for s in epoch] if kind.get("documents") else [torch.zeros(1)]
        yield torch.cat([s.inputs for s in epoch]), torch.cat([s.targets for s in epoch]), torch.cat(starts)


@given(n=st.integers(2, 200), B=st.integers(1, 5), S=st.integers(1, 30))
def test_streams_are_contiguous_and_targets_are_the_next_tokens(n, B, S):
    if n < B * S + 1:
        with pytest.raises(ValueError, match="too short"):
            next(training_segments(torch.arange(n), B, S))
        return
    first, second = epochs_of(n, B, S)
    for (inputs, targets, _), again in zip((first, second), (second, first), strict=True):
        assert torch.equal(inputs, again[0])
        assert torch.equal(targets, inputs + 1)
        assert (inputs.diff(dim=0) == 1).all()
        assert torch.equal(inputs[0, 1:], inputs[-1, :-1] + 1)  # a stream begins where the last ended
        assert n - 1 - inputs.numel() < B  # what is left out at the end


@given(n=st.integers(40, 200), B=st.integers(1, 4), chunk_len=st.integers(3, 30), seed=SEEDS)
def test_chunks_are_read_once_an_epoch_each_in_one_piece(n, B, chunk_len, seed):
    for inputs, targets, _ in epochs_of(n, B, 3, count=3, chunk_len=chunk_len, seed=seed):
        assert torch.equal(targets, inputs + 1)
        assert len(inputs.unique()) == inputs.numel()
        length = min(chunk_len, (n - 1) // B)
        pieces = inputs.T.reshape(-1, length)
        assert torch.equal(pieces, pieces[:, :1] + torch.arange(length))
        assert 0 <= n - 1 - inputs.numel() < length * (B + 1)


@given(
    documents=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    B=st.integers(1, 4), S=st.integers(1, 6), seed=SEEDS,
)  # fmt: skip
def test_an_epoch_has_each_document_once_in_one_piece_but_for_the_cuts_between_streams(documents, B, S, seed):
    n = sum(documents)
    if n < B * S + 1:
        return
    firsts = [sum(documents[:i]) for i in range(len(documents))]
    lasts = [first + length - 1 for first, length in zip(firsts, documents, strict=True)]
    for inputs, targets, doc_starts in epochs_of(n, B, S, documents=documents, seed=seed):
        assert inputs.shape == (n // B, B)
        joined = inputs.T.flatten()
        assert len(joined.unique()) == len(joined) > n - B  # fewer than B tokens fall off
        begins = torch.isin(joined, torch.tensor(firsts))
        at_stream = torch.arange(len(joined)) % (n // B) == 0
        assert torch.equal(doc_starts.T.flatten(), begins | at_stream)
        assert torch.equal(joined[1:][~begins[1:]], joined[:-1][~begins[1:]] + 1), "in one piece"
        ends = torch.isin(inputs, torch.tensor(lasts))
        assert torch.equal(targets, torch.where(ends, IGNORED, inputs + 1)), "no target crosses a boundary"


@pytest.mark.parametrize("kind", ["chunks", "documents"])
def test_the_order_is_the_seeds_and_new_in_each_epoch(kind):
    def epochs(seed):
        found = epochs_of(90, 2, 4, **KINDS[kind], seed=seed)
        return [inputs.flatten().tolist() for inputs, _, _ in found]

    first, second = epochs(1)
    assert first != second
    assert epochs(1) == [first, second]
    assert epochs(2)[0] != first


@pytest.mark.parametrize("kind", KINDS)
def test_streams_start_over_together_and_go_on_from_any_place(kind):
    def segments(*place):
        return training_segments(torch.arange(90), 2, 7, *place, **KINDS[kind], seed=3)

    whole = list(itertools.islice(segments(), 20))
    assert whole[-1].epoch > 1
    epochs = [-1, *(s.epoch for s in whole)]
    assert [s.starts_over for s in whole] == [a != b for a, b in itertools.pairwise(epochs)]
    for segment, following in itertools.pairwise(whole):
        resumed = next(segments((segment.epoch, segment.end)))
        for name, value in vars(following).items():
            torch.testing.assert_close(getattr(resumed, name), value, rtol=0, atol=0)
        assert (resumed.doc_starts is None) == (kind != "documents")


@pytest.mark.parametrize(
    ("n", "arguments", "kind", "message"),
    [(21, (2, 4, (0, 11)), {}, r"position .* 10, got 11\b"),
     (37, (16, 64), {}, r"37 tokens .* 16 streams .* 1,025; use a longer"),
     (21, (2, 4), {"documents": [12, 8]}, r"21 tokens in all, got 20\b")],
)  # fmt: skip
def test_what_cannot_be_read_is_an_error_that_says_what_to_do(n, arguments, kind, message):
    with pytest.raises(ValueError, match=message):
        next(training_segments(torch.arange(n), *arguments, **kind))
    for nothing in (lambda: plain_reading(1, 2, 7), lambda: documents_reading([1, 1], 2, 7)):
        with pytest.raises(ValueError, match=r"nothing to predict; use at least 2"):
            nothing()


@given(
    documents=st.lists(st.integers(1, 60), max_size=9), n=st.integers(2, 200), B=st.integers(1, 9),
    S=st.integers(1, 30), steps=st.none() | st.integers(1, 50),
)  # fmt: skip
def test_every_token_but_the_first_is_predicted_exactly_once(documents, n, B, S, steps):
    if max(documents, default=0) > 1:
        reading, n = documents_reading(documents, B, S), sum(documents)
        expected = [part[1:] for part in torch.arange(n).split(documents)]
    else:
        reading = plain_reading(n, B, S)
        expected = list(torch.arange(1, n).split(reading.lengths[0]))
    segments = list(reading.segments(torch.arange(n), steps))
    predicted = torch.tensor(reading.predicted(steps))
    found = reading.in_order([segment.targets for segment in segments])
    assert torch.equal(found, torch.cat([p[:k] for p, k in zip(expected, predicted, strict=False)]))
    assert torch.equal(reading.in_order([segment.inputs for segment in segments]), found - 1)
    assert sum(segment.predictions for segment in segments) == len(found) == predicted.sum()
    assert len(segments) == len(reading.steps[:steps])
    if steps is None:
        assert len(found) == sum(map(len, expected))
    for segment, (numbers, start) in zip(segments, reading.steps, strict=False):
        assert segment.inputs.shape == (segment.end - start, len(numbers))
        assert segment.starts_over == (start == 0)
        assert not segment.inputs[segment.targets == IGNORED].any()


def test_each_document_is_read_beside_others_of_like_length_and_part_after_part():
    lengths = [30, 1, 8, 53, 2, 9, 22, 7, 1]
    reading = documents_reading(lengths, 3, 7)
    assert [[lengths[n] for n in group] for group in reading.groups] == [[53, 30, 22], [9, 8, 7], [2]]
    assert reading.steps[0] == ([3, 0, 6], 0)
    assert reading.steps[4] == ([3, 0], 28), "those that have ended are left out"
    parts = documents_reading(lengths, 2, 7, ([0, 2, 3], [5, 1, 6]))
    assert parts.groups == ((3, 0), (2,), (6, 5))


def test_tokens_of_streams_are_numbered():
    stream, place = streams_and_places([2, 0, 3])
    assert (stream.tolist(), place.tolist()) == ([0, 0, 2, 2, 2], [0, 1, 0, 1, 2])


RECORDED = {
    "plain": ({}, "39974aee7f20f412187f7eb043a13bfa15d0cd84d0bb6c1f3f6c152de1e50a54"),
    "chunks": (
        {"chunk_len": 37, "seed": 11},
        "d38db16f24990b18fa9bbd49214561c81b8a92f97b54c62ac7fc6cb7108cb693",
    ),
    "documents": (
        {"documents": (300, 1, 77, 13, 190, 5, 211, 112, 100), "seed": 3},
        "1079ef0d0b81b0f22d56d5f47104fdeec21df7005f388ec9d5307fcca908bf5a",
    ),
}
"""Checksums of 40 segments, from when an epoch was copied as a whole."""


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("kind", ["in memory", "on the disk"])
def test_segments_are_always_the_same_ones_wherever_the_tokens_are(name, kind, tmp_path):
    settings, expected = RECORDED[name]
    tokens = torch.randint(0, 97, (1009,), generator=torch.Generator().manual_seed(5))
    if kind == "on the disk":
        np.save(tmp_path / "x.npy", tokens.numpy().astype(np.uint8))
        tokens = np.load(tmp_path / "x.npy", mmap_mode="r")
    digest = hashlib.sha256()
    for s in itertools.islice(training_segments(tokens, 5, 16, (1, 32), **settings), 40):
        assert s.inputs.dtype == s.targets.dtype == torch.int64
        for t in (s.inputs, s.targets, s.doc_starts):
            digest.update(b"none" if t is None else t.to(torch.int64).contiguous().numpy().tobytes())
        digest.update(repr((s.starts_over, s.end, s.epoch)).encode())
    assert digest.hexdigest() == expected


def test_a_long_text_on_the_disk_is_not_copied(tmp_path):
    """Of a hundred megabytes, not one; its tokens are holes of the file."""
    n = 100_000_000
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, (n,))
    tokens = np.load(tmp_path / "x.npy", mmap_mode="r")
    tracemalloc.start()
    for settings in ({"chunk_len": 4096}, {"documents": (n // 2, n // 2)}):
        next(training_segments(tokens, 8, 64, **settings))
    next(plain_reading(n, 8, 6400).segments(tokens))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000
