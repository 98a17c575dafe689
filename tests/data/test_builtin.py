import hashlib

import pytest

from memformers.data.builtin import FARTHEST, NEAREST, write_play


@pytest.fixture(scope="module")
def play():
    return write_play(400_000, seed=0)


def test_the_same_seed_gives_the_same_play_everywhere():
    text, repeats = write_play(50_000, seed=0)
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "14ba9181b177dc209deb191643e59c3729fe1bffa0241679e61f68a277c84fdf"
    )
    assert len(repeats) == 595
    assert write_play(50_000, seed=1)[0] != text


@pytest.mark.parametrize("length", [1, 17, 50_000])
def test_it_is_as_long_as_asked_for(length):
    assert len(write_play(length)[0]) == length


def test_every_repeat_is_word_for_word(play):
    text, repeats = play
    for r in repeats:
        assert text[r.first : r.first + r.length] == text[r.second : r.second + r.length]
        assert r.first + r.length <= r.second


def test_distances_cover_every_octave_from_16_to_4096(play):
    _, repeats = play
    distances = [r.distance for r in repeats]
    assert min(distances) >= NEAREST
    assert max(distances) <= FARTHEST
    edge = NEAREST
    while edge < FARTHEST:
        assert sum(edge <= d < 2 * edge for d in distances) > 100, edge
        edge *= 2


def test_phrases_are_fresh_so_that_only_memory_helps(play):
    text, repeats = play
    phrases = [text[r.first : r.first + r.length] for r in repeats]
    assert len(set(phrases)) == len(phrases)
    assert all(text.count(phrase) == 2 for phrase in phrases[:200])


def test_a_play_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="0 characters"):
        write_play(0)
