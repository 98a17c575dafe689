from memformers.common.text_format import counted, fitting


def test_one_is_one():
    said = [counted(number, "document") for number in (1, 0, 2_000)]
    assert said == ["1 document", "0 documents", "2,000 documents"]


def test_a_line_ends_where_the_terminal_does_and_some_characters_take_two_columns():
    assert fitting("abc", 3) == "abc"
    assert fitting("abc", 2) == "ab"
    assert fitting("\u8bb0\u5fc6x", 3) == "\u8bb0"
