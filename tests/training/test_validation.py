"""What the evaluations of a training read of the held-out text, and in which units their losses are."""

import math
from dataclasses import replace

import pytest

from memformers.common.files import read_json
from memformers.data import TRAIN, VALIDATION
from memformers.data.sources import Part, Sources
from memformers.data.tokenize_corpus import dataset_from
from memformers.evaluation.evaluate import evaluate
from memformers.runs.folder import read_metrics
from memformers.training.callbacks import EVALUATION_STREAMS, Validation
from memformers.training.run import build_model, spec_of, with_vocabulary
from tests.builders import small_training
from tests.training.runs import train_run, without_times

LENGTHS = (30, 1, 500, 20, 700, 9)


@pytest.mark.parametrize(
    ("lengths", "most", "read"),
    [((), 3_000, (3_000,)), ((), 0, (10_000,)), (LENGTHS, 540, (30, 1, 500, 9)), (LENGTHS, 9_999, LENGTHS),
     ((1, 1, 9), 2, (1, 1, 9)), ((), 1, (10_000,)), ((2,), 0, (2,))],
)  # fmt: skip
def test_an_evaluation_reads_the_first_tokens_or_all(lengths, most, read):
    """Of a text of 10,000 bytes, or of documents of these ``lengths``."""
    texts = ["to be or nöt " * (length // 14) + "x" * (length % 14) for length in lengths or (10_000,)]
    parts = [Part(VALIDATION, "x", text.encode(), bool(lengths)) for text in texts]
    sources = Sources("x", "x", [Part(TRAIN, "x", b"to be", bool(lengths)), *parts])
    documents, model = read if lengths else (), build_model(small_training())
    for final, name in ((False, "evaluation_tokens"), (True, "final_tokens")):
        config, fractions = small_training(tokenizer="byte", **{name: most}), []
        validation = Validation(dataset_from(sources, spec_of(config)), config)
        evaluation, bits = validation.evaluate(model, final, fractions.append)
        tokens = validation.tokens[: sum(read)]
        assert evaluation.loss == evaluate(model, tokens, EVALUATION_STREAMS, documents=documents).loss
        assert evaluation.tokens == len(tokens) - (len(documents) or 1)
        assert fractions == [i / len(fractions) for i in range(1, len(fractions) + 1)]
        assert bits["bits_per_byte"] == pytest.approx(evaluation.nats / math.log(2) / evaluation.tokens)
        assert bits["bits_per_character"] >= bits["bits_per_byte"]
        assert validation.predictable == (sum(lengths) - len(lengths) if lengths else 9_999)


def test_every_record_is_over_the_same_tokens_and_the_result_over_all_and_none_changes_what_is_learned(
    tmp_path,
):
    """By these losses the best checkpoint is chosen, and the seconds are counted apart."""
    run, whole = (
        train_run(small_training(tokens=512, evaluations=3, evaluation_tokens=most), tmp_path / str(most))
        for most in (500, 0)
    )
    result = read_json(run / "result.json")
    (evaluated, trained), (wholes, same) = (
        [[r for r in read_metrics(folder) if name in r] for name in ("loss.valid", "loss.train")]
        for folder in (run, whole)
    )
    assert [r["evaluated_tokens"] for r in evaluated + wholes] == [499] * 3 + [2_999] * 3
    assert result["evaluated_tokens"] == result["held_out_tokens"] == 2_999
    assert result["loss"] == wholes[-1]["loss.valid"] != evaluated[-1]["loss.valid"]
    assert without_times(trained) == without_times(same)
    losses = {r["tokens"]: r["loss.valid"] for r in evaluated}
    for folder in run.glob("checkpoints/0*"):
        assert read_json(folder / "training.json")["validation_loss"] == losses[int(folder.name)]
    seconds = [0, *(r["evaluation_seconds"] for r in evaluated), result["evaluation_seconds"]]
    assert seconds == sorted({*seconds})
    assert result["seconds"] == evaluated[-1]["seconds"]


@pytest.mark.parametrize(("while_training", "final"), [(32_768, 500), (500, 0)])
def test_the_result_is_of_the_last_tokens_read_in_nats_and_in_bits(while_training, final, tmp_path):
    """Characters are tokens here, so the units differ by a constant."""
    config = small_training(tokens=128, evaluation_tokens=while_training, final_tokens=final)
    result = read_json(train_run(config, tmp_path / "run") / "result.json")
    assert result["bits_per_character"] == pytest.approx(result["loss"] / math.log(2))
    assert result["evaluated_tokens"] == min(final or 3_000, 3_000) - 1


def test_a_vocabulary_of_256_is_asked_for_like_any_other_and_none_leaves_it_to_the_text():
    for size in (None, 255, 256, 257):
        config = small_training()
        config = replace(config, model=replace(config.model, vocab_size=size))
        assert spec_of(config).vocab_size == size
        if size is None:
            assert with_vocabulary(config, 53).model.vocab_size == 53
        else:
            assert with_vocabulary(config, size) == config
            with pytest.raises(ValueError, match=f"vocab_size={size}, but the text has 53"):
                with_vocabulary(config, 53)
