from memformers.common.words import fitting


def test_a_line_ends_where_the_terminal_does_and_some_characters_take_two_columns():
    assert fitting("abc", 3) == "abc"
    assert fitting("abc", 2) == "ab"
    assert fitting("\u8bb0\u5fc6x", 3) == "\u8bb0"
