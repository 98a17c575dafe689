"""How whole texts and documents are read: all tokens but the first once, beside streams of like length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memformers.data.reading import documents_reading, plain_reading, streams_and_places
from memformers.data.streams import IGNORED


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


@pytest.mark.parametrize("reading", [lambda: plain_reading(1, 2, 7), lambda: documents_reading([1, 1], 2, 7)])
def test_a_text_in_which_nothing_can_be_predicted_is_an_error(reading):
    with pytest.raises(ValueError, match=r"nothing to predict; use at least 2"):
        reading()
