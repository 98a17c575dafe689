"""The guides say what was measured of learning while reading."""

import json
from dataclasses import asdict
from itertools import combinations, product

import pytest

from docs.building.results import about, mean, seeds
from docs.building.tables.learning import READINGS
from docs.building.tables.recall import MODELS
from experiments.prompt_learning import N_PREDICTED, PROMPT_LENGTHS
from memformers import LearnConfig
from memformers.common.intervals import paired
from tests.docs.pages import as_written, prose

GUIDE_TO_EVALUATION = "docs/how-to/evaluate.md"
GUIDE_TO_GENERATION = "docs/how-to/generate.md"


def as_json(config):
    """The fields of a config as a file has them, with lists for tuples."""
    return json.loads(json.dumps(asdict(config)))


@pytest.mark.parametrize("step", ["sgd", "rms"])
def test_the_guide_to_evaluation_says_what_learning_saved_and_took(step):
    def measured(model, measure):
        return seeds("learning", f"{model}-shakespeare", measure)[0]

    sentences = []
    for model in MODELS:
        saved = measured(model, f"{step}: saved (nats)")
        half_width = measured(model, f"{step}: saved, half width (nats)")
        assert saved > half_width
        static = measured(model, "loss (nats)")
        learning = measured(model, f"{step}: loss (nats)")
        sentences.append(f"`{model}-shakespeare` from {static:.4f} to {learning:.4f}")
        sentences.append(f"(−{saved:.3f} ± {half_width:.3f})")
    ratios = [f"{measured(model, f'{step}: CPU time, ratio'):.1f}" for model in MODELS]
    sentences.append(" and ".join(ratios))
    late = [f"{measured(model, f'{step}: saved in the second half (nats)'):.3f}" for model in MODELS]
    sentences.append(" and ".join(late))
    guide = prose(GUIDE_TO_EVALUATION)
    assert [sentence for sentence in sentences if sentence not in guide] == []
    assert about("learning")["learn"][step] == as_json(LearnConfig(learn_step=step))


def test_the_generation_guide_quotes_prompt_learning():
    saved = {}
    for n_prompt in PROMPT_LENGTHS:
        static, learning = (seeds("prompt_learning", f"prompt-{n_prompt}", reading) for reading in READINGS)
        saved[n_prompt] = paired(static, learning)
        assert saved[n_prompt].leaves_out_zero
    short, long = saved.values()
    sentence = (
        f"The loss of the next 256 characters falls by {as_written(short)} nats per character after a prompt "
        f"of 256, and by {as_written(long)} after one of 1,024 ({short.n} prompts"
    )
    assert sentence in prose(GUIDE_TO_GENERATION)
    assert about("prompt_learning")["learn"] == as_json(LearnConfig())
    assert about("prompt_learning")["predicted tokens"] == N_PREDICTED == 256


# The experiments on learning, and how the guide to evaluation names their texts.
LEARNED_TEXTS = {"learning_worth": "On Tiny Shakespeare", "learning_worth_python": "On Python"}


def learned_losses(experiment, arm, measure):
    return seeds(experiment, arm, f"{measure} (nats)")


@pytest.mark.parametrize(("experiment", "text"), [*LEARNED_TEXTS.items()])
def test_the_evaluation_guide_quotes_learning(experiment, text):
    def losses(arm, measure):
        return learned_losses(experiment, arm, measure)

    memory_static = paired(losses("none", "static"), losses("xl", "static"))
    memory_learning = paired(losses("none", "learning"), losses("xl", "learning"))
    learning_without_memory = mean(losses("none", "learning saves"))
    learning_with_memory = mean(losses("xl", "learning saves"))
    learning_not_memory = paired(losses("xl", "static"), losses("none", "learning"))
    forgotten = paired(losses("xl", "training text, after learning"), losses("xl", "training text, static"))
    for gain in (
        memory_static, memory_learning, learning_without_memory, learning_with_memory, learning_not_memory,
        forgotten,
    ):  # fmt: skip
        assert gain.leaves_out_zero
        assert gain.mean > 0

    def after(words):
        return guide[guide.index(words) :]

    guide = prose(GUIDE_TO_EVALUATION)
    assert (
        f"saves {as_written(memory_static)} nats per character without learning and "
        f"{as_written(memory_learning)} with it"
    ) in after(text)
    assert (
        f"learning saves {as_written(learning_without_memory)} without memory and "
        f"{as_written(learning_with_memory)} with it"
    ) in after(text)
    assert as_written(learning_not_memory) in after("better than memory without learning, by")
    assert as_written(forgotten) in after("the loss of the training text rises by")


def test_the_evaluation_guide_names_memories_that_differ():
    different = set()
    for experiment, reading in product(LEARNED_TEXTS, READINGS):
        for arm, rival in combinations(("selective", "compressive", "xl"), 2):
            losses = learned_losses(experiment, arm, reading)
            if paired(losses, learned_losses(experiment, rival, reading)).leaves_out_zero:
                different.add((experiment, reading, arm, rival))
    assert different == {("learning_worth_python", "learning", "compressive", "xl")}
    compressive = learned_losses("learning_worth_python", "compressive", "learning")
    difference = paired(compressive, learned_losses("learning_worth_python", "xl", "learning"))
    assert f"by +{as_written(difference)}." in prose(GUIDE_TO_EVALUATION)


# How far back a word occurred last.
DISTANCES = ("1 – 63", "64 – 127", "128 – 255", "256 – 511", "512 – 1,023", "1,024 – 2,047", "2,048 or more")


def learning_saves(experiment, words):
    """What learning saves of the loss of words at a distance, or of words that occur for the first time."""
    static, learning = (seeds(experiment, "xl", f"{words}, {reading}") for reading in READINGS)
    return paired(static, learning)


def test_the_guide_to_evaluation_says_which_words_learning_helps():
    gains = {}
    for distance in DISTANCES:
        gains[distance] = learning_saves("learning_worth", distance)
        assert gains[distance].leaves_out_zero
    *_, third, second, best = sorted(DISTANCES, key=lambda distance: gains[distance].mean)
    assert {third, second, best} == {"64 – 127", "128 – 255", "256 – 511"}
    low = gains[third].mean
    high = gains[best].mean
    guide = prose(GUIDE_TO_EVALUATION)
    assert f"64 to 511 characters ago, {low:.2f} to {high:.2f} nats per character" in guide
    # Words that were not read yet get harder.
    new = learning_saves("learning_worth", "first")
    assert new.mean < -new.half_width
    assert f"become harder, by {-new.mean:.3f} ± {new.half_width:.3f}." in guide


def test_the_evaluation_guide_quotes_learning_by_distance_in_python():
    means = []
    for distance in DISTANCES:
        gain = learning_saves("learning_worth_python", distance)
        assert gain.leaves_out_zero
        means.append(gain.mean)
    new = learning_saves("learning_worth_python", "first")
    assert not new.leaves_out_zero
    sentence = (
        f"On Python, it saves {min(means):.2f} to {max(means):.2f} at all distances, and new words don't "
        f"become harder ({as_written(new)})."
    )
    assert sentence in prose(GUIDE_TO_EVALUATION)
