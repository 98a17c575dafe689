"""What a token repeats, and how rare its word is, against plain loops."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from memformers.evaluation.frequency_buckets import (
    NEVER,
    NO_WORD,
    rarity_groups,
    repeat_distances,
    repeat_groups,
    word_counts,
    word_occurrences,
)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 5))
def test_distances_are_those_of_a_search_backwards(text, n):
    found = repeat_distances(torch.tensor(text), n)
    for end in range(len(text)):
        n_gram = text[end - n + 1 : end + 1] if end >= n - 1 else None
        earlier = (d for d in range(1, end - n + 2) if text[end - d - n + 1 : end - d + 1] == n_gram)
        assert found[end] == next(earlier, NEVER)


def test_each_number_is_in_one_named_group_and_distances_reach_twice_the_memory():
    distances = torch.tensor([1, 63, 64, 1023, 1024, 10**6, NEVER])
    groups, names = repeat_groups(distances, 64, 320)
    assert names[::4] == ["1 – 63", "512 – 1,023"]
    assert [names[i] for i in groups] == [
        "1 – 63", "1 – 63", "64 – 127", "512 – 1,023", *["1,024 or more, or never"] * 3
    ]  # fmt: skip
    assert repeat_groups(distances, 1, 0)[1] == ["1 – 1", "2 or more, or never"]
    groups, names = rarity_groups(torch.tensor([NO_WORD, 0, 1, 9, 10, 99, 100, 999, 1000, 10**6]))
    assert [names[i] for i in groups] == [
        "no word", "never", "1 – 9", "1 – 9", "10 – 99", "10 – 99", "100 – 999", "100 – 999",
        "1,000 or more", "1,000 or more",
    ]  # fmt: skip


def test_a_character_or_byte_has_the_occurrences_of_its_word_in_the_training_text():
    counts = word_counts("The king's men. the KING'S men; the end")
    found = word_occurrences("The king’s king's cat.", counts, of_bytes=False)
    assert found.tolist() == [3] * 3 + [-1] + [0] * 6 + [-1] + [2] * 6 + [-1] + [0] * 3 + [-1]
    of_bytes = word_occurrences("é a\udcff", word_counts("é é a"), of_bytes=True)
    assert of_bytes.tolist() == [2, 2, NO_WORD, 1, NO_WORD]
