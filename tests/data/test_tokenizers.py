import json

import pytest
import torch

from memformers.data.tokenizers import build_tokenizer, load_tokenizer, save_tokenizer

TEXT = "To be, or not to be — naïve?\n"


@pytest.mark.parametrize("name", ["character", "frequency", "byte"])
def test_text_survives_encoding_saving_and_decoding(name, tmp_path):
    tokenizer = build_tokenizer(name, TEXT)
    save_tokenizer(tokenizer, tmp_path)
    again = load_tokenizer(tmp_path)
    tokens = again.encode(TEXT)
    assert torch.equal(tokens, tokenizer.encode(TEXT))
    assert again.decode(tokens) == TEXT
    assert again.vocab_size == tokenizer.vocab_size
    assert tokens.max() < again.vocab_size
    assert len(tokens) == len(TEXT.encode() if name == "byte" else TEXT)


def test_characters_are_numbered_by_how_often_the_text_has_them_when_asked_for(tmp_path):
    tokenizer = build_tokenizer("frequency", "banana bonanza")
    assert tokenizer.vocabulary == "anb oz"  # of those that are as frequent, as sorted
    save_tokenizer(tokenizer, tmp_path)
    assert load_tokenizer(tmp_path).vocabulary == "anb oz"
    assert build_tokenizer("character", "banana bonanza").vocabulary == " abnoz"


def test_unknown_characters_are_named_with_their_places():
    tokenizer = build_tokenizer("character", "abc")
    with pytest.raises(ValueError, match=r"'X' at 1 \(2x\), 'é' at 3 \(1x\).*known are 'abc'"):
        tokenizer.encode("aXbéX")


def test_broken_tokenizer_files_are_errors(tmp_path):
    with pytest.raises(ValueError, match="is missing"):
        load_tokenizer(tmp_path)
    for wrong in ({"tokenizer": "word"}, {"tokenizer": "character", "vocabulary": "aba"}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=list(wrong.values())[-1]):
            load_tokenizer(tmp_path)
