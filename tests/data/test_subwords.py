"""Words and subwords: their numbers, and the texts that come back from them."""

import json
import random
from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers

from memformers.data import subwords, tokenizers
from memformers.data.subwords import (
    LINE_END,
    PIECE,
    WORD_END,
    SubwordTokenizer,
    learn_bpe,
    pieces,
    with_enough_words,
)
from memformers.data.tokenizers import (
    WordTokenizer,
    build_tokenizer,
    learn,
    load_tokenizer,
    save_tokenizer,
)
from memformers.data.utf8 import bytes_of, text_of

TEXT = "The king's crown, the king’s cröwn: 12 kings, 3¼ crowns!\n\n  The crown's\tlost…\r\nking kings\n" * 9


@pytest.fixture(scope="module")
def bpe():
    return learn_bpe([TEXT], 285)


@given(raw=st.binary(max_size=60))
@example(b"\xff\xc3\xa9 \xc3")
def test_any_bytes_come_back_from_byte_level_subwords(bpe, raw):
    tokens = bpe.numbers(text_of(raw)).tolist()
    assert b"".join(bpe.of_bytes[i] for i in tokens) == bytes_of(text_of(raw))
    shown = "".join(map(bpe.decoder(), tokens))
    assert bpe.decode(torch.tensor(tokens)).startswith(shown), "but for an unfinished character"


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_half_a_character_is_never_shown(bpe, text):
    decode, shown = bpe.decoder(), ""
    for token in bpe.numbers(text).tolist():
        shown += decode(token)
        assert text.startswith(shown)
    assert shown == text


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@example("it's  \x0b\x1c\u2003é½ \u2003…-—. RO\n\n é1  ")
def test_tokens_are_those_of_hugging_face(bpe, text):
    assert bpe.numbers(text).tolist() == bpe.inner.encode(text, add_special_tokens=False).ids


def test_learning_takes_no_more_words_than_there_is_memory_for(monkeypatch):
    monkeypatch.setattr(subwords, "LEARNED_WORDS", 20)
    taken = list(with_enough_words(iter(["the king " * 99, "the köng, 12", "crown " * 9, "and more"])))
    assert taken == ["the king " * 99, "the köng, 12", "crown " * 9], "3 + 4 + 5 + 1 + 2 bytes, then 5 more"


@given(
    line=st.integers(1, 9),
    text=st.text(st.sampled_from("ab \n\r\té"), min_size=1, max_size=30),
)
def test_pieces_are_cut_where_no_word_goes_on(line, text):
    raw = (text * (3 * PIECE // len(text.encode()) + line)).encode()
    found = list(pieces(raw, 0, len(raw)))
    assert [begin for begin, _ in found[1:]] == [end for _, end in found[:-1]]
    assert (found[0][0], found[-1][1]) == (0, len(raw))
    assert "".join(raw[begin:end].decode() for begin, end in found) == raw.decode(), "and no character"
    for begin, end in found[:-1]:
        if WORD_END.search(raw):
            assert raw[end - 1] > 0x20
            assert raw[end] in b" \t\r\n"
        if LINE_END.search(raw, begin + PIECE, begin + 2 * PIECE):
            assert raw[end] == ord("\n")


def test_words_are_numbered_as_by_an_independent_count_of_the_original_rules():
    lines = TEXT.replace("\r\n", "\n").splitlines()
    counts, order = Counter(), {}
    for line in lines:
        for word in line.strip().split():
            order.setdefault(word, len(order))
            counts[word] += 1
    by_frequency = sorted(counts, key=lambda word: (-counts[word], order[word]))
    tokenizer = build_tokenizer("word", TEXT)
    assert tokenizer.vocabulary == ["<eos>", *by_frequency, "<unk>"]
    number = {word: i for i, word in enumerate(tokenizer.vocabulary)}
    expected = [number[word] for line in lines for word in [*line.split(), "<eos>"]]
    assert tokenizer.numbers(TEXT).tolist() == expected
    assert tokenizer.numbers("never\n").tolist() == [number["<unk>"], 0]
    small = build_tokenizer("word", TEXT, 5)
    assert small.vocabulary == ["<eos>", *by_frequency[:3], "<unk>"]
    known = build_tokenizer("word", TEXT + "<unk> " * 99, 5)
    assert known.vocabulary == ["<eos>", "<unk>", *by_frequency[:3]], "a word of the text, as in WikiText-103"
    assert tokenizer.decode(torch.tensor(expected[:5])) == " ".join(lines[0].split()[:5])
    assert tokenizer.ended("a b") == "a b\n"
    assert learn("word", None, iter([TEXT])).vocabulary == tokenizer.vocabulary


def test_words_are_counted_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(tokenizers, "COUNTED", 8)
    often = "the the the king king crown "
    pieces = [often + " ".join(f"{i}-{n}" for n in range(9)) for i in range(5)]
    assert learn("word", 5, pieces).vocabulary == ["<eos>", "the", "king", "crown", "<unk>"]
    with pytest.raises(ValueError, match="more than 8 different words; give vocab_size"):
        learn("word", None, pieces)


@pytest.mark.parametrize("name", ["word", "bpe"])
def test_a_saved_tokenizer_is_the_same_one(name, tmp_path):
    tokenizer = build_tokenizer(name, TEXT, 280)
    save_tokenizer(tokenizer, tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.name, again.vocab_size) == (name, tokenizer.vocab_size)
    assert again.numbers(TEXT).tolist() == tokenizer.numbers(TEXT).tolist()
    assert tokenizer.numbers(TEXT).max() < tokenizer.vocab_size <= 280
    assert build_tokenizer(str(tmp_path / "tokenizer.json"), "").saved() == again.saved()
    assert build_tokenizer(name, TEXT, 280).saved() == tokenizer.saved(), "learned alike every time"


def test_a_tokenizer_of_another_kind_is_used_as_it_is():
    inner = Inner(models.WordLevel({"[UNK]": 0, "the": 1, "king": 2, "!": 3}, unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer = SubwordTokenizer(inner.to_str())
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.of_bytes) == ("wordlevel", 4, None)
    assert tokenizer.numbers("The KING, the king!").tolist() == [1, 2, 0, 1, 2, 3]
    assert "".join(map(tokenizer.decoder(), [1, 2])) == tokenizer.decode(torch.tensor([1, 2])) == "the king"


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda: learn_bpe(["abab"], 300), r"vocab_size=300.* 2\d\d "),
     (lambda: learn_bpe(["abab"], 255), "vocab_size.* 256.* 255"),
     (lambda: SubwordTokenizer("{}", "x.json"), "x.json"),
     (lambda: SubwordTokenizer(Inner(models.BPE()).to_str()), "tokens"),
     (lambda: SubwordTokenizer(Inner(models.BPE({"a": 0}, [])).to_str()).numbers("aéa"), "'é'"),
     (lambda: SubwordTokenizer(Inner(models.BPE({"a": 0}, [])).to_str()).numbers("a\udcff"), "0xff"),
     (lambda: WordTokenizer(["a", "b"]), "<eos>"),
     (lambda: build_tokenizer("words", "a"), "'words'"),
     (lambda: build_tokenizer("no/such.json", "a"), "no/such.json")],
)  # fmt: skip
def test_what_is_no_tokenizer_or_has_no_token_is_an_error_of_one_line(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


def test_the_alphabet_of_bytes_is_that_of_hugging_face(bpe):
    tokens = json.loads(json.dumps(bpe.saved()))["model"]["vocab"]
    assert {bpe.of_bytes[i] for token, i in tokens.items() if len(token) == 1} == {
        bytes([b]) for b in range(256)
    }


WITH_BYTES = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "a": 257, "▁b": 258}


@given(st.lists(st.sampled_from([257, 258, 0x41 + 1, 0xC3 + 1, 0xA9 + 1, 0xE6 + 1, 0xF0 + 1]), max_size=30))
@example([196, 258, 241, 257, 66, 258, 196, 257, 66, 231, 257])
def test_no_bytes_end_the_decoding_of_a_tokenizer_that_falls_back_on_bytes(tokens):
    inner = Inner(models.BPE(vocab=WITH_BYTES, merges=[], unk_token="<unk>", byte_fallback=True))
    replaced = decoders.Replace("▁", " ")
    inner.decoder = decoders.Sequence([replaced, decoders.ByteFallback(), decoders.Fuse()])
    decode = SubwordTokenizer(inner.to_str()).decoder()
    text = "".join(map(decode, tokens))
    assert text.count("a") == tokens.count(257)
    assert text.count("b") <= tokens.count(258)


@pytest.mark.parametrize("model", [models.WordLevel, models.WordPiece])
def test_an_unknown_word_without_a_token_for_it_is_one_line(model):
    inner = Inner(model({"a": 0, "b": 1}))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = SubwordTokenizer(inner.to_str())
    assert tokenizer.numbers("a b").tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"Missing \[UNK\] token.*; give it an unknown token"):
        tokenizer.numbers("a c")


def test_subwords_are_learned_of_a_text_without_white_space():
    text = "".join(random.Random(0).choices("ACGT", k=200_000))
    tokenizer = learn_bpe([text], 300)
    found = tokenizer.numbers(text)
    assert len(found) < len(text) / 2
    assert tokenizer.decode(torch.from_numpy(found)) == text
