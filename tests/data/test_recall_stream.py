from collections import Counter
from itertools import islice

import pytest
import torch

from memformers.data.recall_stream import NEAREST_BAND, NOTHING, RecallStream, recall_segments
from memformers.data.streams import IGNORED

SMALL = RecallStream(keys=5, values=3, set_probability=0.2)


def read(stream=SMALL, length=400, batch=3, segment_len=16, seed=0, **options):
    """Inputs, targets and distances ``[length, B]`` each."""
    count = -(-length // segment_len)
    parts = list(islice(recall_segments(stream, batch, segment_len, seed, **options), count))
    return (
        torch.cat([segment.inputs for segment, _ in parts]),
        torch.cat([segment.targets for segment, _ in parts]),
        torch.cat([distances for _, distances in parts]),
    )


def told_slowly(stream, inputs):
    """What is to be predicted and how far back it was set, by reading one stream ``[length]`` in order."""
    first_set, first_ask = stream.values, stream.values + stream.keys * stream.values
    value_of, set_at = {}, {}
    for position, token in enumerate(inputs.tolist()):
        assert first_set <= token < stream.vocab_size
        if token < first_ask:
            key, value = divmod(token - first_set, stream.values)
            value_of[key], set_at[key] = value, position
            yield IGNORED, NOTHING
        else:
            key = token - first_ask
            yield value_of[key], position - set_at[key]


@pytest.mark.parametrize("options", [{}, {"longest": lambda start: 3 + start // 4}])
def test_each_ask_has_the_value_last_set_and_its_distance(options):
    inputs, targets, distances = read(**options)
    for b in range(inputs.shape[1]):
        expected = list(told_slowly(SMALL, inputs[:, b]))
        assert list(zip(targets[:, b].tolist(), distances[:, b].tolist(), strict=True)) == expected


def test_bands_that_hold_a_key_are_asked_for_equally_often_and_their_keys_too():
    stream = RecallStream()
    asked, due, asked_key, due_key = (Counter() for _ in range(4))
    inputs, _, distances = (x[:, 0].tolist() for x in read(stream, 10_000, batch=1, segment_len=1_000))
    assert distances.count(NOTHING) < 0.15 * len(distances), "most tokens ask"
    set_at = {}
    for position, (token, distance) in enumerate(zip(inputs, distances, strict=True)):
        if distance == NOTHING:
            set_at[(token - stream.values) // stream.values] = position
            continue
        asked[band_of(distance)] += 1
        asked_key[token - stream.values * (1 + stream.keys)] += 1
        bands = {key: band_of(position - then) for key, then in set_at.items()}
        sizes = Counter(bands.values())
        for key, band in bands.items():
            due[band] += 1 / len(sizes) / sizes[band]
            due_key[key] += 1 / len(sizes) / sizes[band]
    for came, expected in ((asked, due), (asked_key, due_key)):
        assert all(abs(came[x] - expected[x]) <= 4 * expected[x] ** 0.5 for x in expected)
    assert min(asked[band] for band in range(4)) > 1_000


def band_of(distance):
    return 0 if distance < NEAREST_BAND else 1 + (distance // NEAREST_BAND).bit_length() - 1


def test_the_same_seed_gives_the_same_stream_and_another_one_another():
    assert all(torch.equal(a, b) for a, b in zip(read(seed=1), read(seed=1), strict=True))
    assert not torch.equal(read(seed=1)[0], read(seed=2)[0])
    streams = read(seed=1)[0]
    assert not torch.equal(streams[:, 0], streams[:, 1])


def test_nothing_older_than_the_longest_distance_is_asked_for():
    _, _, distances = read(length=800, segment_len=10, longest=lambda start: 20 if start < 400 else 1_000)
    assert 15 < distances[:400].max() <= 20
    assert distances[400:].max() > 20


def test_only_the_first_segment_starts_over():
    parts = [segment for segment, _ in islice(recall_segments(SMALL, 2, 8, 0), 3)]
    assert [(part.starts_over, part.end) for part in parts] == [(True, 8), (False, 16), (False, 24)]


def test_the_vocabulary_holds_values_pairs_and_keys():
    assert (RecallStream().vocab_size, RecallStream().chance) == (84, 0.25)


@pytest.mark.parametrize(("setting", "value"), [("keys", 0), ("values", 1), ("set_probability", 0.0)])
def test_a_stream_that_can_not_be_is_an_error(setting, value):
    with pytest.raises(ValueError, match=f"{setting}={value}"):
        RecallStream(**{setting: value})
    with pytest.raises(ValueError, match=r"longest .* 0"):
        next(recall_segments(SMALL, 2, 8, 0, longest=lambda start: 0))
