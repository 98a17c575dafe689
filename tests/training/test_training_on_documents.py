"""Trainings on documents: what a step learns from, and that one goes on as if it had never stopped."""

import itertools
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter

from memformers import AdaptiveConfig
from memformers.common.files import read_json
from memformers.comparison.text import pin_corpus
from memformers.data.corpora import Corpus, load_corpus
from memformers.data.streams import IGNORED
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.runs.atomic_dir import numbered
from memformers.runs.folder import read_metrics
from memformers.training import run as run_module
from memformers.training.distributed import Distributed
from memformers.training.gradients import Batch, InTurn, backward
from memformers.training.loop import train
from memformers.training.optimizers import build_optimizers
from memformers.training.run import train_run
from memformers.training.state import TrainingState
from tests.builders import small_lm, small_training
from tests.training.launches import program, start
from tests.training.ranks_program import train_in_double
from tests.training.runs import DOCUMENTS, corpus_of_documents, poisoned, resumed, segments_of, without_times

LONG = pytest.mark.long


@pytest.fixture
def documents(monkeypatch):
    """Trainings read documents."""
    monkeypatch.setattr(run_module, "load_corpus", lambda *_: corpus_of_documents())


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
@pytest.mark.usefixtures("documents")
def test_a_resumed_run_on_documents_has_the_same_records_result_and_weights(model, tmp_path, monkeypatch):
    """With dropout; an epoch is nine segments."""
    config = small_training(model=model, tokens=64 * 12, log_every=4, evaluations=1)
    config = replace(config, model=replace(config.model, dropout=0.3))
    whole, folder = resumed(config, tmp_path, monkeypatch, (5, 9))  # within an epoch and at its end
    assert (folder / "run.json").read_bytes() == (whole / "run.json").read_bytes()
    assert read_json(folder / "run.json")["corpus"]["documents"] == 12
    assert read_json(folder / "result.json")["loss"] == read_json(whole / "result.json")["loss"]
    assert load_file(numbered(whole / "checkpoints")[0] / "memory.safetensors")["valid"].shape == (4,)


@pytest.mark.usefixtures("float64")
def test_a_step_on_documents_learns_from_each_of_them_alone():
    """In an epoch's first segment, where what a document has left behind is in the segment itself."""
    config = small_training(batch_size=2, model="transformer-xl")
    lm = small_lm("transformer-xl", segment_len=64, mem_len=16)
    config = replace(config, model=lm.config)
    segment = next(segments_of(config, documents=DOCUMENTS))
    assert segment.doc_starts[1:].any()
    part = Batch(segment.inputs, segment.targets, segment.doc_starts)
    outcome = backward(
        InTurn(lm), [part], Memory(()), config, Distributed(), predictions=segment.predictions
    )  # fmt: skip
    losses = []
    for b in range(2):
        firsts = [*segment.doc_starts[:, b].nonzero()[:, 0].tolist(), 64]
        for first, end in itertools.pairwise(firsts):
            inputs, targets = (x[first:end, b : b + 1] for x in (segment.inputs, segment.targets))
            losses.append(lm(inputs, None, targets).scores.losses[targets != IGNORED])
    assert outcome.loss == pytest.approx(torch.cat(losses).mean().item(), abs=1e-10)
    ends = torch.cat([segment.doc_starts[1:], segment.doc_starts[:0]]).sum()
    assert segment.predictions == 128 - ends - (segment.targets[-1] == IGNORED).sum()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("embedding", ["plain", "adaptive"])
def test_each_prediction_counts_alike_whatever_part_of_a_step_it_is_in(embedding):
    """Also where a part has none: then its mean is not a number, and it adds nothing."""
    changes = {"embedding": "adaptive", "adaptive": AdaptiveConfig((2, 5), 2)} if embedding != "plain" else {}
    lm = small_lm("transformer-xl", **changes)
    inputs, targets = torch.randint(0, 11, (2, 5, 4))
    targets[1:, 0] = targets[:, 1] = targets[2, 3] = IGNORED
    doc_starts = torch.rand(5, 4) < 0.3
    found = []
    for accumulate in (1, 2, 4):
        lm.zero_grad()
        outcome = backward(
            InTurn(lm), [Batch(inputs, targets, doc_starts)], Memory(()),
            small_training(batch_size=4, accumulate=accumulate), Distributed(),
            predictions=int((targets != IGNORED).sum()),
        )  # fmt: skip
        found.append((outcome, [p.grad for p in lm.parameters()]))
    (one, expected), *others = found
    assert one.loss > 0
    for several, grads in others:
        assert several.loss == pytest.approx(one.loss, abs=1e-12)
        assert several.correct == one.correct
        assert torch.equal(several.memory.valid, one.memory.valid)
        for grad, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", ["attention", "auto-encoding"])
@pytest.mark.parametrize("segments", [1, 2, 3])
@pytest.mark.parametrize("c_mem_len", [4, (0, 4)])
def test_each_stream_counts_alike_in_the_reconstruction_loss_whatever_part_of_a_step_it_is_in(
    loss, segments, c_mem_len
):
    """Of the first part of two all count, and of the second one; of the last of four, none. In the segment
    after it, others do, and the third is the first of an epoch, which is long enough to compress."""
    lm = small_lm("compressive", mem_len=6, segment_len=6, compression_loss=loss, c_mem_len=c_mem_len)
    *_, memory = [lm(torch.randint(0, 11, (6, 4))).memory for _ in range(2)]
    memory = replace(memory, valid=torch.tensor([99, 3, 99, 99]))
    inputs, targets = torch.randint(0, 11, (2, 6, 4))
    doc_starts = torch.zeros(6, 4, dtype=torch.bool)
    doc_starts[5, 3] = True
    parts = [
        Batch(inputs, targets, doc_starts),
        Batch(targets, inputs, doc_starts.roll(1, dims=1)),
        Batch(inputs.repeat(3, 1), targets.repeat(3, 1), doc_starts.repeat(3, 1), starts_over=True),
    ]
    found = []
    for accumulate in (1, 2, 4):
        lm.zero_grad()
        config = replace(small_training(batch_size=4, accumulate=accumulate), model=lm.config)
        outcome = backward(InTurn(lm), parts[:segments], memory, config, Distributed())
        found.append((outcome.auxiliary_loss, [p.grad for p in lm.parameters()]))
    (one, expected), *others = found
    assert one > 0
    for several, grads in others:
        assert several == pytest.approx(one, abs=1e-12)
        for grad, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-10)


def test_accuracy_is_that_of_tokens_that_are_predicted():
    records, config = [], small_training(tokens=64 * 7, log_every=7)
    lm = small_lm("transformer-xl", segment_len=16, mem_len=16)
    correct = []
    hook = lm.register_forward_hook(
        lambda _, inputs, output: correct.append(int(output.scores.correct.sum()))
    )
    segments = list(zip(range(7), segments_of(config, documents=DOCUMENTS), strict=False))
    train(lm, (s for _, s in segments), config, record=lambda _, found: records.append(found),
          evaluate=lambda _: None)  # fmt: skip
    hook.remove()
    predictions = sum(segment.predictions for _, segment in segments)
    assert predictions < 7 * 64
    assert records[-1]["accuracy.train"] == sum(correct) / predictions


def test_after_a_skipped_step_a_new_document_does_not_see_the_one_before_it():
    """The third step is skipped, in which documents begin in some streams; their memory is hidden then."""
    config = small_training(tokens=64 * 3, skip_bad_steps=1)
    lm = poisoned(small_lm("transformer-xl", segment_len=16, mem_len=16), "head", {2})
    segments = list(itertools.islice(segments_of(config, documents=DOCUMENTS), 3))
    state, before = TrainingState(build_optimizers(lm, config)), []
    with pytest.warns(RuntimeWarning, match="the step is skipped"):
        train(lm, iter(segments), config, record=lambda *_: None, evaluate=lambda _: None, state=state,
              maybe_checkpoint=lambda state: before.append(state.memory))  # fmt: skip
    begun = segments[2].doc_starts.any(0)
    assert begun.any()
    assert not begun.all()
    assert (state.memory.valid[begun] == 0).all()
    assert torch.equal(state.memory.valid[~begun], before[2].valid[~begun])
    assert state.memory.mem is before[2].mem


def test_documents_of_a_comparison_are_pinned_with_their_boundaries(tmp_path):
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text(f"This is {name}.\n")
    corpus = load_corpus(str(tmp_path / "texts"))
    assert load_corpus(pin_corpus(corpus, tmp_path)).sha256 == corpus.sha256
    downloaded = Corpus("x", "http://example.org/input.txt", "OneTwo", documents=(3, 3))
    assert load_corpus(pin_corpus(downloaded, tmp_path, "|"), "|").sha256 == downloaded.sha256


@pytest.mark.parametrize("lengths", [(9_000, 1, 1), (1, 1, 1)])
def test_documents_in_which_nothing_can_be_predicted_are_an_error(lengths, tmp_path, monkeypatch):
    corpus = Corpus("some", "some", "x" * sum(lengths), documents=lengths)
    monkeypatch.setattr(run_module, "load_corpus", lambda *_: corpus)
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
    config = small_training(model=model, compile=True, tokens=64 * 8)
    config = replace(config, model=replace(config.model, n_layers=1, vocab_size=11, compression_rate=4))
    segments = list(itertools.islice(segments_of(config, documents=DOCUMENTS), 7))
    whole = [segment for segment in segments if len(segment.inputs) == 16]
    train(MemoryLM(config.model), itertools.cycle(whole), config, record=lambda *_: None,
          evaluate=lambda _: None)  # fmt: skip
    assert compiled.frame_count == 1


@LONG
def test_two_ranks_learn_from_documents_as_one_process_does(tmp_path):
    """In float64; each rank has other predictions, in parts of the streams, and other streams that its
    reconstruction loss counts."""
    config = small_training(
        model="compressive", batch_size=4, tokens=4 * 16 * 20, log_every=1, document_separator="any"
    )
    train_in_double(tmp_path, config)
    program(tmp_path, replace(config, parallel="ddp", accumulate=2), 2)
    one = load_file(tmp_path / "single.0.safetensors")
    assert "valid" in one
    for rank in range(2):
        for name, tensor in load_file(tmp_path / f"ddp.{rank}.safetensors").items():
            torch.testing.assert_close(tensor, one[name], rtol=0, atol=1e-10)


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
