import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memformers.data.streams import IGNORED, evaluation_segments, stream_length, training_segments


def one_pass(segments):
    """All segments until the streams start over: inputs and targets ``[length, B]``."""
    first = next(segments)
    rest = itertools.takewhile(lambda segment: not segment.starts_over, segments)
    inputs, targets = zip(*[(s.inputs, s.targets) for s in [first, *rest]], strict=True)
    return torch.cat(inputs), torch.cat(targets)


@given(n=st.integers(2, 200), B=st.integers(1, 9), S=st.integers(1, 30))
def test_evaluation_predicts_every_token_but_the_first_exactly_once(n, B, S):
    tokens = torch.arange(n)
    inputs, targets = one_pass(evaluation_segments(tokens, B, S))
    real = targets != IGNORED
    assert torch.equal(targets.T[real.T], tokens[1:])
    assert torch.equal(inputs.T[real.T], tokens[:-1])
    assert len(inputs) == stream_length(n, B)


@given(n=st.integers(2, 200), B=st.integers(1, 5), S=st.integers(1, 30))
def test_training_streams_are_contiguous_and_targets_are_the_next_tokens(n, B, S):
    if n < B * S + 1:
        with pytest.raises(ValueError, match="too short"):
            next(training_segments(torch.arange(n), B, S))
        return
    inputs, targets = one_pass(training_segments(torch.arange(n), B, S))
    assert torch.equal(targets, inputs + 1)
    assert (inputs.diff(dim=0) == 1).all()
    assert torch.equal(inputs[0, 1:], inputs[-1, :-1] + 1)  # a stream begins where the last ended
    assert n - 1 - inputs.numel() < B  # what is left out at the end


def test_streams_start_over_together_after_the_last_segment():
    segments = list(itertools.islice(training_segments(torch.arange(21), 2, 4), 7))
    assert [s.starts_over for s in segments] == [True, False, False, True, False, False, True]
    assert [len(s.inputs) for s in segments[:3]] == [4, 4, 2]
    assert torch.equal(segments[0].inputs, segments[3].inputs)


@given(n=st.integers(9, 60), B=st.integers(1, 3), S=st.integers(1, 4), skipped=st.integers(0, 70))
def test_streams_go_on_from_where_a_segment_ended(n, B, S, skipped):
    whole = training_segments(torch.arange(max(n, B * S + 1)), B, S)
    position = [0, *(next(whole).end for _ in range(skipped))][-1]
    resumed = training_segments(torch.arange(max(n, B * S + 1)), B, S, (0, position))
    for expected, came in itertools.islice(zip(whole, resumed, strict=False), 30):
        assert torch.equal(came.inputs, expected.inputs)
        assert torch.equal(came.targets, expected.targets)
        assert (came.starts_over, came.end) == (expected.starts_over, expected.end)


def test_a_position_outside_of_the_streams_is_an_error():
    with pytest.raises(ValueError, match="position=11 must be from 0 to 10, the tokens of a stream"):
        next(training_segments(torch.arange(21), 2, 4, (0, 11)))


def test_a_short_text_is_an_error_that_says_what_to_do():
    with pytest.raises(ValueError, match=r"37 tokens is too short for 16 streams .* 1,025; use a longer"):
        next(training_segments(torch.arange(37), 16, 64))
    with pytest.raises(ValueError, match="1 tokens has nothing to predict"):
        stream_length(1, 2)


@given(
    n=st.integers(40, 200), B=st.integers(1, 4), chunk_len=st.integers(3, 30), seed=st.integers(0, 2**63 - 1)
)
def test_chunks_are_read_once_an_epoch_each_in_one_piece(n, B, chunk_len, seed):
    S = 3
    segments = training_segments(torch.arange(n), B, S, chunk_len=chunk_len, seed=seed)
    epochs = [
        list(g)
        for _, g in itertools.takewhile(lambda e: e[0] < 3, itertools.groupby(segments, lambda s: s.epoch))
    ]
    for epoch in epochs:
        inputs = torch.cat([s.inputs for s in epoch])  # [length of a stream, B]
        targets = torch.cat([s.targets for s in epoch])
        assert torch.equal(targets, inputs + 1)
        assert len(inputs.unique()) == inputs.numel()
        length = min(chunk_len, (n - 1) // B)
        pieces = inputs.T.reshape(-1, length)
        assert torch.equal(pieces, pieces[:, :1] + torch.arange(length))
        left = n - 1 - inputs.numel()
        assert 0 <= left < length * (B + 1)


def test_the_order_of_chunks_is_the_seeds_and_new_in_each_epoch():
    def epochs(seed):
        segments = training_segments(torch.arange(4_001), 2, 10, chunk_len=100, seed=seed)
        both = itertools.takewhile(lambda s: s.epoch < 2, segments)
        return [
            torch.cat([s.inputs for s in g]).flatten().tolist()
            for _, g in itertools.groupby(both, lambda s: s.epoch)
        ]

    first, second = epochs(1)
    assert first != second
    assert epochs(1) == [first, second]
    assert epochs(2)[0] != first


def test_streams_of_chunks_go_on_from_any_place():
    whole = list(itertools.islice(training_segments(torch.arange(500), 2, 7, chunk_len=20, seed=3), 60))
    assert whole[-1].epoch > 0
    for i, segment in enumerate(whole[:-1]):
        place = (segment.epoch, segment.end)
        resumed = next(training_segments(torch.arange(500), 2, 7, place, chunk_len=20, seed=3))
        assert torch.equal(resumed.inputs, whole[i + 1].inputs)
        assert (resumed.epoch, resumed.end, resumed.starts_over) == (
            whole[i + 1].epoch, whole[i + 1].end, whole[i + 1].starts_over,
        )  # fmt: skip
