"""Which checkpoint is the best one: losses are compared if they were measured on the same tokens."""

import random
from dataclasses import replace

import pytest

from memformers import ModelConfig, TrainConfig
from memformers.common import files
from memformers.common.fields import replace_nested
from memformers.common.files import numbered, read_json, write_json
from memformers.runs.metrics import read_metrics
from memformers.training.checkpoints import keep_best_and_newest
from tests.training.runs import train_run

NETWORK = ModelConfig(d_model=16, n_heads=2, n_layers=1, d_ff=16, segment_len=16, mem_len=16)


def write_checkpoint(parent, step, loss, evaluated_tokens):
    """A folder that says what a checkpoint says of its evaluation."""
    with files.atomic_dir(parent / f"{step:012}") as temporary:
        facts = {"validation_loss": loss, "evaluated_tokens": evaluated_tokens}
        write_json(temporary / "training.json", facts)


def steps_in(parent):
    return [int(path.name) for path in numbered(parent)]


def best_step(parent):
    return int((parent / "best").resolve().name)


@pytest.mark.parametrize(
    ("evaluations", "best", "kept"),
    [
        # One number of tokens; of two equal losses, the newer.
        ([(9, 2.0, 500), (16, 1.0, 500), (30, 1.0, 500), (32, 2.5, 500)], 30, [32, 30]),
        # The newest has no evaluation.
        ([(9, 1.0, 500), (16, 2.0, 500), (30, None, 0)], 9, [30, 9]),
        # Extended: the loss over more tokens is higher, and the first one is the best of these.
        ([(9, 2.0, 500), (16, 1.0, 500), (30, 3.0, 900)], 30, [30, 16]),
        ([(9, 2.0, 500), (16, 1.0, 500), (30, 3.0, 900), (32, 4.0, 900)], 30, [32, 30, 16]),
        # Extended, and the loss over more tokens is lower.
        ([(9, 2.0, 500), (16, 1.5, 500), (30, 1.0, 900), (32, 0.5, 900)], 32, [32, 16]),
        # Extended, and not evaluated since.
        ([(9, 1.0, 500), (16, 2.0, 500), (30, None, 0), (32, None, 0)], 9, [32, 9]),
        # Extended twice.
        ([(9, 1.0, 500), (16, 2.0, 500), (30, 3.0, 900), (32, 2.0, 700), (40, 5.0, 700)], 32,
         [40, 32, 30, 9]),
        # Extended, and evaluated on the same tokens as before.
        ([(9, 1.0, 500), (16, 2.0, 500), (30, 1.5, 500)], 9, [30, 9]),
    ],
)  # fmt: skip
def test_the_best_of_each_evaluation_size_is_kept(evaluations, best, kept, tmp_path):
    for evaluation in evaluations:
        write_checkpoint(tmp_path, *evaluation)
    keep_best_and_newest(tmp_path, 1)
    assert best_step(tmp_path) == best
    assert steps_in(tmp_path) == kept


def test_the_best_checkpoint_of_an_earlier_version_is_kept(tmp_path):
    """They did not say how many tokens they were evaluated on."""
    for step, loss in ((9, 2.0), (16, 1.0), (30, 1.5)):
        with files.atomic_dir(tmp_path / f"{step:012}") as temporary:
            write_json(temporary / "training.json", {"validation_loss": loss})
    keep_best_and_newest(tmp_path, 1)
    assert (best_step(tmp_path), steps_in(tmp_path)) == (16, [30, 16])
    write_checkpoint(tmp_path, 40, 3.0, 500)
    keep_best_and_newest(tmp_path, 1)
    assert (best_step(tmp_path), steps_in(tmp_path)) == (40, [40, 16])


@pytest.mark.parametrize("damaged", ["broken", '{"validation_loss": 0.5}'])
def test_a_damaged_checkpoint_is_not_the_best(damaged, tmp_path):
    for step, loss in ((9, 2.0), (16, 1.0), (30, 1.5)):
        write_checkpoint(tmp_path, step, loss, 500)
    (tmp_path / f"{16:012}" / "training.json").write_text(damaged)
    keep_best_and_newest(tmp_path, 1)
    assert steps_in(tmp_path) == [30]
    assert best_step(tmp_path) == 30


def hard_text(random_numbers, length):
    return "".join(random_numbers.choice("bcdefgh") for _ in range(length))


@pytest.fixture
def config(tmp_path):
    """A training whose held-out text is easy at first; evaluations read more of it in a longer training."""
    random_numbers = random.Random(0)
    blocks = ["a" * 200 + hard_text(random_numbers, 200) for _ in range(100)]
    (tmp_path / "train.txt").write_text("".join(blocks))
    (tmp_path / "valid.txt").write_text("a" * 600 + hard_text(random_numbers, 3_000))
    config = TrainConfig(NETWORK, data=str(tmp_path / "train.txt"), max_tokens=4_000, batch_size=8)
    settings = {"validation": str(tmp_path / "valid.txt"), "device": "cpu", "evaluations": 2}
    return replace_nested(config, **settings, checkpoint_minutes=0, keep_checkpoints=1)


def test_the_best_checkpoint_is_of_the_same_tokens(config, tmp_path):
    folder = train_run(config, tmp_path / "run")
    checkpoints = folder / "checkpoints"
    earlier_best = best_step(checkpoints)
    train_run(replace(config, max_tokens=16_000), folder, resume=True)
    records = [record for record in read_metrics(folder) if "loss.valid" in record]
    assert [record["evaluated_tokens"] for record in records] == [511, 511, 999, 999]
    earlier = records[:2]
    newer = records[2:]
    lowest = min(record["loss.valid"] for record in newer)
    assert min(record["loss.valid"] for record in earlier) < lowest, "the text is easy at first"
    assert best_step(checkpoints) == next(r["tokens"] for r in newer if r["loss.valid"] == lowest)
    assert earlier_best in steps_in(checkpoints)
    for checkpoint in numbered(checkpoints):
        about = read_json(checkpoint / "training.json")
        measured = next(record for record in records if record["tokens"] == int(checkpoint.name))
        assert about["validation_loss"] == measured["loss.valid"]
        assert about["evaluated_tokens"] == measured["evaluated_tokens"]
