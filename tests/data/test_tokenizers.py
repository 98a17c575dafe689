"""Tokens and their numbers, and the texts that come back from them."""

import json
from collections import Counter
from contextlib import nullcontext
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from memformers.data import files, tokenize_corpus, tokenizer, tokenizers
from memformers.data.files import LINE_END, PIECE, WORD_END, pieces
from memformers.data.tokenizer import IdTokenizer
from memformers.data.tokenizers import SubwordTokenizer, build_tokenizer, learn_bpe, load_tokenizer
from tests.data.reading import dataset, refused, write

TEXT = "The king's crown, the king’s cröwn: 12 kings, 3¼ crowns!\n\n  The crown's\tlost…\r\nking kings\n" * 9
ROWS = [row.split() for row in TEXT.replace("\r\n", "\n").splitlines()]
BPE = learn_bpe([TEXT], 285)
REFERENCE = Inner.from_str(json.dumps(BPE.to_json()))


@pytest.mark.parametrize("name", tokenizers.OWN)
def test_a_tokenizer_is_the_same_learned_again_or_loaded(name, tmp_path):
    tokenizer = build_tokenizer(name, TEXT, 280)
    tokenizers.save_tokenizer(tokenizer, tmp_path)
    tokens = tokenizer.encode(TEXT)
    learned_again = build_tokenizer(name, TEXT, 280)
    built_from_file = build_tokenizer(str(tmp_path / "tokenizer.json"), "")
    for same_tokenizer in (load_tokenizer(tmp_path), built_from_file, learned_again):
        assert same_tokenizer.to_json() == tokenizer.to_json()
        assert torch.equal(same_tokenizer.encode(TEXT), tokens)


@pytest.mark.parametrize("name", tokenizers.OWN)
def test_a_text_is_decoded_as_it_was(name):
    """But for the spaces between words."""
    tokenizer = build_tokenizer(name, TEXT, 280)
    tokens = tokenizer.encode(TEXT)
    text = TEXT
    if name == "word":
        text = "".join(" ".join(row) + "\n" for row in ROWS)
    assert tokenizer.decode(tokens) == "".join(map(tokenizer.decoder(), tokens.tolist())) == text
    assert tokens.max() < tokenizer.vocab_size <= 280
    if name == "byte":
        assert len(tokens) == len(TEXT.encode())
    elif name not in ("word", "bpe"):
        assert len(tokens) == len(TEXT)


def test_characters_are_numbered_as_by_an_independent_count():
    characters = sorted({*TEXT})
    by_frequency = sorted(characters, key=lambda character: -TEXT.count(character))
    assert build_tokenizer("character", TEXT).vocabulary == "".join(characters)
    assert build_tokenizer("frequency", TEXT).vocabulary == "".join(by_frequency)


def test_words_are_numbered_as_by_an_independent_count():
    # Words are counted in the order of their occurrence.
    counts = Counter(word for row in ROWS for word in row)
    words = sorted(counts, key=lambda word: -counts[word])
    tokenizer = build_tokenizer("word", TEXT)
    assert tokenizer.vocabulary == ["<eos>", *words, "<unk>"], "as the original's"
    # The end of a line is a word, too.
    expected = []
    for row in ROWS:
        expected += [*row, "<eos>"]
    assert [tokenizer.vocabulary[token] for token in tokenizer.ids(TEXT)] == expected
    assert tokenizer.ids("never\n").tolist() == [tokenizer.vocabulary.index("<unk>"), 0]
    assert build_tokenizer("word", TEXT, 5).vocabulary == ["<eos>", *words[:3], "<unk>"]
    known = build_tokenizer("word", TEXT + "<unk> " * 99, 5)
    assert known.vocabulary == ["<eos>", "<unk>", *words[:3]], "a word of the text, as in WikiText-103"


@pytest.mark.parametrize("line", [0, 1])
@pytest.mark.parametrize("text", ["to be or nöt\n", "to be or not ", "to\tbe\r\n\r\n", "ö→", "\n"])
def test_pieces_are_cut_where_no_word_goes_on(line, text):
    raw = (text * (3 * PIECE // len(text.encode()) + line)).encode()
    cuts = list(pieces(raw, 0, len(raw)))
    # Each piece starts where the one before ends, and none cuts a character.
    end_of_previous = 0
    for begin, end in cuts:
        assert begin == end_of_previous
        raw[begin:end].decode()
        end_of_previous = end
    assert end_of_previous == len(raw)
    for begin, end in cuts[:-1]:
        assert raw[end - 1] > 0x20 or not WORD_END.search(raw)
        assert raw[end] == 10 or not LINE_END.search(raw, begin + PIECE, begin + 2 * PIECE)


def test_words_are_counted_in_bounded_memory_and_cut_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "COUNTED", 1 << 13)
    monkeypatch.setattr(files, "PIECE", 1 << 12)
    words = ["often"] * 9 + [f"{n:x}" for n in range(4_000, 16_000)]
    # As the rarest are, and then counted anew.
    words[6_000] = "forgotten"
    words[-1] = "forgotten"
    text = " ".join([*words, "twice twice", "the end " * 9_000])
    path = write(tmp_path, {"x": text}) / "x"
    cut = len(text) * 9 // 10
    with refused("more than 8,192 different words; give vocab_size"):
        dataset(path, tokenizer="word")
    data = dataset(path, tokenizer="word", vocab_size=6)
    assert data.tokenizer.vocabulary == ["<eos>", "the", "end", "often", "twice", "<unk>"]
    assert data.info.total("tokens") == sum(len(part.split()) + 1 for part in (text[:cut], text[cut:]))


@given(st.text(max_size=40))
@example("it's  \x0b\x1c\u2003é½ \u2003…-—. RO\n\n é1  ")
def test_any_text_has_the_tokens_of_hugging_face_and_is_decoded(text):
    """Half a character is never shown."""
    tokens = BPE.encode(text)
    assert tokens.tolist() == REFERENCE.encode(text, add_special_tokens=False).ids
    assert BPE.bytes_of(tokens).decode() == BPE.decode(tokens) == text
    decoded_so_far = [*accumulate(map(BPE.decoder(), tokens.tolist()), initial="")]
    assert all(map(text.startswith, decoded_so_far))
    assert decoded_so_far[-1] == text
    with refused("got byte 0xff at offset"):
        BPE.encode(text + "\udcff")


def test_learning_reads_no_more_words_than_memory_has_room_for(monkeypatch):
    """And divides long ones."""
    monkeypatch.setattr(tokenizers, "LEARNED_WORDS", 2 << 16)
    rng = np.random.default_rng(0)
    texts_read = []

    def texts():
        for _ in range(99):
            text = "".join(rng.choice(list("äCGT"), 44_000))
            texts_read.append(text)
            yield text

    tokenizer = learn_bpe(texts(), 300)
    assert 2 << 16 <= len("".join(texts_read).encode()) < 4 << 16
    tokens = tokenizer.encode(texts_read[0])
    assert len(tokens) < 22_000
    assert tokenizer.decode(tokens) == texts_read[0]
    assert {tokenizer.bytes_of(np.array([i])) for i in range(256)} == {bytes([b]) for b in range(256)}


def subwords_of(model, decoder=None):
    inner = Inner(model)
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoder
    return SubwordTokenizer(inner.to_str())


WITH_BYTES = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "a": 257, "▁b": 258}
TO_TEXT = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
FALLING_BACK = subwords_of(models.BPE(WITH_BYTES, [], unk_token="<unk>", byte_fallback=True), TO_TEXT)


@given(st.lists(st.sampled_from([257, 258, 0x41 + 1, 0xC3 + 1, 0xA9 + 1, 0xE6 + 1, 0xF0 + 1]), max_size=30))
@example([196, 258, 241, 257, 66, 258, 196, 257, 66, 231, 257])
def test_no_bytes_end_the_decoding_with_bytes_for_unknown_letters(tokens):
    assert FALLING_BACK.name == "bpe"
    assert FALLING_BACK.vocab_size == 259
    text = "".join(map(FALLING_BACK.decoder(), tokens))
    assert text.count("a") == tokens.count(257)
    assert text.count("b") <= tokens.count(258)


SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LIKE_LLAMA = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), TO_BYTES])


def check_like_the_whole(inner, text, folder):
    """A text on the disk has the tokens of its two parts."""
    inner.save(f"{folder}/meta.json")
    data = dataset(write(folder, {"x": text}) / "x", tokenizer=f"{folder}/meta.json")
    half = len(text) * 9 // 10
    for split, part in zip(data.splits.values(), (text[:half], text[half:]), strict=True):
        assert split.tokens.tolist() == inner.encode(part, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [(None, pre_tokenizers.Metaspace()), (None, pre_tokenizers.Metaspace(split=False)),
     (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
     (normalizers.NFKC(), pre_tokenizers.ByteLevel(add_prefix_space=True)), (None, LIKE_LLAMA)],
)  # fmt: skip
def test_a_long_text_has_the_tokens_of_the_whole(normalizer, pre_tokenizer, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    words = ["cat", " naïve", "—", "crowns,", "mat.\n", " 橋を", "12345678" * 4, "\n\n", "½", "don't ", "."]
    text = "".join(rng.choice(words, 16_000)) + "1234567" * 8_000 + "".join(rng.choice(words, 3_000))
    inner = Inner(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizer
    inner.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    inner.train_from_iterator([text[:9_000]], trainer)
    monkeypatch.setattr(files, "PIECE", 20_000)
    monkeypatch.setattr(tokenize_corpus, "JOB", 50_000)
    check_like_the_whole(inner, text, tmp_path)


@pytest.mark.parametrize("split", [True, False])
def test_a_unigram_with_equal_splits_splits_like_the_whole(split, tmp_path, monkeypatch):
    scores = {"<unk>": 0, "▁": -2.1, "a": -8.59, "b": -4.7, "ab": -13.29, "c": -8.89, ".": -1.1, "c.": -1.3}
    inner = Inner(models.Unigram([*scores.items()], 0, False))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    monkeypatch.setattr(files, "PIECE", 10_000)
    text = ("c. c\nc. " * 99 + "ab ") * 99
    check_like_the_whole(inner, text, tmp_path)
    monkeypatch.setattr(tokenize_corpus, "MAX_UNCUT", 40_000)
    with nullcontext() if split else refused("at most 40,000 bytes, got more; give the tokenizer a pre-tok"):
        check_like_the_whole(inner, text, tmp_path)


def load_from(folder, **data):
    """The tokenizer of a file with this ``data``, or of a folder without one."""
    files = {"tokenizer.json": json.dumps(data)} if data else {}
    return load_tokenizer(write(folder, files))


def test_ids_in_a_prompt_are_numbers_and_are_written_as_such(tmp_path):
    tokenizer = load_from(tmp_path, **IdTokenizer(300).to_json())
    assert tokenizer.ids(" 12 0\n299").tolist() == [12, 0, 299]
    assert "".join(map(tokenizer.decoder(), [12, 0])) == tokenizer.decode(torch.tensor([12, 0])) == " 12 0"
    assert tokenizer.ids(tokenizer.line_break).tolist() == [0]


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda _: learn_bpe(["abab"], 300), r"vocab_size=300.* 2\d\d "),
     (lambda _: learn_bpe(["abab"], 255), "vocab_size.* 256.* 255"),
     (lambda _: SubwordTokenizer("{}", "x.json"), "x.json"), (lambda _: subwords_of(models.BPE()), "tokens"),
     (lambda _: subwords_of(models.BPE({"a": 0}, [])).ids("aéa"), "'é'"),
     (lambda _: subwords_of(models.BPE({"a": 0}, [])).ids("a\udcff"), "0xff"),
     *[(lambda _, model=model: subwords_of(model({"a": 0})).ids("a c"),
        r"Missing \[UNK\] token.*; give it an unk")
       for model in (models.WordLevel, models.WordPiece)],
     (lambda _: build_tokenizer("character", "abc").encode("aXbéX"), r"'X' at 1 \(2x\), 'é' at 3 \(1x\).*'a"),
     (lambda _: tokenizers.check_name("words"), "'words'"), (load_from, "is missing"),
     (lambda _: build_tokenizer("x.json", ""), "x.json"),
     (lambda path: load_from(path, tokenizer="word"), "word"),
     (lambda path: load_from(path, tokenizer="word", vocabulary=["a", "b"]), "<eos>"),
     (lambda path: load_from(path, tokenizer="character", vocabulary="aba"), "aba"),
     *[(lambda _, wrong=wrong: IdTokenizer(300).ids(f"1 {wrong}"), f"ids from 0 to 299, got '{wrong}'")
       for wrong in ("300", "-1", "a", "1.5", "²")]],
)  # fmt: skip
def test_what_is_no_tokenizer_or_token_is_one_line(make, words, tmp_path):
    with refused(words):
        make(tmp_path)
