import pytest
import torch

from memformers.data.tokenizers import build_tokenizer, load_tokenizer, save_tokenizer

TEXT = "To be, or not to be — naïve?\n"


@pytest.mark.parametrize("name", ["character", "byte"])
def test_text_survives_encoding_saving_and_decoding(name, tmp_path):
    tokenizer = build_tokenizer(name, TEXT)
    save_tokenizer(tokenizer, tmp_path)
    again = load_tokenizer(tmp_path)
    tokens = again.encode(TEXT)
    assert torch.equal(tokens, tokenizer.encode(TEXT))
    assert again.decode(tokens) == TEXT
    assert again.vocab_size == tokenizer.vocab_size
    assert tokens.max() < again.vocab_size


def test_one_token_a_character_or_one_a_byte():
    assert len(build_tokenizer("character", TEXT).encode(TEXT)) == len(TEXT)
    assert len(build_tokenizer("byte", TEXT).encode(TEXT)) == len(TEXT.encode())


def test_unknown_characters_are_named_with_their_places():
    tokenizer = build_tokenizer("character", "abc")
    with pytest.raises(ValueError, match=r"'X' at 1 \(2x\), 'é' at 3 \(1x\).*known are 'abc'"):
        tokenizer.encode("aXbéX")


def test_broken_tokenizer_files_are_errors(tmp_path):
    with pytest.raises(ValueError, match="is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"tokenizer": "word"}')
    with pytest.raises(ValueError, match="names no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"tokenizer": "character", "vocabulary": "aba"}')
    with pytest.raises(ValueError, match="different characters"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="tokenizer='word' is unknown"):
        build_tokenizer("word", "abc")
