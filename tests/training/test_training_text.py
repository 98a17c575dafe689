import itertools
import math
from dataclasses import replace

import pytest

from memformers.common.files import read_json
from memformers.data import TRAIN, VALIDATION
from memformers.data.sources import Part, Sources
from memformers.data.tokenize_corpus import dataset_from
from memformers.runs.folder import read_metrics
from memformers.training import run as run_module
from memformers.training import text as text_module
from memformers.training.run import build_model
from memformers.training.text import (
    EVALUATED_A_TRAINED,
    EVALUATION_STREAMS,
    FEWEST_SEGMENTS,
    Validation,
    spec_of,
)
from tests.builders import small_training
from tests.training.runs import find_short_text, finding, train_run, without_times


def validation(characters=100_000, **changes):
    """The validation of a text of bytes, a tenth of which is held out."""
    config = small_training(tokenizer="byte", **changes)
    return Validation(finding("to be, or nöt to be? " * (characters // 21))(config), config)


def of_documents(lengths, **changes):
    """The validation of documents of these ``lengths`` in characters, one byte each, all of them held out."""
    documents = ["to be or not " * (length // 13) + "x" * (length % 13) for length in lengths]
    parts = [Part(VALIDATION, "x", document.encode(), True) for document in documents]
    config = small_training(tokenizer="byte", **changes)
    sources = Sources("x", "x", [Part(TRAIN, "x", b"to be", True), *parts])
    return Validation(dataset_from(sources, spec_of(config)), config)


LENGTHS = (1, 2, *(10 + n * n % 97 * 3 for n in range(120)))


@pytest.mark.parametrize("tokens", [6_000, 40_000, 123_457])
@pytest.mark.parametrize("evaluations", [2, 6, 20])
def test_evaluations_before_the_last_take_no_more_than_their_share_of_the_work(tokens, evaluations):
    part = validation(tokens=tokens, evaluations=evaluations, evaluation_share=0.1)
    read = part.segments * part.reading.segment_len * EVALUATION_STREAMS
    if part.segments > FEWEST_SEGMENTS:
        assert (evaluations - 1) * read / EVALUATED_A_TRAINED <= 0.1 * tokens
    if part.segments < len(part.reading.steps):
        more = read + part.reading.segment_len * EVALUATION_STREAMS
        assert (evaluations - 1) * more / EVALUATED_A_TRAINED > 0.1 * tokens, "it could have read more"


@pytest.mark.parametrize("tokens", [6_000, 20_000, 40_000])
def test_every_kth_document_is_read_so_that_the_share_of_the_work_is_kept(tokens):
    part = of_documents(LENGTHS, tokens=tokens, evaluations=3, evaluation_share=0.1)
    predicted = part.reading.predicted(part.segments)
    read = [n for n, count in enumerate(predicted) if count]
    assert len({b - a for a, b in itertools.pairwise(read)}) == 1
    assert all(predicted[n] == LENGTHS[n] - 1 for n in read), "each of them whole"
    assert 2 * sum(predicted) / EVALUATED_A_TRAINED <= 0.1 * tokens
    assert part.segments < len(part.reading.steps)


def test_of_a_single_long_document_the_beginning_is_read():
    part = of_documents((50_000,), tokens=6_000, evaluations=3)
    assert part.segments == FEWEST_SEGMENTS * EVALUATION_STREAMS
    assert part.reading.predicted(part.segments) == (part.segments * part.reading.segment_len,)
    assert part.reading.predicted() == (49_999,)


@pytest.mark.parametrize("lengths", [(), LENGTHS, (5_000,), (3_000, 40, 2_000)])
def test_the_part_is_the_same_in_an_evaluation_of_all(lengths):
    """Of a plain text, without ``lengths``, the beginning of each stream."""
    part = of_documents(lengths, evaluations=3) if lengths else validation()
    model = build_model(small_training(model="compressive"))
    told = {True: [], False: []}
    whole, alone = (part.evaluate(model, is_whole, told[is_whole].append) for is_whole in (True, False))
    assert whole.tokens == len(part.split.tokens) - (len(lengths) or 1) > alone.tokens
    assert part.metrics(part.part(whole)) == part.metrics(alone)
    assert part.metrics(alone)["evaluated_tokens"] == alone.tokens
    assert len(told[True]) == len(part.reading.steps)
    assert told[False] == [i / part.segments for i in range(1, part.segments + 1)]
    for found in (whole, alone) if lengths else ():  # of ASCII
        assert part.bits_per_character(found) == pytest.approx(found.loss / math.log(2), rel=1e-6)


@pytest.mark.parametrize("lengths", [(), LENGTHS, (50_000,), (3_000, 40, 2_000)])
@pytest.mark.parametrize("limit", [1_000, 3_333])
def test_the_last_evaluation_is_bounded_too_and_reads_the_same_whatever_the_segments(
    lengths, limit, monkeypatch
):
    monkeypatch.setattr(text_module, "LAST_TOKENS", limit)

    def made(tokens=500, segment_len=5, **changes):
        network = replace(small_training().model, segment_len=segment_len)
        changes = {"tokens": tokens, "model": network, "chunk_len": 0, **changes}
        return of_documents(lengths, **changes) if lengths else validation(**changes)

    predicted = made().reading.predicted()
    assert limit / 2 < sum(predicted) <= limit < made().predictable
    assert made(segment_len=7).reading.predicted() == predicted
    share = text_module.LAST_SHARE * EVALUATED_A_TRAINED
    longer = made(tokens=int(3 * limit / share))
    assert limit < sum(longer.reading.predicted()) <= 3 * limit
    all_read = made(evaluation_share=0.0)
    assert sum(all_read.reading.predicted()) == all_read.predictable
    last, part = (made().evaluate(build_model(small_training()), is_last, print) for is_last in (True, False))
    assert made().metrics(made().part(last)) == made().metrics(part)
    assert made().read(last) == f"{sum(predicted):,} of {made().predictable:,}"
    assert made().bits_per_character(last) > 0


def test_all_is_read_where_there_is_work_enough_or_no_limit():
    for changes in ({"tokens": 10**9}, {"evaluation_share": 0.0}, {"evaluations": 1}):
        part = validation(**changes)
        S = part.reading.segment_len
        assert (part.segments - 1) * S < part.reading.lengths[0] <= part.segments * S
        documents = of_documents(LENGTHS, **changes)
        assert sum(documents.reading.predicted(documents.segments)) == sum(LENGTHS) - len(LENGTHS)


def test_bits_per_character_of_the_whole_are_those_of_its_loss_and_characters():
    part = validation()
    whole = part.evaluate(build_model(small_training()), True, lambda fraction: None)
    counts = part.split.counts
    assert whole.tokens == counts.bytes - 1 > counts.characters, "some characters are of two bytes"
    assert part.bits_per_character(whole) == pytest.approx(
        whole.loss * whole.tokens / math.log(2) / (counts.characters - 1)
    )
    beginning = part.part(whole)
    same_rate = part.bits_per_character(beginning) / part.bits_per_character(whole)
    assert same_rate == pytest.approx(beginning.loss / whole.loss, rel=1e-6)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that reads part of the held-out text until its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "find_text", find_short_text)
        return train_run(small_training(evaluations=3), tmp_path_factory.mktemp("run") / "run")


def test_every_record_is_over_the_same_tokens_and_the_result_over_all(run):
    """By these losses the best checkpoint is chosen, and the seconds are counted apart."""
    evaluated = [r for r in read_metrics(run) if "loss.valid" in r]
    result = read_json(run / "result.json")
    assert len(evaluated) == 3
    assert {r["evaluated_tokens"] for r in evaluated} == {FEWEST_SEGMENTS * 16 * EVALUATION_STREAMS}
    assert result["evaluated_tokens"] == result["held_out_tokens"] == 2_999
    assert result["loss"] != evaluated[-1]["loss.valid"]
    losses = {r["tokens"]: r["loss.valid"] for r in evaluated}
    for folder in run.glob("checkpoints/0*"):
        assert read_json(folder / "training.json")["validation_loss"] == losses[int(folder.name)]
    seconds = [r["evaluation_seconds"] for r in evaluated]
    assert 0 < seconds[0] < seconds[1] < seconds[2] <= result["evaluation_seconds"]
    assert result["seconds"] == evaluated[-1]["seconds"]


def test_evaluations_change_nothing_that_is_learned(run, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "find_text", find_short_text)
    config = small_training(evaluations=3, evaluation_share=0.0)
    folder = train_run(config, tmp_path / "run")
    trained = [[r for r in without_times(read_metrics(f)) if "loss.train" in r] for f in (run, folder)]
    assert trained[0] == trained[1]
    wholes = [r for r in read_metrics(folder) if "loss.valid" in r]
    assert wholes[-1]["loss.valid"] == read_json(run / "result.json")["loss"]
    assert wholes[-1]["evaluated_tokens"] == 2_999


def test_a_text_of_a_few_tokens_is_evaluated(monkeypatch):
    part = validation(characters=21)
    model = build_model(small_training())
    assert math.isfinite(part.evaluate(model, True, lambda fraction: None).loss)
