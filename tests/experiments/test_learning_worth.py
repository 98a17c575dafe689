"""What memory saves when weights learn, too, at a size that takes seconds."""

import csv
from dataclasses import replace

import pytest
import torch

from experiments import learning_worth as program
from experiments.learning_worth import LearningWorth, choose_rate, half_of, learn_text, measure_model
from memformers.common.files import read_json
from memformers.data.builtin import write_play
from memformers.data.tokenizer import ByteTokenizer
from memformers.evaluation.evaluate import evaluate
from tests.builders import small_lm, small_training

ARMS = ("none", "xl")
RATES = (0.01, 0.1)


@pytest.fixture
def measured(tmp_path, monkeypatch, quick_runs):
    """An experiment of moments with two seeds: its folder, and its values by measure, arm and seed."""
    base = small_training(evaluations=1)
    monkeypatch.setattr(program, "BASE", replace(base, model=replace(base.model, model="transformer-xl")))
    monkeypatch.setattr(program, "N_RELEARNED", 256)
    out = tmp_path / "a"
    # A tenth of it is read, and learned segment by segment, six times for each arm.
    data = tmp_path / "play.txt"
    data.write_text(write_play(5_000))
    LearningWorth(data=str(data), out=out, arms=ARMS, seeds=2, tokens=256, rates=RATES, dashboard="off").run()
    values = {}
    with (out / "results.csv").open() as file:
        for row in csv.DictReader(file):
            values[row["measure"], row["arm"], row["seed"]] = float(row["value"])
    return out, values


def test_runs_are_measured_with_the_rate_of_the_first_seed(measured):
    out, values = measured
    for arm in ARMS:
        first = read_json(out / f"characters/{arm}/learning.json")
        second = read_json(out / f"characters/{arm}-seed1/learning.json")
        by_rate = first["first half, by learning rate"]
        assert [*by_rate] == [*map(str, RATES)]
        assert first["learning rate"] == second["learning rate"] == float(min(by_rate, key=by_rate.get))
        for seed, result in (("0", first), ("1", second)):
            losses = result["second half"]
            assert values["static (nats)", arm, seed] == losses["static"]
            saved = values["learning saves (nats)", arm, seed]
            assert saved == losses["static"] - losses["learning"]
            n_tokens = sum(group["tokens"] for group in result["by distance"].values())
            assert n_tokens == losses["tokens"]
    page = (out / "report.md").read_text()
    assert "How much is forgotten" in page
    assert "Transformer-XL, minus no memory" in page


def test_a_rate_is_chosen_without_the_second_half():
    lm = small_lm("transformer-xl", vocab_size=256)
    tokens = torch.randint(256, (200,))
    n_first = half_of(tokens)
    changed = torch.cat((tokens[: n_first + 1], torch.randint(256, (200 - n_first - 1,))))
    assert choose_rate(lm, tokens, RATES) == choose_rate(lm, changed, RATES)


def test_losses_of_the_second_half_are_those_after_the_middle():
    lm = small_lm("transformer-xl", vocab_size=256).eval()
    text = "a word and a name " * 12
    tokens = torch.tensor([*text.encode()])
    training = tokens[:65].numpy()
    measured = measure_model(lm, ByteTokenizer(), tokens, training, 0.1)
    losses = []
    evaluate(lm, tokens, 1, progress=losses.append)
    n_first = half_of(tokens)
    assert measured["second half"]["static"] == torch.cat(losses)[n_first:].mean().item()
    assert measured["second half"]["tokens"] == len(tokens) - 1 - n_first


def test_a_model_that_learned_a_text_is_measured_and_restored():
    lm = small_lm("transformer-xl", vocab_size=256).eval()
    trained_weights = {name: weight.clone() for name, weight in lm.state_dict().items()}
    tokens = torch.full((300,), 7)
    training = torch.full((129,), 8).numpy()
    static = evaluate(lm, training, program.STREAMS).loss
    losses, afterwards = learn_text(lm, tokens, training, 0.3)
    assert len(losses) == 299
    assert losses[-9:].mean() < losses[:9].mean()
    assert afterwards > static  # 8 was forgotten
    for name, weight in lm.state_dict().items():
        assert torch.equal(weight, trained_weights[name])
