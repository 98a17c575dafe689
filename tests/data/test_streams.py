"""Streams of a text, of chunks and of documents, whose tokens are 0, 1, …; and those of the recall task."""

import hashlib
import tracemalloc
from collections import Counter
from itertools import accumulate, islice, pairwise, takewhile

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from memformers.data.recall_stream import NEAREST_BAND, NO_QUESTION, RecallStream, recall_segments
from memformers.data.streams import IGNORED, documents_reading, plain_reading, training_segments

SMALL = RecallStream(keys=5, values=3, set_probability=0.2)
DEFAULT = RecallStream()


@given(
    documents=st.just([]) | st.lists(st.integers(1, 20), min_size=1, max_size=9), n=st.integers(2, 120),
    chunk_len=st.just(0) | st.integers(3, 30), B=st.integers(1, 5), S=st.integers(1, 30),
    seed=st.integers(0, 2**63 - 1),
)  # fmt: skip
def test_an_epoch_has_each_piece_once_but_for_cuts(documents, n, chunk_len, B, S, seed):
    """A stream may cut a piece where the next one begins."""
    n = sum(documents) or n
    assume(n > B * S)
    segments = training_segments(torch.arange(n), B, S, chunk_len=chunk_len, documents=documents, seed=seed)
    of_two_epochs = list(takewhile(lambda segment: segment.epoch < 2, segments))
    ends = torch.tensor([*accumulate(documents), -1])
    for epoch in range(2):
        parts = [segment for segment in of_two_epochs if segment.epoch == epoch]
        inputs = torch.cat([part.inputs for part in parts])  # [T, B]
        targets = torch.cat([part.targets for part in parts])
        assert torch.equal(targets, torch.where(torch.isin(inputs + 1, ends), IGNORED, inputs + 1))

        # Stream after stream, nothing is read twice, and all that doesn't begin a piece follows.
        joined = inputs.T.flatten()
        position = torch.arange(inputs.numel())
        assert len(joined.unique()) == len(joined)
        if documents:
            begins = (joined == 0) | torch.isin(joined, ends)
            doc_starts = torch.cat([part.doc_starts for part in parts]).T.flatten()
            assert torch.equal(doc_starts, begins | (position % (n // B) == 0))
            assert inputs.shape == (n // B, B)
        elif chunk_len:
            length = min(chunk_len, (n - 1) // B)
            begins = position % length == 0
            assert 0 <= n - 1 - len(joined) < length * (B + 1)
        else:
            begins = joined == 0
            assert 0 <= n - 1 - len(joined) < B
        assert (begins[1:] | (joined[1:] == joined[:-1] + 1)).all()


KINDS = pytest.mark.parametrize("kind", [{}, {"chunk_len": 8}, {"documents": (30, 7, 1, 22, 18, 12)}])


def segments_from(*position, seed=3, **kind):
    """Segments from a ``position``, an epoch and a place in it."""
    return training_segments(torch.arange(90), 2, 7, *position, **kind, seed=seed)


@KINDS
def test_streams_start_over_together_in_a_new_order(kind):
    """Of each seed; but a text in one piece has one order."""
    segments = list(islice(segments_from(**kind), 20))
    starts_over = [segments[0].starts_over]
    for segment, following in pairwise(segments):
        assert following.starts_over == (segment.epoch != following.epoch)
        starts_over.append(following.starts_over)
    assert starts_over[0]

    # The first segments of the first two epochs.
    first = segments[0].inputs
    second = next(segment.inputs for segment in segments if segment.epoch == 1)
    of_other_seed = next(segments_from(seed=4, **kind)).inputs
    has_one_order = not kind
    assert torch.equal(first, second) == has_one_order
    assert torch.equal(first, of_other_seed) == has_one_order


@KINDS
def test_streams_continue_from_any_position(kind):
    for segment, following in pairwise(islice(segments_from(**kind), 20)):
        resumed = next(segments_from((segment.epoch, segment.end), **kind))
        for name, value in vars(following).items():
            torch.testing.assert_close(getattr(resumed, name), value, rtol=0, atol=0)
        assert (resumed.doc_starts is None) == ("documents" not in kind)


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda: next(training_segments(torch.arange(21), 2, 4, (0, 11))), r"position .* 10, got 11\b"),
     (lambda: next(training_segments(torch.arange(99), 9, 11)), "99 tokens .* 9 streams .* 100; use a l"),
     (lambda: next(training_segments(torch.arange(21), 2, 4, documents=[20])), r"21 tokens in all, got 20\b"),
     (lambda: plain_reading(1, 2, 7), "use at least 2"), (lambda: documents_reading([1], 2, 7), "at least 2"),
     *[(lambda name=name, wrong=wrong: RecallStream(**{name: wrong}), f"{name}={wrong}")
       for name, wrong in (("keys", 0), ("values", 1), ("set_probability", 0.0))],
     (lambda: next(recall_segments(SMALL, 2, 8, 0, longest=lambda start: 0)), r"longest .* 0")],
)  # fmt: skip
def test_what_cant_be_read_is_an_error_that_says_what_to_do(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@given(
    documents=st.lists(st.integers(1, 60), max_size=9), n=st.integers(2, 200), B=st.integers(1, 9),
    S=st.integers(1, 30), steps=st.none() | st.integers(1, 50),
)  # fmt: skip
def test_every_token_but_the_first_is_predicted_exactly_once(documents, n, B, S, steps):
    if max(documents, default=0) > 1:
        n = sum(documents)
        reading = documents_reading(documents, B, S)
        expected = [part[1:] for part in torch.arange(n).split(documents)]
    else:
        reading = plain_reading(n, B, S)
        expected = list(torch.arange(1, n).split(reading.lengths[0]))
    segments = list(islice(reading.segments(torch.arange(n)), steps))
    n_predicted = Counter()
    for segment, (numbers, start) in zip(segments, reading.steps[:steps], strict=True):
        in_segment = (segment.targets != IGNORED).sum(0).tolist()
        n_predicted.update(dict(zip(numbers, in_segment, strict=True)))
        assert segment.inputs.shape == (segment.end - start, len(numbers))
        assert segment.starts_over == (start == 0)
        assert not segment.inputs[segment.targets == IGNORED].any()
    targets = reading.in_order([segment.targets for segment in segments])
    predicted = [part[: n_predicted[i]] for i, part in enumerate(expected)]
    assert torch.equal(targets, torch.cat(predicted))
    assert torch.equal(reading.in_order([segment.inputs for segment in segments]), targets - 1)
    assert steps or len(targets) == sum(map(len, expected))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [({}, "39974aee7f20f412"), ({"chunk_len": 37, "seed": 11}, "d38db16f24990b18"),
     ({"documents": (300, 1, 77, 13, 190, 5, 211, 112, 100), "seed": 3}, "1079ef0d0b81b0f2")],
)  # fmt: skip
def test_segments_are_always_the_same_in_memory_and_on_the_disk(kind, expected, tmp_path):
    in_memory = torch.randint(0, 97, (1009,), generator=torch.Generator().manual_seed(5))
    np.save(tmp_path / "x.npy", in_memory.numpy().astype(np.uint8))
    for tokens in (in_memory, np.load(tmp_path / "x.npy", mmap_mode="r")):
        # The digest of 40 segments is from when an epoch was copied as a whole.
        digest = hashlib.sha256()
        for segment in islice(training_segments(tokens, 5, 16, (1, 32), **kind), 40):
            assert segment.inputs.dtype == segment.targets.dtype == torch.int64
            for part in (segment.inputs, segment.targets, segment.doc_starts):
                if part is None:
                    digest.update(b"none")
                else:
                    digest.update(part.to(torch.int64).contiguous().numpy().tobytes())
            digest.update(repr((segment.starts_over, segment.end, segment.epoch)).encode())
        assert digest.hexdigest()[:16] == expected


def test_a_long_text_on_the_disk_is_not_copied(tmp_path):
    n = 100_000_000  # bytes, which are holes of the file
    tokens = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, (n,))
    tracemalloc.start()
    for kind in ({"chunk_len": 4096}, {"documents": (n // 2, n // 2)}):
        next(training_segments(tokens, 8, 64, **kind))
    next(plain_reading(n, 8, 6400).segments(tokens))
    _, peak = tracemalloc.get_traced_memory()
    assert peak < 4_000_000
    tracemalloc.stop()


def read_recall(stream, length, segment_len, seed=0, **options):
    """Inputs, targets and distances, ``[length, 3]`` each."""
    segments = recall_segments(stream, 3, segment_len, seed, **options)
    parts = []
    for number, (segment, distances) in enumerate(islice(segments, length // segment_len)):
        assert segment.starts_over == (number == 0)
        assert segment.end == (number + 1) * segment_len
        parts.append(torch.stack([segment.inputs, segment.targets, distances]))
    return torch.cat(parts, 1)


def test_the_default_stream_has_four_values_of_sixteen_keys():
    assert DEFAULT.vocab_size == 84
    assert DEFAULT.chance == 0.25


def test_streams_of_recall_are_the_same_for_a_seed_and_all_differ():
    streams = read_recall(SMALL, 400, 16)
    assert torch.equal(streams, read_recall(SMALL, 400, 16))
    of_other_seed = read_recall(SMALL, 400, 8, seed=1)
    inputs = [*streams[0].T, *of_other_seed[0].T]
    assert len({str(stream.tolist()) for stream in inputs}) == 6


RECALLED = pytest.mark.parametrize(
    ("stream", "length", "longest"),
    [(SMALL, 400, None), (SMALL, 800, lambda start: 3 + start // 9), (DEFAULT, 5_000, None)],
)


def list_tokens(stream, column):
    """For each token of a stream's ``column [3, length]``: its position, its key, its value if it sets one,
    its target and its distance."""
    for position, (token, target, distance) in enumerate(column.T.tolist()):
        assert stream.values <= token < stream.vocab_size
        key = token - stream.values * (1 + stream.keys)
        value = None
        if key < 0:
            key, value = divmod(token - stream.values, stream.values)
        yield position, key, value, target, distance


@RECALLED
def test_an_ask_has_the_value_last_set_and_its_distance(stream, length, longest):
    for column in read_recall(stream, length, length // 25, longest=longest).unbind(2):
        last_value = {}
        last_set = {}
        for position, key, value, target, distance in list_tokens(stream, column):
            if value is not None:
                last_value[key] = value
                last_set[key] = position
                assert (target, distance) == (IGNORED, NO_QUESTION)
                continue
            assert (target, distance) == (last_value[key], position - last_set[key])
            assert not longest or distance <= longest(position // 32 * 32)
        assert column[2].max() > 20


@pytest.mark.parametrize(("stream", "length"), [(SMALL, 400), (DEFAULT, 5_000)])
def test_bands_of_distances_and_keys_are_asked_in_fair_shares(stream, length):
    """Each band that has keys is as likely, and in a band each key."""
    for column in read_recall(stream, length, length // 25).unbind(2):
        last_set = {}
        asked = Counter()
        expected = Counter()
        for position, key, value, _, _ in list_tokens(stream, column):
            if value is not None:
                last_set[key] = position
                continue
            band_of = {k: ((position - p) // NEAREST_BAND).bit_length() for k, p in last_set.items()}
            asked.update([("key", key), ("band", band_of[key])])
            sizes = Counter(band_of.values())
            for other_key, band in band_of.items():
                share = 1 / len(sizes) / sizes[band]
                expected["key", other_key] += share
                expected["band", band] += share
        for group, share in expected.items():
            assert abs(asked[group] - share) <= 4 * share**0.5
        if stream is DEFAULT:
            assert min(asked["band", band] for band in range(4)) > 500, "most tokens ask"
