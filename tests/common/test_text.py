from memformers.common.text import counted, fitting, printable


def test_one_is_one_no_character_controls_the_terminal_and_some_take_two_columns():
    said = [counted(number, "document") for number in (1, 0, 2_000)]
    assert said == ["1 document", "0 documents", "2,000 documents"]
    assert printable("\x1b[31ma\nb\a") == "\ufffd[31ma\nb\ufffd"
    assert [fitting("abc", 3), fitting("abc", 2), fitting("\u8bb0\uff21x", 4)] == [
        "abc",
        "ab",
        "\u8bb0\uff21",
    ]
