import hashlib
import re
from collections import Counter

import pytest

from memformers.data.builtin import write_play


def test_the_same_seed_gives_the_same_play_everywhere():
    text = write_play(50_000, seed=0)
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "14ba9181b177dc209deb191643e59c3729fe1bffa0241679e61f68a277c84fdf"
    )
    assert write_play(50_000, seed=1) != text


def test_it_is_as_long_as_asked_for_and_never_empty():
    assert [len(write_play(length)) for length in (1, 17, 50_000)] == [1, 17, 50_000]
    with pytest.raises(ValueError, match="length=0"):
        write_play(0)


def test_oaths_are_said_again_word_for_word_and_are_otherwise_fresh():
    text = write_play(400_000)
    sworn = Counter(re.findall(r"(?:I swear|I vow|Hear me): ([a-z ]+)!", text))
    again = Counter(re.findall(r"(?:Again|Once more|You said|I still hear): ([a-z ]+)\.", text))
    assert set(sworn.values()) == set(again.values()) == {1}
    assert set(again) <= set(sworn)
    assert len(again) > 0.95 * len(sworn)
