"""Units of a text, counted by hand, and losses in them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memformers.data.files import bytes_as_text, bytes_of
from memformers.data.tokenizer import ByteTokenizer, CharacterTokenizer, IdTokenizer
from memformers.data.tokenizers import build_tokenizer, learn_bpe
from memformers.evaluation.units import Units, decoded_units, losses_by_unit, predicted_units

TEXTS = ["naïve kings, naïve crowns\n", "kings and  crowns\n"]


@pytest.mark.parametrize(
    ("raw", "characters", "words"),
    [(b"abcd", 3, 0), ("é€ b".encode(), 3, 1), ("€éb".encode()[1:], 2, 0), (b"a\xff b", 3, 1), (b"a", 0, 0)],
)
def test_characters_and_words_count_where_they_begin(raw, characters, words):
    tokens = ByteTokenizer().ids("".join(bytes_as_text([raw])))
    assert predicted_units(ByteTokenizer(), tokens) == Units(len(raw) - 1, len(raw) - 1, characters, words)


@pytest.mark.parametrize("name", ["character", "byte", "word", "bpe"])
def test_documents_count_without_their_first_tokens(name):
    tokenizer = build_tokenizer(name, "".join(TEXTS))
    parts = [tokenizer.ids(text) for text in TEXTS]
    texts = TEXTS
    if name == "word":
        # Words don't keep how many spaces there are.
        texts = [text.replace("  ", " ") for text in TEXTS]
    joined = "".join(texts)
    wanted = Units(sum(map(len, parts)), len(bytes_of(joined)), len(joined), len(joined.split()))
    # The first token of a document is not predicted.
    for text in texts:
        first_token = tokenizer.bytes_of(tokenizer.encode(text)[:1])
        wanted = Units(
            tokens=wanted.tokens - 1,
            bytes=wanted.bytes - len(first_token),
            characters=wanted.characters - len(first_token.decode()),
            words=wanted.words - len(first_token.split()),
        )
    assert predicted_units(tokenizer, np.concatenate(parts), tuple(map(len, parts))) == wanted


def test_ids_are_no_text():
    assert predicted_units(IdTokenizer(9), np.arange(9), (4, 5)) == Units(7, 0, 7, 0)


@given(st.text(alphabet="aé \n", min_size=2, max_size=40), st.integers(1, 7))
def test_units_do_not_depend_on_how_many_tokens_are_decoded(text, piece_len):
    for tokenizer in (ByteTokenizer(), CharacterTokenizer("aé \n"), build_tokenizer("word", text)):
        tokens = tokenizer.ids(text)
        assert decoded_units(tokenizer, tokens, (), piece_len) == predicted_units(tokenizer, tokens)


@pytest.mark.parametrize(
    ("tokenizer", "perplexities"),
    [(build_tokenizer("word", "a b\n"), {"perplexity": math.exp(2.0)}), (ByteTokenizer(), {}),
     (learn_bpe(["a b"]), {"word_perplexity": math.exp(10.0)})],
)  # fmt: skip
def test_perplexity_is_over_words(tokenizer, perplexities):
    """Those that are tokens, or those that subwords are of."""
    bits = {"bits_per_character": 0.5 / math.log(2), "bits_per_byte": 1 / 3 / math.log(2)}
    measures = losses_by_unit(100.0, Units(50, 300, 200, 10), tokenizer)
    known = {name: value for name, value in measures.items() if not math.isnan(value)}
    assert known == pytest.approx({**bits, **perplexities})


def test_measures_are_large_or_unknown_where_there_is_little_text():
    tokenizer = ByteTokenizer()
    assert losses_by_unit(1e9, Units(1, 1, 1, 1), tokenizer)["bits_per_byte"] > 1e9
    assert all(map(math.isnan, losses_by_unit(1.0, Units(0, 0, 0, 0), tokenizer).values()))


@pytest.mark.parametrize(
    ("text", "words"), [("The king's men -- all of them -- came, and 30 went. " * 9, 107),
                        ("self.x[i] = f(i, j) if i > 0 else g(x)\n" * 9, 0)],
)  # fmt: skip
def test_perplexity_per_word_needs_words(text, words):
    assert predicted_units(ByteTokenizer(), ByteTokenizer().ids(text)).words == words
    tokenizer = learn_bpe([text])
    measured = losses_by_unit(10.0, predicted_units(tokenizer, tokenizer.ids(text)), tokenizer)
    assert math.isnan(measured["word_perplexity"]) == (words == 0)
