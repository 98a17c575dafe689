import pytest

from memformers import evaluate, train
from tests.builders import small_training


def test_a_model_is_trained_in_one_call_and_evaluated_in_another(tmp_path):
    config, text = small_training(model="compressive", tokens=500), "Good morrow, my lord. " * 20
    run = train(config, tmp_path / "run")
    assert run.metrics[-1]["tokens"] >= config.tokens
    again = train(config, tmp_path / "run", resume=True)  # is only loaded
    numbers = evaluate(run.model, run.tokenizer, text)
    assert numbers == evaluate(again.model, again.tokenizer, text)
    assert numbers["tokens"] == len(text) - 1
    documents = evaluate(run.model, run.tokenizer, [text, text])
    alone = evaluate(run.model, run.tokenizer, text, streams=1)
    assert documents["tokens"] == 2 * (len(text) - 1)
    assert documents["loss_nats"] == pytest.approx(alone["loss_nats"], rel=1e-5)
    with pytest.raises(ValueError, match="0 tokens has nothing to predict"):
        evaluate(run.model, run.tokenizer, "")


def test_a_setting_without_effect_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="is for model='transformer-xl' or 'compressive'"):
        train(small_training(model="transformer"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
