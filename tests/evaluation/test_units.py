"""Bits a byte and a character, and perplexity, counted by hand from the text that tokens stand for."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memformers.data.files import bytes_as_text, bytes_of
from memformers.data.tokenizer import ByteTokenizer, CharacterTokenizer, IdTokenizer
from memformers.data.tokenizers import build_tokenizer, learn_bpe
from memformers.evaluation import evaluate
from memformers.evaluation.evaluate import Units, comparable, units

TEXTS = ["naïve kings, naïve crowns\n", "kings and  crowns\n"]


@pytest.mark.parametrize(
    ("raw", "characters", "words"),
    [(b"abcd", 3, 0), ("é€ b".encode(), 3, 1), ("€éb".encode()[1:], 2, 0), (b"a\xff b", 3, 1), (b"a", 0, 0)],
)
def test_a_character_counts_where_its_first_byte_is_predicted_and_a_word_where_it_begins(
    raw, characters, words
):
    tokens = ByteTokenizer().ids("".join(bytes_as_text([raw])))
    assert units(ByteTokenizer(), tokens) == Units(len(raw) - 1, len(raw) - 1, characters, words)


@pytest.mark.parametrize("name", ["character", "byte", "word", "bpe"])
def test_documents_are_counted_in_the_text_without_their_first_tokens(name):
    tokenizer = build_tokenizer(name, "".join(TEXTS))
    parts = [tokenizer.ids(text) for text in TEXTS]
    texts = [text.replace("  ", " ") if name == "word" else text for text in TEXTS]
    given = [tokenizer.bytes_of(tokenizer.encode(text)[:1]) for text in texts]
    assert units(tokenizer, np.concatenate(parts), tuple(map(len, parts))) == Units(
        tokens=sum(map(len, parts)) - 2,
        bytes=len(bytes_of("".join(texts))) - sum(map(len, given)),
        characters=len("".join(texts)) - sum(len(first.decode()) for first in given),
        words=len("".join(texts).split()) - sum(len(first.split()) for first in given),
    )
    assert units(IdTokenizer(9), np.arange(9), (4, 5)) == Units(7, 0, 7, 0), "ids are no text"


@given(st.text(alphabet="aé \n", min_size=2, max_size=40), st.integers(1, 7))
def test_units_are_the_same_however_many_tokens_are_decoded_at_once(text, at_once):
    for tokenizer in (ByteTokenizer(), CharacterTokenizer("aé \n"), build_tokenizer("word", text)):
        whole = units(tokenizer, tokenizer.ids(text))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluate, "AT_ONCE", at_once)
            assert units(tokenizer, tokenizer.ids(text)) == whole


@pytest.mark.parametrize(
    ("tokenizer", "perplexities"),
    [(build_tokenizer("word", "a b\n"), {"perplexity": math.exp(2.0)}), (ByteTokenizer(), {}),
     (learn_bpe(["a b"]), {"word_perplexity": math.exp(10.0)})],
)  # fmt: skip
def test_perplexity_is_over_all_tokens_of_words_and_over_the_words_of_subwords(tokenizer, perplexities):
    bits = {"bits_per_character": 0.5 / math.log(2), "bits_per_byte": 1 / 3 / math.log(2)}
    found = comparable(100.0, Units(50, 300, 200, 10), tokenizer)
    assert {name: x for name, x in found.items() if x == x} == pytest.approx({**bits, **perplexities})
    assert comparable(1e9, Units(1, 1, 1, 1), tokenizer)["bits_per_byte"] > 1e9
    assert all(map(math.isnan, comparable(1.0, Units(0, 0, 0, 0), tokenizer).values()))


@pytest.mark.parametrize(
    ("text", "words"), [("The king's men -- all of them -- came, and 30 went. " * 9, 107),
                        ("self.x[i] = f(i, j) if i > 0 else g(x)\n" * 9, 0)],
)  # fmt: skip
def test_a_perplexity_per_word_is_of_texts_whose_words_are_words(text, words):
    assert units(ByteTokenizer(), ByteTokenizer().ids(text)).words == words
    tokenizer = learn_bpe([text])
    measured = comparable(10.0, units(tokenizer, tokenizer.ids(text)), tokenizer)
    assert math.isnan(measured["word_perplexity"]) == (words == 0)
