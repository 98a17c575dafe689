"""Tokens and their numbers, and the texts that come back from them."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers

from memformers.data import tokenizers
from memformers.data.subwords import SubwordTokenizer, learn_bpe
from memformers.data.tokenizers import IdTokenizer, build_tokenizer, check_order, load_tokenizer
from memformers.data.utf8 import bytes_of, text_of
from tests.data.reading import dataset, refused, write

TEXT = "The king's crown, the king’s cröwn: 12 kings, 3¼ crowns!\n\n  The crown's\tlost…\r\nking kings\n" * 9
ROWS = [row.split() for row in TEXT.replace("\r\n", "\n").splitlines()]
BPE = learn_bpe([TEXT], 285)
REFERENCE = Inner.from_str(json.dumps(BPE.saved()))


@pytest.mark.parametrize("name", tokenizers.OWN)
def test_a_text_comes_back_from_a_tokenizer_that_was_learned_again_or_saved(name, tmp_path):
    tokenizer, other = (build_tokenizer(name, TEXT, 280) for _ in range(2))
    tokenizers.save_tokenizer(tokenizer, tmp_path)
    tokens = tokenizer.encode(TEXT)
    for again in (load_tokenizer(tmp_path), build_tokenizer(str(tmp_path / "tokenizer.json"), ""), other):
        assert again.saved() == tokenizer.saved()
        assert torch.equal(again.encode(TEXT), tokens)
    text = "".join(" ".join(row) + "\n" for row in ROWS) if name == "word" else TEXT
    assert tokenizer.decode(tokens) == "".join(map(tokenizer.decoder(), tokens.tolist())) == text
    assert tokens.max() < tokenizer.vocab_size <= 280
    assert name in ("word", "bpe") or len(tokens) == len(TEXT.encode() if name == "byte" else TEXT)


def test_characters_are_numbered_by_how_often_the_text_has_them_when_asked_for():
    assert build_tokenizer("frequency", "banana bonanza").vocabulary == "anb oz"  # else in order
    assert build_tokenizer("character", "banana bonanza").vocabulary == " abnoz"
    for name, cutoffs in (("character", ()), ("frequency", (3,)), ("word", (3,))):
        check_order(name, cutoffs)


def test_words_are_numbered_as_by_an_independent_count_of_the_original_rules():
    counts = Counter(word for row in ROWS for word in row)  # in the order of their occurrence
    by_frequency = sorted(counts, key=lambda word: -counts[word])
    tokenizer, some = build_tokenizer("word", TEXT), ["<eos>", *by_frequency[:3], "<unk>"]
    assert tokenizer.vocabulary == ["<eos>", *by_frequency, "<unk>"]
    number = {word: i for i, word in enumerate(tokenizer.vocabulary)}
    assert tokenizer.numbers(TEXT).tolist() == [number[word] for row in ROWS for word in [*row, "<eos>"]]
    assert tokenizer.numbers("never\n").tolist() == [number["<unk>"], 0]
    assert build_tokenizer("word", TEXT, 5).vocabulary == some
    known = build_tokenizer("word", TEXT + "<unk> " * 99, 5)
    assert known.vocabulary == ["<eos>", "<unk>", *some[1:4]], "a word of the text, as in WikiText-103"


def test_words_are_counted_in_bounded_memory(tmp_path):
    """Of 1.2 million different ones, the rarest are forgotten, and counted anew."""
    words = ["often"] * 9 + [f"{n:x}" for n in range(1_200_000)]
    words[900_000] = words[-1] = "forgotten"
    path = write(tmp_path, {"x": " ".join([*words, "twice twice", "the end " * 200_000])}) / "x"
    with refused("more than 1,048,576 different words; give vocab_size"):
        dataset(path, tokenizer="word")
    found = dataset(path, tokenizer="word", vocab_size=6).tokenizer
    assert found.vocabulary == ["<eos>", "the", "end", "often", "twice", "<unk>"]


@given(raw=st.binary(max_size=60))
@example(b"\xff\xc3\xa9 \xc3")
def test_any_bytes_come_back_from_byte_level_subwords(raw):
    tokens = BPE.encode(text_of(raw))
    assert BPE.bytes_of(tokens) == bytes_of(text_of(raw)) == raw.removeprefix(b"\xef\xbb\xbf")
    assert BPE.decode(tokens).startswith("".join(map(BPE.decoder(), tokens.tolist())))


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@example("it's  \x0b\x1c\u2003é½ \u2003…-—. RO\n\n é1  ")
def test_tokens_are_those_of_hugging_face_and_half_a_character_is_never_shown(text):
    tokens, decode, shown = BPE.numbers(text).tolist(), BPE.decoder(), ""
    assert tokens == REFERENCE.encode(text, add_special_tokens=False).ids
    for token in tokens:
        shown += decode(token)
        assert text.startswith(shown)
    assert shown == text


@pytest.mark.parametrize("unit", ["ab cd\r\n", "aé é ", "a\n\n\n b", "a\t", "éa…"])
def test_the_tokens_of_a_long_text_are_those_of_the_whole_where_white_space_divides_it(unit):
    text = unit * (800_000 // len(unit.encode()))
    tokens = BPE.numbers(text)
    assert BPE.bytes_of(tokens) == text.encode()
    if unit.split() != [unit]:
        assert tokens.tolist() == REFERENCE.encode(text, add_special_tokens=False).ids


def test_learning_takes_no_more_words_than_there_is_memory_for_and_divides_long_ones():
    rng, taken = np.random.default_rng(0), []
    texts = ("".join(rng.choice(list("ACGT"), 200_000)) for _ in range(99))
    tokenizer = learn_bpe((taken.append(text) or text for text in texts), 300)
    assert 2 << 20 <= len("".join(taken)) < (2 << 20) + 200_000
    found = tokenizer.encode(taken[0])
    assert (len(found) < 100_000, tokenizer.decode(found)) == (True, taken[0])
    assert {tokenizer.bytes_of(np.array([i])) for i in range(256)} == {bytes([b]) for b in range(256)}


def of(model, **parts):
    """A tokenizer of Hugging Face's with this model."""
    inner = Inner(model)
    for name, part in {"pre_tokenizer": pre_tokenizers.Whitespace(), **parts}.items():
        setattr(inner, name, part)
    return SubwordTokenizer(inner.to_str())


def test_a_tokenizer_of_another_kind_is_used_as_it_is():
    model = models.WordLevel({"[UNK]": 0, "the": 1, "king": 2, "!": 3}, unk_token="[UNK]")
    tokenizer = of(model, normalizer=normalizers.Lowercase())
    assert (tokenizer.name, tokenizer.vocab_size) == ("wordlevel", 4)
    assert tokenizer.numbers("The KING, the king!").tolist() == [1, 2, 0, 1, 2, 3]
    assert "".join(map(tokenizer.decoder(), [1, 2])) == tokenizer.decode(torch.tensor([1, 2])) == "the king"


WITH_BYTES = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "a": 257, "▁b": 258}
TO_TEXT = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
FALLING_BACK = of(models.BPE(WITH_BYTES, [], unk_token="<unk>", byte_fallback=True), decoder=TO_TEXT)


@given(st.lists(st.sampled_from([257, 258, 0x41 + 1, 0xC3 + 1, 0xA9 + 1, 0xE6 + 1, 0xF0 + 1]), max_size=30))
@example([196, 258, 241, 257, 66, 258, 196, 257, 66, 231, 257])
def test_no_bytes_end_the_decoding_of_a_tokenizer_that_falls_back_on_bytes(tokens):
    text = "".join(map(FALLING_BACK.decoder(), tokens))
    assert text.count("a") == tokens.count(257)
    assert text.count("b") <= tokens.count(258)


def kept(folder, **data):
    return load_tokenizer(write(folder, {"tokenizer.json": json.dumps(data)} if data else {}))


def test_ids_in_a_prompt_are_numbers_and_are_written_as_such(tmp_path):
    tokenizer = kept(tmp_path, **IdTokenizer(300).saved())
    assert tokenizer.numbers(" 12 0\n299").tolist() == [12, 0, 299]
    assert "".join(map(tokenizer.decoder(), [12, 0])) == tokenizer.decode(torch.tensor([12, 0])) == " 12 0"
    assert tokenizer.numbers(tokenizer.line_break).tolist() == [0]


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda _: learn_bpe(["abab"], 300), r"vocab_size=300.* 2\d\d "),
     (lambda _: learn_bpe(["abab"], 255), "vocab_size.* 256.* 255"),
     (lambda _: SubwordTokenizer("{}", "x.json"), "x.json"), (lambda _: of(models.BPE()), "tokens"),
     (lambda _: of(models.BPE({"a": 0}, [])).numbers("aéa"), "'é'"),
     (lambda _: of(models.BPE({"a": 0}, [])).numbers("a\udcff"), "0xff"),
     *[(lambda _, model=model: of(model({"a": 0})).numbers("a c"), r"Missing \[UNK\] token.*; give it an unk")
       for model in (models.WordLevel, models.WordPiece)],
     (lambda _: tokenizers.WordTokenizer(["a"]), "<eos>"), (lambda _: build_tokenizer("words", "a"), "'words'"),
     (lambda _: build_tokenizer("character", "abc").encode("aXbéX"), r"'X' at 1 \(2x\), 'é' at 3 \(1x\).*'abc'"),
     (lambda _: build_tokenizer("no/such.json", "a"), "no/such.json"), (kept, "is missing"),
     (lambda path: kept(path, tokenizer="word"), "word"),
     (lambda path: kept(path, tokenizer="character", vocabulary="aba"), "aba"),
     *[(lambda _, name=name: check_order(name, (3,)), rf"^cutoffs=\(3,\) .*'{name}' ")
       for name in ("character", "byte", "bpe")],
     *[(lambda _, wrong=wrong: IdTokenizer(300).numbers(f"1 {wrong}"), f"ids from 0 to 299, got '{wrong}'")
       for wrong in ("300", "-1", "a", "1.5", "²")]],
)  # fmt: skip
def test_what_is_no_tokenizer_or_has_no_token_is_an_error_of_one_line(make, words, tmp_path):
    with refused(words):
        make(tmp_path)
