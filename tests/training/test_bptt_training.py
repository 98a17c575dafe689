"""Trainings whose compressions learn from the language model's loss."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from memformers.runs.atomic_dir import numbered
from memformers.runs.folder import read_metrics
from memformers.training.gradients import clip
from memformers.training.loop import train
from memformers.training.run import train_run
from tests.builders import small_lm, small_training
from tests.training.launches import program
from tests.training.ranks_program import train_in_double
from tests.training.runs import DOCUMENTS, segments_of, stop_at, without_times


def training(compression_loss="none", **changes):
    """Of slots that stand for 4 positions, of which a segment becomes 4, up to 8 of them are made anew."""
    config = small_training(model="compressive", batch_size=4, log_every=1, **changes)
    model = replace(config.model, bptt=2, compression_loss=compression_loss, compression_rate=4, c_mem_len=8)
    return replace(config, model=model)


@pytest.mark.parametrize("documents", [(), DOCUMENTS])
def test_compressions_learn_without_a_loss_of_their_own_and_records_say_how_much(documents):
    config, records = training(tokens=64 * 7), []
    lm = small_lm("compressive", **{name: getattr(config.model, name) for name in (
        "segment_len", "mem_len", "c_mem_len", "compression_rate", "bptt", "compression_loss")})  # fmt: skip
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    train(lm, segments_of(config, documents=documents), config, evaluate=lambda _: None,
          record=lambda _, found: records.append(found))  # fmt: skip
    for name, p in lm.named_parameters():
        assert ".compress." not in name or not torch.equal(p, before[name]), name
    assert all(
        p.grad is not None and p.grad.any() for f in lm.transformer.compressions for p in f.parameters()
    )
    assert not any("reconstruction_loss.train" in found for found in records)
    assert [("gradient_norm.compression" in found) for found in records[:3]] == [False, False, True]
    assert records[3]["gradient_norm.compression"] > 0
    language, compressing = clip(lm, 1e-6)  # what the last step had, shortened for each by itself
    assert min(language, compressing) > 1e-5
    grads = [p.grad.flatten() for f in lm.transformer.compressions for p in f.parameters()]
    assert torch.cat(grads).norm() == pytest.approx(1e-6, rel=0.2)


@pytest.mark.parametrize("compression_loss", ["none", "attention"])
def test_a_resumed_run_has_the_same_records_and_weights(compression_loss, tmp_path, monkeypatch):
    config = training(compression_loss, tokens=64 * 12, evaluations=1, tbptt=1, accumulate=2)
    config = replace(config, model=replace(config.model, dropout=0.3))
    whole = train_run(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        with pytest.raises(SystemExit):
            train_run(config, tmp_path / "run", resume=True)
    assert load_file(numbered(tmp_path / "run" / "checkpoints")[0] / "memory.safetensors")[
        "slot_inputs.1"
    ].any()
    folder = train_run(config, tmp_path / "run", resume=True)
    assert without_times(read_metrics(folder)) == without_times(read_metrics(whole))
    newest = [numbered(f / "checkpoints")[0] for f in (whole, folder)]
    for name in ("model.safetensors", "optimizer.safetensors", "memory.safetensors"):
        assert (newest[0] / name).read_bytes() == (newest[1] / name).read_bytes(), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallel", "compression_loss", "tbptt"),
    [("ddp", "none", 1), ("ddp", "attention", 0), ("fsdp", "none", 0), ("fsdp", "attention", 0)],
)
def test_two_ranks_end_with_one_processs_weights_memory_and_losses(
    parallel, compression_loss, tbptt, tmp_path
):
    config = training(compression_loss, tokens=64 * 10, tbptt=tbptt)
    train_in_double(tmp_path, config)
    program(tmp_path, replace(config, parallel=parallel, accumulate=2), 2)
    one = load_file(tmp_path / "single.0.safetensors")
    ranks = [load_file(tmp_path / f"{parallel}.{rank}.safetensors") for rank in range(2)]
    assert "slot_inputs.0" in one
    for name, tensor in one.items():
        torch.testing.assert_close(ranks[0][name], tensor, rtol=0, atol=1e-10)
        assert torch.equal(ranks[0][name], ranks[1][name])
