"""A training that was stopped and goes on is the training that never stopped, bit for bit."""

import shutil
from dataclasses import asdict, replace

import pytest
from safetensors.torch import load_file

from memformers.common.atomic_dir import numbered
from memformers.common.fields import changed
from memformers.common.files import read_json, write_json
from memformers.models.config import AdaptiveConfig
from memformers.runs.folder import METRICS, read_metrics
from memformers.training import api, callbacks
from memformers.training import run as run_module
from memformers.training.checkpoints import read_about
from memformers.training.resume import cut_metrics, differences
from tests.builders import MODELS, small_training
from tests.training.runs import (
    SHORT,
    find_documents,
    find_short_text,
    finding,
    reseal,
    stop,
    train_run,
    without_times,
)


def configs():
    """What is trained, by name, and after which steps it is stopped; with dropout, and Muon where it is not
    said."""
    # A text so short that its chunks come in a new order in step 8 and each 8 steps.
    plain = {"log_every": 4, "chunk_len": 40}
    for model in MODELS:  # before, at and after a start, an epoch, an evaluation, and the end
        yield model, small_training(model=model, **plain), (0, 8, 9, 16, 17, 32)
    longer = {"log_every": 2, "evaluations": 1, "tokens": 64 * 12, "accumulate": 2}
    for model in MODELS[1:]:
        config = small_training(model=model, **longer, memory_warmup=0.8)
        yield f"{model}, memory grows", config, (1, 6)
        config = small_training(model=model, **longer)
        yield f"{model}, documents", config, (5, 9)  # within an epoch, of nine segments, and at its end
    yield "transformer-xl, through memory", small_training(**longer, tbptt=1), (1, 4)
    config = small_training(model="compressive", **longer, precision="bfloat16", tokenizer="frequency")
    adaptive = {"embedding": "adaptive", "adaptive": AdaptiveConfig((9,), div_val=2)}
    yield "compressive, bfloat16, adaptive", replace(config, model=replace(config.model, **adaptive)), (4,)
    for loss in ("none", "attention"):
        config = small_training(model="compressive", **longer, tbptt=1)
        slots = {"bptt": 2, "compression_loss": loss, "compression_rate": 4, "c_mem_len": 8}
        config = replace(config, model=replace(config.model, **slots))
        yield f"compressive, through slots, {loss}", config, (4,)


RESUMED = {name: (config, steps) for name, config, steps in configs()}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_has_the_same_records_sample_result_and_weights(name, tmp_path, monkeypatch):
    config, steps = RESUMED[name]
    find_text = finding(SHORT[:550]) if config.chunk_len == 40 else find_short_text
    find_text = find_documents if "documents" in name else find_text
    monkeypatch.setattr(run_module, "find_text", find_text)
    config = replace(config, model=replace(config.model, dropout=0.3))
    whole, folder = train_run(config, tmp_path / "whole"), tmp_path / "run"
    for step in steps:
        stop(config, folder, step)
    kept = set(load_file(numbered(folder / "checkpoints")[0] / "memory.safetensors"))
    assert ("slot_inputs.1" in kept) == ("slots" in name)
    assert ("valid" in kept) == ("documents" in name)
    train_run(config, folder, resume=True)
    records = read_metrics(whole)
    assert without_times(read_metrics(folder)) == without_times(records)
    lengths = [record["memory.length"] for record in records if "memory.length" in record]
    assert "grows" not in name or lengths[0] < lengths[-1] >= 14
    for file in ("sample.txt", "config.json", "run.json"):
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file
    changing = {"seconds", "evaluation_seconds", "peak_memory_bytes"}
    first, second = ({k: v for k, v in read_json(f / "result.json").items() if k not in changing}
                     for f in (whole, folder))  # fmt: skip
    assert first == second
    newest = [numbered(f / "checkpoints")[0] for f in (whole, folder)]
    for file in ("model.safetensors", "optimizer.safetensors", "memory.safetensors", "random.json"):
        assert (newest[0] / file).read_bytes() == (newest[1] / file).read_bytes(), file
    assert not list((folder / "checkpoints").glob(".*"))


def test_peak_memory_is_the_highest_of_all_processes_and_ranks(tmp_path, monkeypatch):
    here, of_another_rank = [0], 75
    monkeypatch.setattr(callbacks, "peak_memory", lambda device: here[0])
    monkeypatch.setattr(
        run_module.Distributed,
        "highest",
        lambda ranks, number: max(number, of_another_rank) if number > 1 else number,
    )
    config = small_training(tokens=64 * 8, evaluations=2)  # checkpoints after steps 4 and 8

    def kept():
        return read_about(numbered(tmp_path / "checkpoints")[0]).peak_memory_bytes

    for step, here[0], highest in ((2, 70, 75), (3, 80, 80), (5, 900, 900)):
        stop(config, tmp_path, step)
        assert kept() == highest
    here[0] = 60
    train_run(config, tmp_path, resume=True)
    assert kept() == read_json(tmp_path / "result.json")["peak_memory_bytes"] == 900


def test_records_after_the_checkpoint_are_cut_off(tmp_path):
    (tmp_path / METRICS).write_text('{"tokens": 1}\n{"tokens": 2}\n{"tokens": 3}\n{"tok')
    assert cut_metrics(tmp_path, 2) == 2
    assert (tmp_path / METRICS).read_text() == '{"tokens": 1}\n{"tokens": 2}\n'
    assert cut_metrics(tmp_path, 7) == len(read_metrics(tmp_path)) == 2


def test_a_run_without_a_checkpoint_begins_anew_and_a_finished_one_is_left_alone(
    tmp_path, monkeypatch, capsys
):
    config = small_training(tokens=64 * 8, evaluations=1)
    with monkeypatch.context() as patch:
        patch.setattr(api, "train_steps", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_run(config, tmp_path)
    (tmp_path / METRICS).write_text('{"tokens": 5}\n')
    train_run(config, tmp_path, resume=True)
    assert [r["tokens"] for r in read_metrics(tmp_path)] == [320, 512, 512]
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    train_run(config, tmp_path, resume=True)
    assert "is finished; nothing is left to train" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped half-way."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "find_text", find_short_text)
        stop(small_training(), folder, 20)
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"learning_rate": 1.0, "seed": 4}, r"learning_rate 0.004 → 1.0, seed 0 → 4"),
     ({"tokens": 9_000}, r"tokens 2000 → 9000.*A finished run can go on"),
     ({"model": "compressive"}, r"model.model transformer-xl → compressive"),
     ({"batch_size": 5}, "batch_size 4 → 5"),
     ({"tbptt": 1}, "tbptt 0 → 1"),
     ({"memory_warmup": 0.5}, r"memory_warmup 0.0 → 0.5")],
)  # fmt: skip
def test_another_config_is_refused_by_the_names_of_what_differs(changes, message, stopped):
    before = sorted(stopped.rglob("*"))
    with pytest.raises(ValueError, match=message):
        train_run(small_training(**changes), stopped, resume=True)
    assert sorted(stopped.rglob("*")) == before


def test_another_corpus_is_refused(stopped, monkeypatch):
    monkeypatch.setattr(run_module, "find_text", finding("to be\n" * 9_000, name="other.txt"))
    with pytest.raises(ValueError, match=r"built-in play .*other.txt"):
        train_run(small_training(), stopped, resume=True)


def test_what_changes_nothing_that_is_learned_may_differ_and_other_versions_are_a_note(stopped, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(stopped, folder, symlinks=True)
    newest = numbered(folder / "checkpoints")[0]
    facts = read_json(newest / "training.json")
    facts["environment"]["packages"]["torch"] = "2.5.0"
    write_json(newest / "training.json", facts)
    reseal(newest)
    changes = {"checkpoint_every": 64, "keep_checkpoints": 1, "skip_bad_steps": 2, "device": "cpu"}
    with pytest.warns(RuntimeWarning, match=r"made in another environment \(packages.torch 2.5.0 → "):
        train_run(small_training(**changes), folder, resume=True)
    assert read_json(folder / "result.json")["step"] == 32
    assert read_json(folder / "config.json")["checkpoint"]["skip_bad_steps"] == 2


def test_with_dropout_a_batch_in_other_parts_is_another_training(stopped):
    config = small_training()
    changes = [asdict(changed(config, **change)) for change in ({"accumulate": 2}, {"skip_bad_steps": 2})]
    assert [differences(asdict(config), other) for other in changes] == ["", ""]
    before, *changes = ({**each, "model": {"dropout": 0.1}} for each in (asdict(config), *changes))
    assert [differences(before, other) for other in changes] == ["step.accumulate 1 → 2", ""]


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    with (
        api.alone_in(tmp_path),
        pytest.raises(ValueError, match="is being trained by another process"),
    ):
        train_run(small_training(), tmp_path, resume=True)
