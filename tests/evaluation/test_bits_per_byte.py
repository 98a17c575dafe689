"""Bits a character and a byte, counted by hand: each loss is a power of ten, so sums show what is in them."""

import itertools
import math

import pytest
import torch

from memformers.data.tokenizers import ByteTokenizer, CharacterTokenizer, build_tokenizer
from memformers.data.utf8 import bytes_of, text_of
from memformers.evaluation.evaluate import Evaluation, evaluate, summary
from memformers.evaluation.units import by_character, encoded, units
from tests.builders import small_lm

BIT = math.log(2)


def bits(losses, texts, tokenizer=ByteTokenizer()):  # noqa: B008 (it holds nothing)
    """Per character and per byte."""
    found = evaluation_of(losses).comparable(units(tokenizer, encoded(tokenizer, texts)))
    return found["bits_per_character"], found["bits_per_byte"]


def evaluation_of(losses):
    """Of documents with these losses."""
    found = Evaluation([len(of_text) for of_text in losses], of_documents=True, segment_len=100)
    for number, of_text in enumerate(losses):
        if len(of_text):
            found.add([number], 0, of_text[:, None], of_text[:, None] > 0)
    return found


def losses_of(n_tokens):
    return BIT * torch.tensor([10.0**i for i in range(n_tokens - 1)], dtype=torch.float64)


@pytest.mark.parametrize(
    ("raw", "summed", "characters"),
    [
        (b"abcd", 111, 3),
        ("aéb".encode(), 111, 2),
        ("éab".encode(), 110, 2),  # of é only the rest is predicted
        ("é€b".encode()[1:], 1111, 2),  # begins with the last byte of é
        ("€éb".encode()[1:], 1110, 2),  # the second byte of € is given, and the third is its rest
        ("😀éb".encode()[1:], 11100, 2),
        ("ab€".encode()[:-1], 1, 1),  # ends within €
        ("ab😀".encode()[:-1], 1, 1),
        ("😀aé😀".encode()[2:-1], 1110, 2),
        (b"a\xffb", 11, 2),  # a byte that is no UTF-8 is a character of its own
        (b"a\xff\xfe", 11, 2),
    ],
)
def test_a_character_of_a_byte_model_counts_with_the_loss_of_all_its_bytes_or_not_at_all(
    raw, summed, characters
):
    text = text_of(raw)
    assert bytes_of(text) == raw
    losses = losses_of(len(raw))
    per_byte = losses.sum().item() / BIT / (len(raw) - 1)
    assert bits([losses], [text]) == pytest.approx((summed / characters, per_byte))


def test_characters_of_a_character_model_count_one_by_one_and_its_bytes_without_the_first_ones():
    assert bits([losses_of(4)], ["é€ab"], CharacterTokenizer("abé€")) == pytest.approx((111 / 3, 111 / 5))


def test_a_text_with_no_whole_character_to_predict_has_no_bits_a_character():
    for raw in ("€".encode(), b"\x82\xac", b"a\xe2\x82"):
        assert math.isnan(bits([losses_of(len(raw))], [text_of(raw)])[0])
    assert all(map(math.isnan, bits([losses_of(1)], ["a"])))
    with pytest.raises(ValueError, match=r"3 characters and 5 bytes .* 4 tokens"):
        by_character("aéé", 4)


def test_a_slice_of_a_text_is_as_hard_a_character_as_its_characters_however_it_is_cut():
    """A model of bytes that gives all the same loss takes as many bits per character as these have bytes."""
    lm = small_lm("transformer", vocab_size=256)
    torch.nn.init.zeros_(lm.head.weight)
    torch.nn.init.zeros_(lm.head.bias)
    raw = ("€" * 20).encode()
    for start, stop in itertools.product(range(3), range(len(raw) - 2, len(raw) + 1)):
        text = text_of(raw[start:stop])
        split = encoded(ByteTokenizer(), [text], are_documents=False)
        numbers = summary(evaluate(lm, split.tokens, 1), units(ByteTokenizer(), split))
        assert numbers["bits_per_character"] == pytest.approx(3 * 8)
        assert numbers["bits_per_byte"] == pytest.approx(8)


@pytest.mark.parametrize("name", ["bpe", "word"])
def test_words_and_subwords_are_counted_in_the_characters_bytes_and_words_of_the_text(name):
    """By hand: all but those of the first token of each text."""
    texts = ["naïve kings, naïve crowns\n", "kings and crowns\n"]
    tokenizer = build_tokenizer(name, "".join(texts))
    tokens = [tokenizer.encode(text) for text in texts]
    of = units(tokenizer, encoded(tokenizer, texts))
    given = [tokenizer.decode(t[:1]) for t in tokens]
    assert all(text.startswith(first) for text, first in zip(texts, given, strict=True))
    assert of.characters == sum(map(len, texts)) - sum(map(len, given))
    assert of.bytes == sum(len(text.encode()) for text in texts) - sum(len(first.encode()) for first in given)
    assert of.words == 7
    losses = [losses_of(len(t)) for t in tokens]
    nats = sum(loss.sum().item() for loss in losses)
    found = evaluation_of(losses).comparable(of)
    assert found["bits_per_character"] == pytest.approx(nats / BIT / of.characters)
    assert found["bits_per_byte"] == pytest.approx(nats / BIT / of.bytes)
    assert found["word_perplexity"] == (pytest.approx(math.exp(nats / 7)) if nats < 4900 else math.inf)
