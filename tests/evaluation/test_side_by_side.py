"""Parts of texts and of documents that are read side by side."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memformers.evaluation.side_by_side import AT_ONCE, streams_of_documents, streams_of_text


@settings(deadline=None)
@given(
    documents=st.lists(st.integers(1, 90), min_size=1, max_size=60),
    warm_up=st.integers(0, 30),
    least=st.integers(1, 9),
    tokens=st.integers(1, 500),
)
def test_each_stream_is_the_beginning_of_a_document_and_none_is_read_alone(documents, warm_up, least, tokens):
    streams = streams_of_documents(documents, warm_up, least, tokens)
    enough = [length for length in documents if length > warm_up + least]
    if len(enough) < 2:
        assert streams is None
        return
    begins = {sum(documents[:number]): length for number, length in enumerate(documents)}
    found = [streams.at[:length, b].tolist() for b, length in enumerate(streams.lengths)]
    assert len({places[0] for places in found}) == len(found) >= 2
    for places in found:
        assert places == list(range(places[0], places[0] + len(places)))
        assert warm_up + least < len(places) <= begins[places[0]]
    for group in streams.groups:
        lengths = streams.lengths[group]
        assert lengths[0] == lengths[1] == max(lengths)
        assert list(lengths) == sorted(lengths, reverse=True)
        assert len(lengths) <= AT_ONCE
    assert streams.there.sum(0).tolist() == list(streams.lengths)
    assert streams.there.sum() - len(found) * (1 + warm_up) <= max(tokens, len(found) * least)


@pytest.mark.parametrize(("n_tokens", "streams"), [(2 * 28, None), (2 * 28 + 1, 2), (3_000, 16)])
def test_a_text_is_cut_into_equal_parts_as_long_as_they_must_be(n_tokens, streams):
    found = streams_of_text(n_tokens, warm_up=21, least=7, tokens=800)
    assert (found and len(found.lengths)) == streams
