"""Trainings on documents: what a step learns from, and that one goes on as if it had never stopped."""

import itertools
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from memformers.common.atomic_dir import numbered
from memformers.data.corpora import Corpus
from memformers.models.config import AdaptiveConfig
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import read_metrics
from memformers.training import run as run_module
from memformers.training.run import train_run
from tests.builders import small_lm, small_training
from tests.training.launches import start
from tests.training.runs import DOCUMENTS, corpus_of_documents, segments_of, train_here, without_times

LONG = pytest.mark.long


def test_accuracy_is_that_of_tokens_that_are_predicted():
    config = small_training(tokens=64 * 7, log_every=7)
    lm = small_lm("transformer-xl", segment_len=16, mem_len=16)
    correct = []
    lm.register_forward_hook(lambda _, inputs, output: correct.append(int(output.scores.correct.sum())))
    segments = list(itertools.islice(segments_of(config, documents=DOCUMENTS), 7))
    records = train_here(lm, config, iter(segments))
    predictions = sum(segment.predictions for segment in segments)
    assert predictions < 7 * 64
    assert records[-1]["accuracy.train"] == sum(correct) / predictions


@pytest.mark.parametrize("lengths", [(90, *[1] * 10), (1, 1, 1)])
def test_documents_in_which_nothing_can_be_predicted_are_an_error(lengths, tmp_path, monkeypatch):
    corpus = Corpus("some", "some", "x" * sum(lengths), documents=lengths)
    monkeypatch.setattr(run_module, "find_text", lambda *_: corpus)
    config = small_training(batch_size=1, model="transformer")
    config = replace(config, model=replace(config.model, segment_len=1))
    with pytest.raises(ValueError, match=r"some has only documents of a single token to (train|validate) on"):
        train_run(config, tmp_path / "run")


@pytest.fixture
def files(tmp_path):
    """A folder of documents, for all processes."""
    folder, text = tmp_path / "texts", corpus_of_documents().text * 8
    folder.mkdir()
    for i in range(0, len(text), 300):
        (folder / f"{i:05}.txt").write_text(text[i : i + 300])
    return folder


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_a_compiled_training_on_documents_compiles_once(model, monkeypatch):
    """As long as segments are whole: from the first step on, every step has the same shapes."""
    compiled = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiled))
    torch.compiler.reset()
    config = small_training(model=model, compile=True, tokens=64 * 8, precision="bfloat16")
    settings = {"n_layers": 1, "vocab_size": 11, "compression_rate": 4, "embedding": "adaptive"}
    adaptive = AdaptiveConfig(d_embed=8)
    config = replace(config, model=replace(config.model, **settings, adaptive=adaptive))
    segments = list(itertools.islice(segments_of(config, documents=DOCUMENTS), 7))
    whole = [segment for segment in segments if len(segment.inputs) == 16]
    train_here(MemoryLM(config.model), config, itertools.cycle(whole))
    assert compiled.frame_count == 1


@LONG
def test_two_processes_go_on_with_documents_bit_for_bit(files, tmp_path):
    options = ["--model", "compressive", "--data", files, "--checkpoint-every", 640, "--keep-checkpoints", 9,
               "--parallel", "ddp"]  # fmt: skip
    whole, folder = tmp_path / "whole", tmp_path / "run"
    said, _ = start(whole, *options, processes=2).communicate()
    assert (whole / "result.json").exists(), said
    shutil.copytree(whole, folder, symlinks=True)
    (folder / "result.json").unlink()
    for later in numbered(folder / "checkpoints")[:-1]:
        shutil.rmtree(later)
    said, _ = start(folder, *options, "--resume", processes=2).communicate()
    assert "continues at token 640" in said
    newest = [numbered(f / "checkpoints")[0] for f in (whole, folder)]
    assert newest[0].name == newest[1].name == "000000002048"
    for name in ("model.safetensors", "optimizer.safetensors", "memory.safetensors"):
        assert (newest[0] / name).read_bytes() == (newest[1] / name).read_bytes(), name
    assert without_times(read_metrics(folder)) == without_times(read_metrics(whole))
