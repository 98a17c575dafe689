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

SMALL, USUAL = RecallStream(keys=5, values=3, set_probability=0.2), RecallStream()


@given(
    documents=st.just([]) | st.lists(st.integers(1, 20), min_size=1, max_size=9), n=st.integers(2, 120),
    chunk_len=st.just(0) | st.integers(3, 30), B=st.integers(1, 5), S=st.integers(1, 30),
    seed=st.integers(0, 2**63 - 1),
)  # fmt: skip
def test_an_epoch_has_each_piece_once_but_for_cuts_between_streams(documents, n, chunk_len, B, S, seed):
    n = sum(documents) or n
    assume(n > B * S)
    segments = training_segments(torch.arange(n), B, S, chunk_len=chunk_len, documents=documents, seed=seed)
    read, ends = list(takewhile(lambda s: s.epoch < 2, segments)), torch.tensor([*accumulate(documents), -1])
    for epoch in range(2):
        parts = [(s.inputs, s.targets, s.doc_starts) for s in read if s.epoch == epoch]
        inputs, targets = (torch.cat([part[i] for part in parts]) for i in range(2))
        assert torch.equal(targets, torch.where(torch.isin(inputs + 1, ends), IGNORED, inputs + 1))
        joined, place = inputs.T.flatten(), torch.arange(inputs.numel())  # stream after stream
        assert len(joined.unique()) == len(joined)
        if documents:
            begins = (joined == 0) | torch.isin(joined, ends)
            doc_starts = torch.cat([part[2] for part in parts]).T.flatten()
            assert torch.equal(doc_starts, begins | (place % (n // B) == 0))
            assert inputs.shape == (n // B, B)
        else:
            length = min(chunk_len or n, (n - 1) // B)
            begins = place % length == 0 if chunk_len else joined == 0
            assert 0 <= n - 1 - len(joined) < (length * (B + 1) if chunk_len else B)
        assert (begins[1:] | (joined[1:] == joined[:-1] + 1)).all()


@pytest.mark.parametrize("kind", [{}, {"chunk_len": 8}, {"documents": (30, 7, 1, 22, 18, 12)}])
def test_streams_start_over_together_in_a_new_order_and_go_on_from_any_place(kind):
    def segments(*place, seed=3):
        return training_segments(torch.arange(90), 2, 7, *place, **kind, seed=seed)

    read, other = list(islice(segments(), 20)), next(segments(seed=4))
    first, second = (next(s.inputs.tolist() for s in read if s.epoch == epoch) for epoch in (0, 1))
    assert (first == second, first == other.inputs.tolist()) == (not kind, not kind)
    assert [s.starts_over for s in read] == [True, *(a.epoch != b.epoch for a, b in pairwise(read))]
    for segment, following in pairwise(read):
        resumed = next(segments((segment.epoch, segment.end)))
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
def test_what_cannot_be_read_is_an_error_that_says_what_to_do(make, words):
    with pytest.raises(ValueError, match=words):
        make()


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
    segments, predicted = list(islice(reading.segments(torch.arange(n)), steps)), Counter()
    for segment, (numbers, start) in zip(segments, reading.steps[:steps], strict=True):
        predicted.update(dict(zip(numbers, (segment.targets != IGNORED).sum(0).tolist(), strict=True)))
        assert segment.inputs.shape == (segment.end - start, len(numbers))
        assert segment.starts_over == (start == 0)
        assert not segment.inputs[segment.targets == IGNORED].any()
    targets = reading.in_order([segment.targets for segment in segments])
    assert torch.equal(targets, torch.cat([part[: predicted[i]] for i, part in enumerate(expected)]))
    assert torch.equal(reading.in_order([segment.inputs for segment in segments]), targets - 1)
    assert steps or len(targets) == sum(map(len, expected))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [({}, "39974aee7f20f412"), ({"chunk_len": 37, "seed": 11}, "d38db16f24990b18"),
     ({"documents": (300, 1, 77, 13, 190, 5, 211, 112, 100), "seed": 3}, "1079ef0d0b81b0f2")],
)  # fmt: skip
def test_segments_are_always_the_same_ones_wherever_the_tokens_are(kind, expected, tmp_path):
    in_memory = torch.randint(0, 97, (1009,), generator=torch.Generator().manual_seed(5))
    np.save(tmp_path / "x.npy", in_memory.numpy().astype(np.uint8))
    for tokens in (in_memory, np.load(tmp_path / "x.npy", mmap_mode="r")):
        digest = hashlib.sha256()  # of 40 segments, as they were when an epoch was copied as a whole
        for s in islice(training_segments(tokens, 5, 16, (1, 32), **kind), 40):
            assert s.inputs.dtype == s.targets.dtype == torch.int64
            for t in (s.inputs, s.targets, s.doc_starts):
                digest.update(b"none" if t is None else t.to(torch.int64).contiguous().numpy().tobytes())
            digest.update(repr((s.starts_over, s.end, s.epoch)).encode())
        assert digest.hexdigest()[:16] == expected


def test_a_long_text_on_the_disk_is_not_copied(tmp_path):
    n = 100_000_000  # bytes, which are holes of the file
    tokens = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, (n,))
    tracemalloc.start()
    for kind in ({"chunk_len": 4096}, {"documents": (n // 2, n // 2)}):
        next(training_segments(tokens, 8, 64, **kind))
    next(plain_reading(n, 8, 6400).segments(tokens))
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()


def recalled(stream, length, segment_len, seed=0, **options):
    """Inputs, targets and distances, ``[length, 3]`` each."""
    parts = list(islice(recall_segments(stream, 3, segment_len, seed, **options), length // segment_len))
    for n, (segment, _) in enumerate(parts):
        assert (segment.starts_over, segment.end) == (n == 0, (n + 1) * segment_len)
    return torch.cat([torch.stack([s.inputs, s.targets, distances]) for s, distances in parts], 1)


@pytest.mark.parametrize(
    ("stream", "length", "longest"),
    [(SMALL, 400, None), (SMALL, 800, lambda start: 3 + start // 9), (USUAL, 5_000, None)],
)
def test_asks_have_the_value_last_set_its_distance_and_fair_shares_of_bands_and_keys(stream, length, longest):
    read = recalled(stream, length, length // 25, longest=longest)
    assert torch.equal(read, recalled(stream, length, length // 25, longest=longest))
    assert len({str(x.tolist()) for x in (*read[0].T, recalled(stream, length, 8, 1)[0, :, 0])}) == 4
    for column in read.unbind(2):
        value_of, set_at, asked, due = {}, {}, Counter(), Counter()
        for position, (token, target, distance) in enumerate(column.T.tolist()):
            assert stream.values <= token < stream.vocab_size
            key = token - stream.values * (1 + stream.keys)
            if key < 0:
                key, value_of[key] = divmod(token - stream.values, stream.values)
                set_at[key] = position
                assert (target, distance) == (IGNORED, NO_QUESTION)
                continue
            assert (target, distance) == (value_of[key], position - set_at[key])
            assert not longest or distance <= longest(position // 32 * 32)
            bands = {k: ((position - then) // NEAREST_BAND).bit_length() for k, then in set_at.items()}
            sizes = Counter(bands.values())
            asked.update([("key", key), ("band", bands[key])])
            for k, band in bands.items():
                due["key", k] += 1 / len(sizes) / sizes[band]
                due["band", band] += 1 / len(sizes) / sizes[band]
        assert longest or all(abs(asked[x] - share) <= 4 * share**0.5 for x, share in due.items())
        assert stream is SMALL or min(asked["band", band] for band in range(4)) > 500, "most tokens ask"
        assert column[2].max() > 20
    assert (USUAL.vocab_size, USUAL.chance) == (84, 0.25)
