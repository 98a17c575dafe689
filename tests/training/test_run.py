"""What a training writes, says and returns, from Python."""

import math
from importlib.metadata import version

import pytest
import torch

from memformers import evaluate, train
from memformers.common import machine
from memformers.common.files import read_json
from memformers.convert.load import load_checkpoint
from memformers.evaluation.evaluate import evaluate as evaluate_tokens
from memformers.runs.folder import read_card, read_metrics
from memformers.training import api, callbacks, distributed
from memformers.training.callbacks import EVALUATION_STREAMS
from memformers.training.config import read_train_config
from memformers.training.loop import NotFiniteError
from tests.builders import small_training
from tests.training.runs import SHORT, train_run


def test_a_run_leaves_everything_in_its_folder(tmp_path):
    folder = train_run(small_training(model="compressive", tokens=512), tmp_path / "run")
    config, facts, result = (read_json(folder / f"{n}.json") for n in ("config", "run", "result"))
    assert config["model"]["vocab_size"] == len(set(SHORT))
    assert facts["corpus"]["name"].startswith("built-in play")
    assert facts["memory"] == {"one_layer": 16 + 3 * 4, "all_layers": 2 * (16 + 3 * 4)}
    assert facts["environment"]["packages"]["torch"] == version("torch")
    records = read_metrics(folder)
    trained, evaluated = ([r for r in records if f"loss.{of}" in r] for of in ("train", "valid"))
    assert evaluated[-1]["bits_per_character.valid"] * math.log(2) == pytest.approx(
        evaluated[-1]["loss.valid"]
    )
    assert result["bits_per_character"] * math.log(2) == pytest.approx(result["loss"])
    assert set(trained[-1]) == {
        "tokens", "seconds", "loss.train", "bits_per_character.train", "learning_rate",
        "gradient_norm", "tokens_per_second", "memory.length", "memory.compressed_length",
        "reconstruction_loss.train", "gradient_norm.compression",
    }  # fmt: skip
    assert trained[-1]["tokens"] == evaluated[-1]["tokens"] == 512
    assert result["peak_memory_bytes"] > 50 * 2**20
    assert len((folder / "sample.txt").read_text()) == callbacks.SAMPLE_CHARACTERS + 1
    model, tokenizer = load_checkpoint(folder, torch.device("cpu"))
    held_out = tokenizer.encode(SHORT[len(SHORT) * 9 // 10 :])
    assert evaluate_tokens(model, held_out, EVALUATION_STREAMS).loss == result["loss"]


def test_a_run_that_diverges_keeps_the_last_good_checkpoint_and_says_where(tmp_path, monkeypatch):
    train = api.train_steps

    def poisoned(model, segments, config, **hooks):
        def evaluate(state):
            hooks["evaluate"](state)
            model.head.weight.register_hook(lambda grad: grad * float("nan"))

        return train(model, segments, config, **(hooks | {"evaluate": evaluate}))

    monkeypatch.setattr(api, "train_steps", poisoned)
    with pytest.raises(NotFiniteError, match=r"gradient's norm is nan .* token 1,024 is kept"):
        train_run(small_training(), tmp_path / "run")
    model, _ = load_checkpoint(tmp_path / "run", torch.device("cpu"))
    assert all(p.isfinite().all() for p in model.parameters())
    assert read_card(tmp_path / "run").status.startswith("crashed: NotFiniteError")


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
    with pytest.raises(ValueError, match="nothing to predict"):
        evaluate(run.model, run.tokenizer, "")
    with pytest.raises(ValueError, match="needs model="):  # a length without use
        train(small_training(model="transformer"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_auto_is_bfloat16_where_it_is_faster_and_stays_so_on_another_machine(tmp_path, monkeypatch):
    for faster, chosen in ((False, "float32"), (True, "bfloat16")):
        monkeypatch.setattr(distributed, "multiplies_bfloat16_faster", lambda device, faster=faster: faster)
        for asked, precision in {"auto": chosen, "float32": "float32", "bfloat16": "bfloat16"}.items():
            config = distributed.with_precision(small_training(precision=asked), torch.device("cpu"))
            assert config.step.precision == precision
    config = small_training(tokens=64, precision="auto")
    train_run(config, tmp_path)
    (tmp_path / "result.json").unlink()  # as if it had not ended
    monkeypatch.setattr(distributed, "multiplies_bfloat16_faster", lambda device: False)
    train_run(config, tmp_path, resume=True)
    assert read_train_config(tmp_path).step.precision == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx512f", False), ("fpu avx512_bf16 avx", True), ("amx_bf16", True), ("", False)],
)
def test_a_processor_with_instructions_for_bfloat16_takes_it(flags, expected, monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n" if flags else "")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert machine.multiplies_bfloat16_faster(torch.device("cpu")) is expected
