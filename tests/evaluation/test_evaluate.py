"""Whole texts and documents, against streams read alone, segment by segment; and units, counted by hand."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from memformers.data.files import bytes_as_text, bytes_of
from memformers.data.streams import Reading
from memformers.data.tokenizer import ByteTokenizer, CharacterTokenizer, IdTokenizer
from memformers.data.tokenizers import build_tokenizer, learn_bpe
from memformers.evaluation.evaluate import (
    BLOCK,
    Evaluation,
    Units,
    comparable,
    decoded_units,
    evaluate,
    evaluate_reading,
    reading_of,
    units,
    with_lengths,
)
from tests.builders import MODELS, small_lm
from tests.texts import read

LENGTHS = [30, 1, 8, 53, 2, 9, 22, 7, 1]
"""Documents in tokens, some of which end with a segment of 7, and some in which nothing is predicted."""


def evaluation_of(losses, *lengths, of_documents=False, segment_len=7, reach=10):
    """Of streams of these ``lengths``, whose ``losses`` follow each other, segment by segment."""
    lengths = lengths or (len(losses),)
    groups = tuple((number,) for number in range(len(lengths)))
    evaluation = Evaluation(Reading((0,) * len(lengths), lengths, groups, segment_len, of_documents), reach)
    for number, of_stream in enumerate(losses.split(lengths)):
        for start in range(0, len(of_stream), segment_len):
            part = of_stream[start : start + segment_len, None]
            evaluation.add([number], start, part, part > 0)
    return evaluation


def check_same(evaluation, wanted, *names):
    for name in ("loss", "by_position", "by_memory", "document_losses", "uncertainty", *names):
        got, want = (np.array(getattr(of, name)) for of in (evaluation, wanted))
        assert got == pytest.approx(want, abs=1e-10, nan_ok=True), name


def read_alone(lm, text):
    """Losses and correct answers of one stream, from an empty memory."""
    if len(text) == 1:
        return torch.empty(0), torch.empty(0, dtype=torch.bool)
    logits = read(lm, text[:-1, None])[0][:, 0]
    return F.cross_entropy(logits, text[1:], reduction="none"), logits.argmax(-1) == text[1:]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("streams", [1, 3, 100])
@pytest.mark.parametrize("documents", [(), LENGTHS])
def test_streams_side_by_side_are_what_each_is_alone(model, streams, documents):
    lm, text = small_lm(model, dropout=0.3).train(), torch.randint(0, 11, (sum(LENGTHS),))
    result = evaluate(lm, text, streams, documents=documents)
    assert lm.training
    length = -(-(len(text) - 1) // streams)
    parts = [text[i : i + length + 1] for i in range(0, len(text) - 1, length)]
    alone = [read_alone(lm.eval(), part) for part in (text.split(documents) if documents else parts)]
    losses, hits = (torch.cat(joined) for joined in zip(*alone, strict=True))
    lengths = [len(of) for of, _ in alone] + [0] * (len(result.lengths) - len(alone))
    assert (result.lengths.tolist(), result.tokens) == (lengths, len(losses))
    assert result.loss == pytest.approx(losses.mean().item(), abs=1e-10), "every token counts alike"
    assert result.accuracy == hits.double().mean().item()
    by_place = [torch.cat([of[place::7] for of, _ in alone]) for place in range(7)]
    assert result.by_position == pytest.approx([x.mean().item() for x in by_place if len(x)], abs=1e-10)
    check_same(result, evaluation_of(losses, *lengths, of_documents=bool(documents), reach=result.reach))
    assert (result.reconstruction_loss is not None) == (model == "compressive" and max(lengths) > 7)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("documents", [(), LENGTHS])
@pytest.mark.parametrize("n", [2, 20])
def test_shares_of_streams_add_up_to_one_process(documents, n):
    lm, text, received = small_lm("compressive"), torch.randint(0, 11, (600,)), []
    reading = reading_of(len(text), 16, 7, documents)
    wanted = evaluate(lm, text, 16, documents=documents)
    total = Evaluation(reading, wanted.reach)
    for i in range(n):
        groups = tuple(group[i::n] for group in reading.groups if group[i::n])
        total.merge(evaluate_reading(lm, text, replace(reading, groups=groups), received.append))
    assert len(torch.cat(received)) == total.tokens == wanted.tokens
    check_same(total, wanted, "accuracy")
    assert total.reconstruction_loss == pytest.approx(wanted.reconstruction_loss, rel=0.5)


@pytest.mark.parametrize(("lengths", "of_documents"), [((34, 34, 32), False), ((50, 0, 30, 20), True)])
def test_losses_are_grouped_by_what_is_remembered(lengths, of_documents):
    losses = torch.rand(100)
    result = evaluation_of(losses, *lengths, of_documents=of_documents)
    parts = [part.double() for part in losses.split(lengths)]
    groups = [[p[:7] for p in parts], [p[7:14] for p in parts], [p[14:] for p in parts]]
    assert [before for before, _, _ in result.by_memory] == [0, 7, 10]
    for group, (before, mean, width) in zip(groups, result.by_memory, strict=True):
        of_streams = [part.mean().item() for part in group if len(part)]
        assert mean == pytest.approx(torch.cat(group).mean().item())
        if before < 10 or not of_documents:  # else they are of unequal lengths
            assert width == pytest.approx(4.303 * statistics.stdev(of_streams) / math.sqrt(3), rel=1e-3)
    far = evaluation_of(losses, *lengths, of_documents=of_documents, segment_len=35, reach=100).by_memory[-1]
    assert math.isnan(far[2]) == of_documents, "a single document came so far"


@pytest.mark.parametrize("of_documents", [False, True])
def test_the_uncertainty_covers_the_truth_about_95_times_in_100(of_documents):
    """Tokens are alike in each block, or document."""
    covered = 0
    for _ in range(200):
        draws = torch.randn(20 * BLOCK).add_(torch.randn(20).repeat_interleave(BLOCK)) + 3.0
        lengths = [BLOCK] * 20 if of_documents else [len(draws)]
        result = evaluation_of(draws, *lengths, of_documents=of_documents, segment_len=20 * BLOCK)
        covered += abs(result.loss - 3.0) <= result.uncertainty
    assert 0.90 <= covered / 200 <= 0.98
    assert math.isnan(evaluation_of(draws[:BLOCK], of_documents=of_documents).uncertainty)
    assert math.isnan(evaluation_of(draws[: BLOCK - 1]).uncertainty)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_memory_may_be_as_long_as_positions_reach(positions):
    lm = with_lengths(small_lm("transformer-xl", positions=positions), segment_len=4, mem_len=8)
    text = torch.randint(0, 11, (60,))
    same = small_lm("transformer-xl", positions=positions, segment_len=4, mem_len=8)
    same.load_state_dict(lm.state_dict())
    assert evaluate(lm, text, 1).loss == evaluate(same, text, 1).loss
    if positions == "learned":
        with pytest.raises(ValueError, match=r"12 positions.* 13"):
            with_lengths(lm, mem_len=9)
    else:
        assert with_lengths(lm, mem_len=500).config.mem_len == 500
    for model, lengths in (("transformer-xl", {"c_mem_len": 4}), ("transformer", {"mem_len": 4})):
        with pytest.raises(ValueError, match=f"{next(iter(lengths))}=4 .* {model}"):
            with_lengths(small_lm(model), **lengths)


def test_an_evaluation_does_not_grow_with_tokens():
    result = evaluation_of(torch.rand(100_000), segment_len=64, reach=320)
    assert sum(sums.numel() for sums in result._sums.values()) < 100_000 / BLOCK + 200
    result = evaluation_of(torch.rand(8_000), *[80] * 100, of_documents=True, segment_len=4, reach=64)
    assert len(result.by_memory) == 64 / 4 + 1
    assert sum(sums.numel() for sums in result._sums.values()) < 5 * 100 + 200


TEXTS = ["naïve kings, naïve crowns\n", "kings and  crowns\n"]


@pytest.mark.parametrize(
    ("raw", "characters", "words"),
    [(b"abcd", 3, 0), ("é€ b".encode(), 3, 1), ("€éb".encode()[1:], 2, 0), (b"a\xff b", 3, 1), (b"a", 0, 0)],
)
def test_characters_and_words_count_where_they_begin(raw, characters, words):
    tokens = ByteTokenizer().ids("".join(bytes_as_text([raw])))
    assert units(ByteTokenizer(), tokens) == Units(len(raw) - 1, len(raw) - 1, characters, words)


@pytest.mark.parametrize("name", ["character", "byte", "word", "bpe"])
def test_documents_count_without_their_first_tokens(name):
    tokenizer = build_tokenizer(name, "".join(TEXTS))
    parts = [tokenizer.ids(text) for text in TEXTS]
    texts = [text.replace("  ", " ") if name == "word" else text for text in TEXTS]
    first_tokens = [tokenizer.bytes_of(tokenizer.encode(text)[:1]) for text in texts]
    assert units(tokenizer, np.concatenate(parts), tuple(map(len, parts))) == Units(
        tokens=sum(map(len, parts)) - 2,
        bytes=len(bytes_of("".join(texts))) - sum(map(len, first_tokens)),
        characters=len("".join(texts)) - sum(len(first.decode()) for first in first_tokens),
        words=len("".join(texts).split()) - sum(len(first.split()) for first in first_tokens),
    )
    assert units(IdTokenizer(9), np.arange(9), (4, 5)) == Units(7, 0, 7, 0), "ids are no text"


@given(st.text(alphabet="aé \n", min_size=2, max_size=40), st.integers(1, 7))
def test_units_do_not_depend_on_how_many_tokens_are_decoded(text, piece_len):
    for tokenizer in (ByteTokenizer(), CharacterTokenizer("aé \n"), build_tokenizer("word", text)):
        whole = units(tokenizer, tokenizer.ids(text))
        assert decoded_units(tokenizer, tokenizer.ids(text), (), piece_len) == whole


@pytest.mark.parametrize(
    ("tokenizer", "perplexities"),
    [(build_tokenizer("word", "a b\n"), {"perplexity": math.exp(2.0)}), (ByteTokenizer(), {}),
     (learn_bpe(["a b"]), {"word_perplexity": math.exp(10.0)})],
)  # fmt: skip
def test_perplexity_is_over_words_or_over_words_of_subwords(tokenizer, perplexities):
    bits = {"bits_per_character": 0.5 / math.log(2), "bits_per_byte": 1 / 3 / math.log(2)}
    measures = comparable(100.0, Units(50, 300, 200, 10), tokenizer)
    assert {name: x for name, x in measures.items() if x == x} == pytest.approx({**bits, **perplexities})
    assert comparable(1e9, Units(1, 1, 1, 1), tokenizer)["bits_per_byte"] > 1e9
    assert all(map(math.isnan, comparable(1.0, Units(0, 0, 0, 0), tokenizer).values()))


@pytest.mark.parametrize(
    ("text", "words"), [("The king's men -- all of them -- came, and 30 went. " * 9, 107),
                        ("self.x[i] = f(i, j) if i > 0 else g(x)\n" * 9, 0)],
)  # fmt: skip
def test_perplexity_per_word_needs_words(text, words):
    assert units(ByteTokenizer(), ByteTokenizer().ids(text)).words == words
    tokenizer = learn_bpe([text])
    measured = comparable(10.0, units(tokenizer, tokenizer.ids(text)), tokenizer)
    assert math.isnan(measured["word_perplexity"]) == (words == 0)
