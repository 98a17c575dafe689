import math
import statistics

import pytest
import torch

from memformers.common.files import read_json
from memformers.data.tokenizers import ByteTokenizer, CharacterTokenizer
from memformers.evaluation.documents import (
    Reading,
    beginning_of,
    evaluate_documents,
    evaluate_texts,
    grouped,
    losses_of_documents,
    reading_of,
    summary_of_documents,
)
from memformers.evaluation.evaluate import Evaluation, evaluate, summary
from tests.builders import MODELS, small_lm
from tests.processes import run

LENGTHS = [30, 1, 8, 53, 2, 9, 22, 7, 1]
"""Documents in tokens, some of which end with a segment of 7, and some in which nothing is predicted."""


def texts_of(lengths):
    return [torch.randint(0, 11, (length,)) for length in lengths]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("streams", [1, 3, 16])
def test_documents_side_by_side_are_what_each_is_alone(model, streams):
    lm, texts = small_lm(model, dropout=0.3), texts_of(LENGTHS)
    result = evaluate_texts(lm, texts, streams)
    assert lm.training
    alone = [evaluate(lm, text, 1) for text in texts if len(text) > 1]
    losses = torch.cat([a.losses for a in alone])
    torch.testing.assert_close(result.losses, losses, rtol=0, atol=1e-10)
    assert torch.equal(result.correct, torch.cat([a.correct for a in alone]))
    assert result.loss == pytest.approx(losses.mean().item(), abs=1e-10), "every token counts alike"
    assert result.documents == tuple(length - 1 for length in LENGTHS)


def test_each_document_is_read_once_beside_others_of_like_length():
    reading = reading_of(LENGTHS, 3, 7)
    assert [[LENGTHS[n] for n in group] for group in reading.groups] == [[53, 30, 22], [9, 8, 7], [2]]
    assert reading.predicted() == tuple(length - 1 for length in LENGTHS)
    positions = [(n, start) for numbers, start in reading.steps for n in numbers]
    assert len(positions) == len(set(positions)) == sum(-(-(length - 1) // 7) for length in LENGTHS)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("steps", [1, 2, 9, 12, 50])
def test_the_beginning_of_an_evaluation_of_documents_is_that_of_its_first_steps(model, steps):
    lm, tokens = small_lm(model), torch.cat(texts_of(LENGTHS))
    reading = Reading(tuple(LENGTHS), grouped(LENGTHS, [0, 2, 3], 2) + grouped(LENGTHS, [5, 6, 7], 2), 7)
    calls = []
    whole = evaluate_documents(lm, tokens, reading)
    alone = evaluate_documents(lm, tokens, reading, lambda: calls.append(1), steps)
    beginning = beginning_of(whole, reading, steps)
    assert len(calls) == min(steps, len(reading.steps))
    assert torch.equal(beginning.losses, alone.losses)
    assert torch.equal(beginning.correct, alone.correct)
    for name in ("loss", "accuracy", "reconstruction_losses", "stream_length", "documents"):
        assert getattr(beginning, name) == getattr(alone, name)


def test_losses_are_grouped_by_their_place_in_the_document():
    losses = torch.rand(17)
    result = Evaluation(0.0, 0.0, (), losses, losses > 0, 9, documents=(9, 0, 5, 3))
    parts = [part.double() for part in losses_of_documents(result)]
    found = result.by_memory(4, reach=100)
    expected = {before: [p[before : before + 4] for p in parts if len(p) > before] for before in (0, 4, 8)}
    assert [before for before, _, _ in found] == [0, 4, 8]
    for before, mean, _ in found:
        assert mean == pytest.approx(torch.cat(expected[before]).mean().item())
    assert math.isnan(found[2][2]), "a single document came so far"
    for place, mean in enumerate(result.by_position(4)):
        same = [loss.item() for part in parts for loss in part[place::4]]
        assert mean == pytest.approx(statistics.mean(same))


def test_the_uncertainty_is_that_over_documents():
    """Of three of equal length, Student's t over their means."""
    losses = torch.rand(15)
    result = Evaluation(0.0, 0.0, (), losses, losses > 0, 5, documents=(5, 5, 5))
    means = [part.double().mean().item() for part in losses.split(5)]
    assert result.uncertainty == pytest.approx(4.303 * statistics.stdev(means) / math.sqrt(3), rel=1e-3)


def test_bits_of_documents_are_those_of_each_by_its_characters_and_bytes():
    texts = ["naïve", "x", "to be"]
    losses = [torch.rand(n) for n in (5, 0, 4)]
    together = torch.cat(losses)
    result = Evaluation(together.mean().item(), 0.0, (), together, together > 0, 5, documents=(5, 0, 4))
    numbers = summary_of_documents(result, texts)
    nats = together.double().sum().item()
    assert numbers["bits_per_character"] == pytest.approx(nats / math.log(2) / (4 + 4))
    assert numbers["bits_per_byte"] == pytest.approx(nats / math.log(2) / (5 + 4))
    assert numbers["word_perplexity"] == pytest.approx(math.exp(nats / 4))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharacterTokenizer("aéß cd\n")])
def test_a_single_document_has_the_numbers_of_a_text(tokenizer):
    text = "éß cd\n" * 20
    lm = small_lm("transformer-xl", vocab_size=256)
    tokens = tokenizer.encode(text)
    as_text, as_document = evaluate(lm, tokens, 1), evaluate_texts(lm, [tokens], 1)
    expected, numbers = summary(as_text, text), summary_of_documents(as_document, [text])
    for name in expected.keys() - {"uncertainty_nats"}:
        assert numbers[name] == pytest.approx(expected[name])


def test_documents_without_anything_to_predict_are_an_error():
    with pytest.raises(ValueError, match="documents of a single token have nothing to predict"):
        reading_of([1, 1], 2, 7)


def test_the_command_evaluates_a_folder_of_documents(trained, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("I swear: the moon forgets her promise.\n")
    (tmp_path / "texts" / "b.txt").write_text("Again: an honest man.\n")
    ended = run("evaluate", "--checkpoint", trained, "--text", tmp_path / "texts", "--out", tmp_path / "out",
                "--device", "cpu")  # fmt: skip
    assert ended.code == 0, ended.err
    assert "in 2 documents" in ended.out
    found = read_json(tmp_path / "out" / "evaluation.json")
    assert [(d["name"], d["tokens"]) for d in found["documents"]] == [("a.txt", 38), ("b.txt", 21)]
    mean = sum(d["tokens"] * d["loss"] for d in found["documents"]) / 59
    assert mean == pytest.approx(found["loss_nats"], rel=1e-6)
    (tmp_path / "both.txt").write_text("I swear: the moon forgets her promise.\n|Again: an honest man.\n|")
    ended = run("evaluate", "--checkpoint", trained, "--text", tmp_path / "both.txt", "--out", tmp_path / "2",
                "--document-separator", "|", "--device", "cpu")  # fmt: skip
    assert ended.code == 0, ended.err
    again = read_json(tmp_path / "2" / "evaluation.json")
    assert again["loss_nats"] == found["loss_nats"]
    assert [d["name"] for d in again["documents"]] == ["both.txt:1", "both.txt:2"]


def test_the_command_says_what_is_wrong_with_documents(trained, tmp_path):
    evaluated = ("evaluate", "--checkpoint", trained, "--text")
    assert run(*evaluated, tmp_path).said("is a folder without any file of UTF-8 text")
    assert run(*evaluated, tmp_path / "gone.jsonl").said("doesn't exist; name a text file")
    (tmp_path / "x.txt").write_text("Again.\n")
    assert run(*evaluated, tmp_path, "--document-separator", "|").said("divides a single text, but")
    assert run(*evaluated, tmp_path / "x.txt", "--document-separator", "|").said("'|' doesn't occur in x.txt")
