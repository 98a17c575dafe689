"""A training that was stopped and resumed is the training that never stopped, bit for bit; another one is
refused by what differs, and nothing that is no run's is overwritten."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memformers.common.files import numbered, read_json, write_json
from memformers.common.machine import describe_environment
from memformers.comparison.text import MEMORIES, CompareConfig, compare
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import prepare
from memformers.models.config import AdaptiveConfig
from memformers.runs.folder import METRICS, alone_in
from memformers.runs.metrics import read_metrics
from memformers.training import job as job_module
from memformers.training.resuming import cut_metrics
from tests.builders import small_lm, small_training
from tests.training.faults import outcome
from tests.training.runs import (
    SHORT,
    stop,
    train_run,
    write_text_file,
)

LONGER = {
    "log_every": 2,
    "evaluations": 1,
    "max_tokens": 64 * 12,
    "gradient_accumulation_steps": 2,
    "model": "compressive",
}
SLOTS = {"bptt": 2, "compression_rate": 4, "c_mem_len": 8}
ADAPTIVE = {"embedding": "adaptive", "adaptive": AdaptiveConfig((9,), div_val=2)}
# Lengths with which an epoch is a few segments of each of four streams.
SHORT_DOCUMENTS = (70, 15, 120, 1, 60, 33, 90, 25, 40, 50, 30, 46)
# What is trained, with dropout: settings, those of the network, and after which steps it is stopped.
RESUMED = {
    # Stopped before and after a start, an epoch of eight steps, and an evaluation.
    "epochs": (
        {"max_tokens": 64 * 18, "log_every": 4, "chunk_len": 40, "model": "compressive"},
        {},
        (0, 8, 9),
    ),
    "memory grows": (LONGER | {"memory_warmup": 0.8}, {}, (1, 6)),
    # Within an epoch, of nine segments, and at its end.
    "documents": (LONGER, {}, (5, 9)),
    "adaptive": (LONGER | {"precision": "bfloat16", "tokenizer": "frequency"}, ADAPTIVE, (4,)),
    "through slots": (LONGER, SLOTS | {"compression_loss": "none"}, (5,)),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_equals_an_undisturbed_one(name, tmp_path):
    settings, network, steps = RESUMED[name]
    config = small_training(**settings)
    if name == "epochs":
        config = replace(config, data=write_text_file(tmp_path, SHORT[:550]))
    elif name == "documents":
        config = replace(config, data=write_text_file(tmp_path, SHORT, SHORT_DOCUMENTS))
    config = replace(config, model=replace(config.model, dropout=0.3, **network))
    undisturbed = train_run(config, tmp_path / "undisturbed")
    folder = tmp_path / "run"
    for step in steps:
        stop(config, folder, step)
    newest = numbered(folder / "checkpoints")[0]
    saved = set(load_file(newest / "memory.safetensors"))
    assert ("1.bptt_inputs" in saved) == (name == "through slots")
    assert ("n_valid" in saved) == (name == "documents")
    train_run(config, folder, resume=True)
    assert outcome(folder) == outcome(undisturbed)
    if name == "memory grows":
        records = read_metrics(undisturbed)
        lengths = [record["memory.length"] for record in records if "memory.length" in record]
        assert lengths[0] < lengths[-1] >= 14
    for file in ("config.json", "run.json"):
        assert (folder / file).read_bytes() == (undisturbed / file).read_bytes(), file


def test_records_after_the_checkpoint_are_cut_off(tmp_path):
    (tmp_path / METRICS).write_text('{"tokens": 1}\n{"tokens": 2}\n{"tokens": 3}\n{"tok')
    assert cut_metrics(tmp_path, 2) == 2
    assert (tmp_path / METRICS).read_text() == '{"tokens": 1}\n{"tokens": 2}\n'


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped half-way."""
    folder = tmp_path_factory.mktemp("stopped")
    # The built-in play of these tests.
    data = write_text_file(tmp_path_factory.mktemp("text"), SHORT)
    stop(small_training(data=data), folder, 20)
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"learning_rate": 1.0, "seed": 4}, r"optim.learning_rate 0.004 → 1.0, seed 0 → 4"),
     ({"max_tokens": 9_000}, r"max_tokens 2000 → 9000.*A finished run can be extended"),
     ({"model": "compressive"}, r"model.model transformer-xl → compressive"),
     ({"batch_size": 5}, "batch_size 4 → 5"),
     ({"dropout": 0.1, "gradient_accumulation_steps": 2},
      "model.dropout 0.0 → 0.1, step.gradient_accumulation_steps 1 → 2"),
     ({"data": "other.txt"}, "other.txt")],
)  # fmt: skip
def test_resuming_with_other_settings_names_them(changes, message, stopped, here):
    Path("other.txt").write_text("to be\n" * 9_000)
    paths = sorted(stopped.rglob("*"))
    with pytest.raises(ValueError, match=message):
        train_run(small_training(**changes), stopped, resume=True)
    assert sorted(stopped.rglob("*")) == paths


def test_harmless_settings_may_change_on_resume(stopped, tmp_path, monkeypatch):
    with alone_in(stopped), pytest.raises(ValueError, match="another process"):
        train_run(small_training(), stopped, resume=True)
    folder = shutil.copytree(stopped, tmp_path / "copy", symlinks=True)
    changes = {
        "checkpoint_every": 64,
        "keep_checkpoints": 1,
        "gradient_accumulation_steps": 2,
        "device": "cpu",
    }
    other_machine = describe_environment(torch.device("cpu")) | {"device": "another CPU"}
    monkeypatch.setattr(job_module, "describe_environment", lambda device: other_machine)
    train_run(small_training(**changes), folder, resume=True)
    assert read_json(folder / "result.json")["step"] == 32
    assert read_json(folder / "config.json")["checkpoint"]["keep_checkpoints"] == 1
    assert read_json(folder / "run.json")["environments"][1]["device"] == "another CPU"


@pytest.mark.parametrize(("minutes", "tokens"), [(1e-9, [512, 384, 256, 128]), (0.0, [512])])
def test_a_checkpoint_is_kept_when_the_last_one_is_minutes_old(minutes, tokens, tmp_path):
    settings = {"checkpoint_minutes": minutes, "keep_checkpoints": 99}
    train_run(small_training(max_tokens=512, evaluations=1, log_every=2, **settings), tmp_path / "run")
    assert [int(path.name) for path in numbered(tmp_path / "run" / "checkpoints")] == tokens


def compare_all(config, folder, **options):
    compare(CompareConfig(replace(config, model=MEMORIES)), folder, **options)


@pytest.mark.parametrize(
    ("begin", "name", "word"),
    [(train_run, name, f"has a {name}") for name in
     ("config.json", "sample.txt", "report.md", "results.csv", "result.json", "report.html")]
    + [(train_run, name, "already holds") for name in (METRICS, "checkpoints/064/config.json")]
    + [(compare_all, "report.md", "has a report.md")],
)  # fmt: skip
def test_files_of_others_are_not_overwritten(begin, name, word, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=word):
        begin(small_training(), tmp_path)
    assert (tmp_path / name).read_text() == "mine"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]


def test_a_saved_model_does_not_take_the_place_of_a_run(tmp_path):
    write_json(tmp_path / "config.json", asdict(small_training()))
    with pytest.raises(ValueError, match="save_pretrained"):
        small_lm("compressive").save_pretrained(tmp_path)


@pytest.mark.parametrize("place", ["", "checkpoints"])
def test_a_folder_that_cannot_be_written_is_an_os_error(place, tmp_path):
    blocked = tmp_path / "run" / place
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("a file, where a folder is needed")
    with pytest.raises(OSError, match="run"):
        train_run(small_training(), tmp_path / "run")


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("begin", [train_run, compare_all])
def test_a_run_is_not_scattered_over_the_current_folder(begin, resume):
    with pytest.raises(ValueError, match="current folder"):
        begin(small_training(), Path(), resume=resume)


def test_a_run_may_lie_below_its_texts_not_among_them(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"This is {name}.\n" * 100)
    config = small_training(max_tokens=512, data=str(tmp_path))
    folder = tmp_path / "runs" / "first"
    train_run(config, folder)
    (folder / "result.json").unlink()
    with pytest.warns(UserWarning, match="left out: runs/first"):
        train_run(config, folder, resume=True)
    assert read_json(folder / "run.json")["corpus"]["documents"] == 2
    for begin in (train_run, compare_all):
        with (
            pytest.warns(UserWarning, match="folders of runs"),
            pytest.raises(ValueError, match="texts to train on"),
        ):
            begin(config, tmp_path)
    tokens = prepare(CorpusSpec(str(tmp_path / "a.txt"), tokenizer="character"), tmp_path / "tokens")
    with pytest.raises(ValueError, match="texts to train on"):
        train_run(small_training(data=str(tokens)), tokens)
