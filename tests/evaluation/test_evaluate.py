"""Whole texts and documents, against streams read alone, segment by segment."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from memformers.data.streams import Reading
from memformers.evaluation.evaluate import (
    BLOCK,
    Evaluation,
    evaluate,
    evaluate_reading,
    reading_of,
    with_lengths,
)
from tests.builders import MODELS, small_lm
from tests.texts import read

# Documents in tokens, some of which end with a segment of 7, and some in which nothing is predicted.
LENGTHS = [30, 1, 8, 53, 2, 9, 22, 7, 1]


def evaluation_of(losses, *lengths, of_documents=False, segment_len=7, reach=10):
    """Of streams of these ``lengths``, whose ``losses`` follow each other, segment by segment."""
    lengths = lengths or (len(losses),)
    groups = tuple((number,) for number in range(len(lengths)))
    begins = (0,) * len(lengths)
    evaluation = Evaluation(Reading(begins, lengths, groups, segment_len, of_documents), reach)
    for number, stream_losses in enumerate(losses.split(lengths)):
        for start in range(0, len(stream_losses), segment_len):
            part = stream_losses[start : start + segment_len, None]
            evaluation.add([number], start, part, part > 0)
    return evaluation


def check_same(evaluation, expected, *names):
    for name in ("loss", "by_position", "by_memory", "document_losses", "uncertainty", *names):
        result = np.array(getattr(evaluation, name))
        wanted = np.array(getattr(expected, name))
        assert result == pytest.approx(wanted, abs=1e-10, nan_ok=True), name


def read_alone(lm, text):
    """Losses and correct answers of one stream, from an empty memory."""
    if len(text) == 1:
        return torch.empty(0), torch.empty(0, dtype=torch.bool)
    outputs, _, _ = read(lm, text[:-1, None])
    logits = outputs[:, 0]
    return F.cross_entropy(logits, text[1:], reduction="none"), logits.argmax(-1) == text[1:]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("streams", [1, 3, 100])
@pytest.mark.parametrize("documents", [(), LENGTHS])
def test_streams_side_by_side_are_what_each_is_alone(model, streams, documents):
    lm = small_lm(model, dropout=0.3).train()
    text = torch.randint(0, 11, (sum(LENGTHS),))
    result = evaluate(lm, text, streams, documents=documents)
    assert lm.training

    # Each document alone, or each stream, whose last token is the first of the next one.
    parts = text.split(documents) if documents else equal_parts(text, streams)
    losses_of_parts = []
    answers = []
    lengths = []
    for part in parts:
        part_losses, part_is_correct = read_alone(lm.eval(), part)
        losses_of_parts.append(part_losses)
        answers.append(part_is_correct)
        lengths.append(len(part_losses))
    losses = torch.cat(losses_of_parts)
    is_correct = torch.cat(answers)
    # A short text leaves some of the streams empty.
    lengths += [0] * (len(result.lengths) - len(lengths))
    assert result.lengths.tolist() == lengths
    assert result.tokens == len(losses)
    assert result.loss == pytest.approx(losses.mean().item(), abs=1e-10), "every token counts alike"
    assert result.accuracy == is_correct.double().mean().item()

    by_position = []
    for position in range(7):
        at_position = torch.cat([part_losses[position::7] for part_losses in losses_of_parts])
        if len(at_position):
            by_position.append(at_position.mean().item())
    assert result.by_position == pytest.approx(by_position, abs=1e-10)
    check_same(result, evaluation_of(losses, *lengths, of_documents=bool(documents), reach=result.reach))
    assert (result.reconstruction_loss is not None) == (model == "compressive" and max(lengths) > 7)


def equal_parts(text, n):
    length = -(-(len(text) - 1) // n)
    return [text[begin : begin + length + 1] for begin in range(0, len(text) - 1, length)]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("documents", [(), LENGTHS])
@pytest.mark.parametrize("n", [2, 20])
def test_shares_of_streams_add_up_to_one_process(documents, n):
    lm = small_lm("compressive")
    text = torch.randint(0, 11, (600,))
    received = []
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
    assert [n_remembered for n_remembered, _, _ in result.by_memory] == [0, 7, 10]
    segments = (slice(7), slice(7, 14), slice(14, None))
    for segment, (n_remembered, mean, width) in zip(segments, result.by_memory, strict=True):
        of_streams = [stream.double()[segment] for stream in losses.split(lengths)]
        assert mean == pytest.approx(torch.cat(of_streams).mean().item())
        if n_remembered < 10 or not of_documents:  # else they are of unequal lengths
            means = [stream.mean().item() for stream in of_streams if len(stream)]
            assert width == pytest.approx(4.303 * statistics.stdev(means) / math.sqrt(3), rel=1e-3)


@pytest.mark.parametrize(("lengths", "of_documents"), [((34, 34, 32), False), ((50, 0, 30, 20), True)])
def test_a_single_long_document_has_no_interval(lengths, of_documents):
    losses = torch.rand(100)
    result = evaluation_of(losses, *lengths, of_documents=of_documents, segment_len=35, reach=100)
    _, _, width = result.by_memory[-1]
    assert math.isnan(width) == of_documents


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
    built_so = small_lm("transformer-xl", positions=positions, segment_len=4, mem_len=8)
    built_so.load_state_dict(lm.state_dict())
    assert evaluate(lm, text, 1).loss == evaluate(built_so, text, 1).loss
    if positions == "learned":
        with pytest.raises(ValueError, match=r"12 positions.* 13"):
            with_lengths(lm, mem_len=9)
    else:
        assert with_lengths(lm, mem_len=500).config.mem_len == 500


@pytest.mark.parametrize(("model", "length"), [("transformer-xl", "c_mem_len"), ("transformer", "mem_len")])
def test_a_length_that_a_model_doesnt_have_is_an_error(model, length):
    with pytest.raises(ValueError, match=f"{length}=4 .* {model}"):
        with_lengths(small_lm(model), **{length: 4})


def n_numbers(evaluation):
    """How many numbers an evaluation holds."""
    return sum(sums.numel() for sums in evaluation._sums.values())


def test_an_evaluation_does_not_grow_with_tokens():
    assert n_numbers(evaluation_of(torch.rand(100_000), segment_len=64, reach=320)) < 100_000 / BLOCK + 200
    lengths = [80] * 100
    of_documents = evaluation_of(torch.rand(8_000), *lengths, of_documents=True, segment_len=4, reach=64)
    assert len(of_documents.by_memory) == 64 / 4 + 1
    assert n_numbers(of_documents) < 5 * 100 + 200
