"""What a training writes, says, measures and returns."""

import io
import math
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from memformers import evaluate, train
from memformers.common.console import Progress
from memformers.common.fields import replace_nested
from memformers.common.files import read_json
from memformers.common.machine import multiplies_bfloat16_faster
from memformers.data import TRAIN, VALIDATION
from memformers.data.sources import Part, Sources
from memformers.data.tokenize_corpus import dataset_from
from memformers.data.tokenizer import CharacterTokenizer
from memformers.evaluation.evaluate import evaluate as evaluate_tokens
from memformers.runs.card import read_card
from memformers.runs.load import load_checkpoint
from memformers.runs.metrics import read_metrics
from memformers.training import distributed, monitor
from memformers.training.config import read_train_config
from memformers.training.job import build_model
from memformers.training.monitor import RunMonitor, default_prompt
from memformers.training.state import NotFiniteError
from memformers.training.text import check_text, spec_of
from memformers.training.validation import EVALUATION_STREAMS, Validation
from tests.builders import small_training
from tests.training.runs import SHORT, dataset_with, train_run, without_times


def test_a_run_leaves_everything_in_its_folder(tmp_path):
    folder = train_run(small_training(model="compressive", max_tokens=512), tmp_path / "run")
    config = read_json(folder / "config.json")
    facts = read_json(folder / "run.json")
    result = read_json(folder / "result.json")
    assert config["model"]["vocab_size"] == len(set(SHORT))
    assert facts["corpus"]["name"].startswith("built-in play")
    assert facts["memory"] == {"one_layer": 16 + 3 * 4, "all_layers": 2 * (16 + 3 * 4)}
    assert facts["environment"]["packages"]["torch"] == version("torch")
    trained = records_with("loss.train", folder)
    evaluated = records_with("loss.valid", folder)
    nats = evaluated[-1]["bits_per_character.valid"] * math.log(2)
    assert nats == pytest.approx(evaluated[-1]["loss.valid"])
    assert set(trained[-1]) == {
        "tokens", "seconds", "loss.train", "bits_per_character.train", "learning_rate",
        "gradient_norm", "tokens_per_second", "memory.length", "memory.compressed_length",
        "reconstruction_loss.train", "gradient_norm.compression",
    }  # fmt: skip
    assert trained[-1]["tokens"] == evaluated[-1]["tokens"] == 512
    assert result["peak_memory_bytes"] > 50 * 2**20
    assert len((folder / "sample.txt").read_text()) == monitor.SAMPLE_CHARACTERS + 1
    model, tokenizer = load_checkpoint(folder, torch.device("cpu"))
    held_out = tokenizer.encode(SHORT[len(SHORT) * 9 // 10 :])
    assert evaluate_tokens(model, held_out, EVALUATION_STREAMS).loss == result["loss"]


def records_with(metric, folder):
    """The records of a run that have this ``metric``."""
    return [record for record in read_metrics(folder) if metric in record]


def test_a_run_that_diverges_names_its_last_good_checkpoint(tmp_path, monkeypatch):
    evaluate = RunMonitor.evaluate

    def poison_afterwards(self, state):
        evaluate(self, state)
        self.model.head.weight.register_hook(lambda grad: grad * float("nan"))

    monkeypatch.setattr(RunMonitor, "evaluate", poison_afterwards)
    with pytest.raises(NotFiniteError, match=r"gradient's norm is nan .* token 1,024 is kept"):
        train_run(small_training(), tmp_path / "run")
    model, _ = load_checkpoint(tmp_path / "run", torch.device("cpu"))
    assert all(p.isfinite().all() for p in model.parameters())
    assert read_card(tmp_path / "run").status.startswith("crashed: NotFiniteError")


def test_train_then_evaluate_from_python(tmp_path):
    config = small_training(model="compressive", max_tokens=500)
    text = "Good morrow, my lord. " * 20
    run = train(config, tmp_path / "run")
    assert run.metrics[-1]["tokens"] >= config.max_tokens
    loaded = train(config, tmp_path / "run", resume=True)
    numbers = evaluate(run.model, run.tokenizer, text)
    assert numbers == evaluate(loaded.model, loaded.tokenizer, text)
    assert numbers["tokens"] == len(text) - 1
    documents = evaluate(run.model, run.tokenizer, [text, text])
    alone = evaluate(run.model, run.tokenizer, text, streams=1)
    assert documents["tokens"] == 2 * (len(text) - 1)
    assert documents["loss_nats"] == pytest.approx(alone["loss_nats"], rel=1e-5)
    assert evaluate(run.model, run.tokenizer, ["", text, "", text]) == documents
    for arguments, words in (
        ((run.tokenizer, ""), "nothing to predict"), ((run.tokenizer, []), "nothing to predict"),
        ((CharacterTokenizer("ab"), "abab"), "tokenizer has 2 tokens, but the model"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            evaluate(run.model, *arguments)
    with pytest.raises(ValueError, match="streams"):
        evaluate(run.model, run.tokenizer, text, streams=0)


def test_a_length_without_use_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="needs model="):
        train(small_training(model="transformer"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_auto_precision_is_kept_on_resume(tmp_path, monkeypatch):
    for faster, chosen in ((False, "float32"), (True, "bfloat16")):
        monkeypatch.setattr(distributed, "multiplies_bfloat16_faster", lambda device, faster=faster: faster)
        for asked, precision in {"auto": chosen, "float32": "float32", "bfloat16": "bfloat16"}.items():
            config = distributed.with_precision(small_training(precision=asked), torch.device("cpu"))
            assert config.step.precision == precision
    config = small_training(max_tokens=64, precision="auto")
    train_run(config, tmp_path)
    (tmp_path / "result.json").unlink()  # as if it had not ended
    monkeypatch.setattr(distributed, "multiplies_bfloat16_faster", lambda device: False)
    train_run(config, tmp_path, resume=True)
    assert read_train_config(tmp_path).step.precision == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx512f", False), ("fpu avx512_bf16 avx", True), ("amx_bf16", True), ("", False)],
)
def test_a_processor_with_instructions_for_bfloat16_takes_it(flags, expected, tmp_path):
    source = tmp_path / "cpuinfo"
    source.write_text(f"processor\t: 0\nflags\t\t: {flags}\n" if flags else "")
    assert multiplies_bfloat16_faster(torch.device("cpu"), source) is expected


LENGTHS = (30, 1, 500, 20, 700, 9)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "read"),
    [((), 3_000, (3_000,)), ((), 0, (10_000,)), (LENGTHS, 540, (30, 1, 500, 9)), (LENGTHS, 9_999, LENGTHS),
     ((1, 1, 9), 2, (1, 1, 9)), ((), 1, (10_000,)), ((2,), 0, (2,))],
)  # fmt: skip
@pytest.mark.parametrize("is_final", [False, True])
def test_an_evaluation_reads_the_first_tokens_or_all(lengths, max_tokens, read, is_final):
    """Of a text of 10,000 bytes, or of documents of these ``lengths``."""
    texts = ["to be or nöt " * (length // 14) + "x" * (length % 14) for length in lengths or (10_000,)]
    parts = [Part(VALIDATION, "x", text.encode(), bool(lengths)) for text in texts]
    sources = Sources("x", "x", [Part(TRAIN, "x", b"to be", bool(lengths)), *parts])
    model = build_model(small_training())
    setting = "final_tokens" if is_final else "evaluation_tokens"
    config = small_training(tokenizer="byte", **{setting: max_tokens})
    validation = Validation(dataset_from(sources, spec_of(config)), config)
    fractions = []
    measurement = validation.evaluate(model, is_final, fractions.append)
    evaluation = measurement.evaluation
    tokens = validation.tokens[: sum(read)]
    documents = read if lengths else ()
    wanted = evaluate_tokens(model, tokens, EVALUATION_STREAMS, documents=documents)
    assert evaluation.loss == wanted.loss
    assert evaluation.tokens == len(tokens) - (len(documents) or 1)
    assert fractions == [i / len(fractions) for i in range(1, len(fractions) + 1)]
    bits = measurement.in_units
    assert bits["bits_per_byte"] == pytest.approx(evaluation.nats / math.log(2) / evaluation.tokens)
    assert bits["bits_per_character"] >= bits["bits_per_byte"]
    assert validation.n_predictable == (sum(lengths) - len(lengths) if lengths else 9_999)


def test_evaluations_read_the_same_tokens(tmp_path, capsys):
    """By these losses the best checkpoint is chosen, and the seconds are counted apart."""
    config = small_training(max_tokens=512, evaluations=3)
    run = train_run(replace_nested(config, evaluation_tokens=500), tmp_path / "part")
    run_with_all = train_run(replace_nested(config, evaluation_tokens=0), tmp_path / "all")
    lines = capsys.readouterr().err
    for part in ("the first 499 of 2,999", "all 2,999"):
        assert f"Evaluations during the training read {part} held-out tokens:" in lines
    assert "The last evaluation reads all 2,999 held-out tokens: " in lines
    result = read_json(run / "result.json")
    evaluated = records_with("loss.valid", run)
    evaluated_all = records_with("loss.valid", run_with_all)
    assert [record["evaluated_tokens"] for record in evaluated] == [499] * 3
    assert [record["evaluated_tokens"] for record in evaluated_all] == [2_999] * 3
    assert result["evaluated_tokens"] == result["held_out_tokens"] == 2_999
    assert result["loss"] == evaluated_all[-1]["loss.valid"] != evaluated[-1]["loss.valid"]
    trained = records_with("loss.train", run)
    assert without_times(trained) == without_times(records_with("loss.train", run_with_all))
    losses = {record["tokens"]: record["loss.valid"] for record in evaluated}
    for folder in run.glob("checkpoints/0*"):
        assert read_json(folder / "training.json")["validation_loss"] == losses[int(folder.name)]
    seconds = [0, *(record["evaluation_seconds"] for record in evaluated), result["evaluation_seconds"]]
    assert seconds == sorted({*seconds})
    assert result["seconds"] == evaluated[-1]["seconds"]


def test_the_result_is_of_the_final_evaluation(tmp_path, capsys):
    """Characters are tokens here, so the units differ by a constant."""
    config = small_training(max_tokens=128, evaluation_tokens=32_768, final_tokens=500)
    result = read_json(train_run(config, tmp_path / "run") / "result.json")
    assert result["bits_per_character"] == pytest.approx(result["loss"] / math.log(2))
    assert result["evaluated_tokens"] == 499
    lines = capsys.readouterr().err
    assert "Evaluations during the training read all 2,999 held-out tokens:" in lines
    assert "The last evaluation reads the first 499 of 2,999 held-out tokens: " in lines


def test_a_vocabulary_size_must_be_the_texts():
    text = dataset_with(SHORT, small_training())
    size = text.tokenizer.vocab_size
    for requested in (None, size, size + 1):
        config = small_training()
        config = replace(config, model=replace(config.model, vocab_size=requested))
        assert spec_of(config).vocab_size == requested
        if requested == size + 1:
            with pytest.raises(ValueError, match=f"vocab_size={requested}, but the text has {size}"):
                check_text(text, config)
        else:
            check_text(text, config)


def test_a_log_has_lines_but_no_bar(capsys, monkeypatch):
    kind = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    for notebook in (False, True):
        monkeypatch.setattr(sys, "stderr", kind() if notebook else sys.stderr)
        for hidden in (True, False):
            with Progress(hidden, total=10, mininterval=0) as bar:
                bar.show("loss 2.5", 5)
                bar.say("a line")
        assert capsys.readouterr() == (("a line\n", "") if notebook else ("", "a line\n"))


@pytest.mark.parametrize(
    ("held_out", "prompt"),
    [("?\n\nGREMIO:\nGood morrow.\n", "?\n\nGREMIO:\n"), ("the end\nand more", "the end\n"),
     ("no line break", "no line break"), ("?!\n--\n", "?!\n")],
)  # fmt: skip
def test_a_sample_goes_on_from_the_first_line_with_a_letter(held_out, prompt):
    assert default_prompt(held_out) == prompt
