import json
import math
from importlib.metadata import version

import pytest
import torch

from memformers.common.files import read_json
from memformers.common.processes import module_command
from memformers.convert.load import load_checkpoint
from memformers.evaluation.evaluate import evaluate
from memformers.runs.folder import read_metrics
from memformers.tracking import relay
from memformers.training import api, callbacks
from memformers.training.data_module import EVALUATION_STREAMS
from memformers.training.loop import NotFiniteError
from tests.builders import small_training
from tests.training.runs import SHORT, train_run


def test_a_run_leaves_everything_in_its_folder(tmp_path):
    folder = train_run(small_training(model="compressive"), tmp_path / "run")
    config, facts, result = (read_json(folder / f"{n}.json") for n in ("config", "run", "result"))
    assert config["model"]["vocab_size"] == len(set(SHORT))
    assert facts["corpus"]["name"].startswith("built-in play")
    assert facts["memory"] == {"one_layer": 16 + 3 * 4, "all_layers": 2 * (16 + 3 * 4)}
    assert facts["environment"]["packages"]["torch"] == version("torch")
    records = read_metrics(folder)
    last = [r for r in records if "loss.valid" in r][-1]
    assert last["bits_per_character.valid"] == pytest.approx(last["loss.valid"] / math.log(2), rel=1e-3)
    assert result["bits_per_character"] == pytest.approx(result["loss"] / math.log(2), rel=1e-3)
    trained = [r for r in records if "loss.train" in r]
    expected = {
        "tokens", "seconds", "loss.train", "bits_per_character.train", "accuracy.train", "learning_rate",
        "gradient_norm", "tokens_per_second", "memory.length", "memory.compressed_length",
        "reconstruction_loss.train", "gradient_norm.compression",
    }  # fmt: skip
    assert set(trained[-1]) == expected
    assert trained[-1]["tokens"] == last["tokens"] >= 2_000
    assert result["peak_memory_bytes"] > 50 * 2**20
    assert len((folder / "sample.txt").read_text()) == callbacks.SAMPLE_CHARACTERS + 1


def test_the_checkpoint_gives_the_last_evaluation_again(tmp_path):
    folder = train_run(small_training(), tmp_path / "run")
    model, tokenizer = load_checkpoint(folder, torch.device("cpu"))
    validation = tokenizer.encode(SHORT[len(SHORT) * 9 // 10 :])
    again = evaluate(model, validation, EVALUATION_STREAMS)
    assert again.loss == read_json(folder / "result.json")["loss"]


def test_a_run_that_diverges_keeps_the_last_good_checkpoint_and_says_where(tmp_path, monkeypatch):
    train = api.train_steps

    def poisoned(model, segments, config, **hooks):
        def evaluate(state):
            hooks["evaluate"](state)
            model.head.weight.register_hook(lambda grad: grad * float("nan"))

        return train(model, segments, config, **(hooks | {"evaluate": evaluate}))

    monkeypatch.setattr(api, "train_steps", poisoned)
    monkeypatch.setattr(relay, "module_command", module_command)  # labml's own
    with pytest.raises(NotFiniteError, match=r"gradient's norm is nan at token .* token 1,024 is kept"):
        train_run(small_training(), tmp_path / "run")
    model, _ = load_checkpoint(tmp_path / "run", torch.device("cpu"))
    assert all(p.isfinite().all() for p in model.parameters())
    status = next((tmp_path / "run" / "labml").glob("*/*/run_log.jsonl")).read_text()
    assert json.loads(status)["status"] == "crashed"


@pytest.mark.parametrize(
    ("held_out", "prompt"),
    [("?\n\nGREMIO:\nGood morrow.\n", "?\n\nGREMIO:\n"),
     ("the end of a line\nand more", "the end of a line\n"),
     ("no line break", "no line break"),
     ("?!\n--\n", "?!\n")],
)  # fmt: skip
def test_a_sample_goes_on_from_the_first_line_with_a_letter(held_out, prompt):
    assert callbacks.opening(held_out) == prompt
