"""One reader of text for all: bytes for bytes."""

import pytest

from memformers.data.corpora import read_text_file
from memformers.data.text_files import bytes_of, read_text, text_of
from memformers.data.tokenizers import ByteTokenizer, CharacterTokenizer, build_tokenizer, line_break


@pytest.mark.parametrize(
    "raw", [b"a\r\nb\r\n", b"a\rb", "a\u2028é€".encode(), b"abc\xff\xfe", bytes(range(256))]
)
def test_text_is_the_bytes_that_it_was_read_from(raw, tmp_path):
    (tmp_path / "x.txt").write_bytes(raw)
    assert read_text(str(tmp_path / "x.txt")) == read_text_file(tmp_path / "x.txt").text == text_of(raw)
    assert bytes_of(text_of(raw)) == raw
    assert bytes(ByteTokenizer().encode(text_of(raw)).tolist()) == raw


def test_a_byte_order_mark_is_no_character():
    assert text_of(b"\xef\xbb\xbfabc") == "abc"


def test_bytes_that_are_no_utf8_are_an_error_for_a_model_of_characters_alone():
    text = text_of("é".encode() + b"bc\xff")
    with pytest.raises(ValueError, match=r"not UTF-8 text: byte 0xff at offset 4; .* tokenizer='byte'"):
        build_tokenizer("character", text)
    assert build_tokenizer("byte", text).encode(text).tolist() == [0xC3, 0xA9, 98, 99, 255]


@pytest.mark.parametrize(("vocabulary", "expected"), [("a\n\r", "\n"), ("a\r", "\r"), ("ba", "b")])
def test_a_default_prompt_is_one_that_the_model_knows(vocabulary, expected):
    assert line_break(CharacterTokenizer(vocabulary)) == expected
