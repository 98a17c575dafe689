"""On a device that computes while the program goes on, no training step waits for it, and bad steps are
skipped with the same meaning. The CPU stands for such a device: what would wait for one fails the test."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memformers.common.fields import changed
from memformers.data.streams import Segment, training_segments
from memformers.kernels import operators
from memformers.models import attention, documents, language_model
from memformers.runs.folder import read_metrics
from memformers.training import loop
from memformers.training.loop import NotFiniteError, train_steps
from memformers.training.optimizers import build_optimizers
from memformers.training.run import build_model
from memformers.training.state import TrainingState
from tests.builders import MODELS, small_training
from tests.training.runs import poisoned, stop, tensors_of, train_run, without_times

STEPS, LONGEST = 12, 5
"""The steps of a training, and after how many memory is as long as it gets."""
TEXT = torch.arange(4 * 16 * 2 * STEPS + 1) ** 2 % 7
"""Four streams of two segments of 16 a step."""
DOCUMENTS = (90, 13, 1, 40, 555, 7, 200, 2, 33, 160, 21, 79, 335)
WAITING = {
    "aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten._unique2",
    "aten.unique_dim", "aten.unique_consecutive", "aten.bincount", "aten.is_nonzero",
}  # fmt: skip
"""Operations whose result, or its shape, the program must know."""


class NoWaiting(TorchDispatchMode):
    """Fails for an operation that would wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func is torch.ops.aten.index.Tensor and any(
            indices is not None and indices.dtype == torch.bool for indices in args[1]
        )
        if str(func.overloadpacket) in WAITING or by_mask:
            raise AssertionError(f"{func} waits")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting():
    """A block in which the program may read no tensor, but for a segment's targets, which it has from the
    CPU; what only a CPU's tokens are checked for isn't."""

    def refused(self, *args, **options):
        raise AssertionError("a tensor is read")

    def counted(segment):
        with _disable_current_modes():
            return int((segment.targets >= 0).sum())

    with pytest.MonkeyPatch.context() as patch, NoWaiting():
        for name in ("tolist", "numpy", "cpu", "__array__"):
            patch.setattr(torch.Tensor, name, refused)
        for module in (attention, documents, language_model, operators):  # as on a GPU
            patch.setattr(module, "has_values", lambda tensor: False)
        patch.setattr(Segment, "predictions", property(counted))
        yield


def small(model, **changes):
    """Settings of STEPS steps with a memory of fixed shape in the end, and with the one kernel that needs no
    GPU and never waits for one."""
    config = small_training(model=model, **changes)
    own = replace(config.model, kernel="naive", **({"compression_rate": 4} if model == "compressive" else {}))
    return changed(config, model=own, tokens=STEPS * config.tokens_a_step, log_every=STEPS, evaluations=1)


def segments_of(config, documents):
    segments = training_segments(TEXT[: sum(documents) or None], 4, 16, documents=documents)
    return islice(segments, STEPS * (1 + config.tbptt))


def trained(lm, config, documents, waited_for, watched=()):
    """Train ``lm``; returns the state after it and the metrics of each record. In the steps that are
    ``watched`` nothing waits."""
    records, block = [], ExitStack()

    def between(state):
        if state.step == min(watched, default=None):
            block.enter_context(no_waiting())
        if state.step == max(watched, default=None):
            block.close()

    state = TrainingState(build_optimizers(lm, config))
    with block, pytest.MonkeyPatch.context() as patch:
        if not waited_for:
            patch.setattr(loop, "FREE_TO_WAIT_FOR", ())
        train_steps(lm, iter([*segments_of(config, documents)]), config, state=state, evaluate=lambda _: None,
              record=lambda state, metrics: records.append(metrics), maybe_checkpoint=between)  # fmt: skip
    return state, records


SETTINGS = (
    *({"model": model} for model in MODELS),
    {"model": "compressive", "optimizer": "adamw"},
    {"model": "compressive", "accumulate": 2},
    {"model": "transformer-xl", "tbptt": 1},
    {"model": "compressive", "tbptt": 1, "accumulate": 2},
    {"model": "compressive", "precision": "bfloat16"},
)


@pytest.mark.parametrize("documents", [(), DOCUMENTS])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_step_waits_for_the_device_and_all_is_as_if_each_did(settings, documents):
    config = small(**settings)
    found = []
    for waited_for in (True, False):
        lm = build_model(config)
        watched = () if waited_for else (LONGEST, STEPS - 1)
        state, records = trained(lm, config, documents, waited_for, watched)
        assert not state.pending
        assert len(records) == 1
        found.append((tensors_of(lm), records[0]["loss.train"], records[0]["accuracy.train"]))
    assert all(torch.equal(tensor, found[1][0][name]) for name, tensor in found[0][0].items())
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("bad", [{6}, {0, 6, 7}])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_bad_steps_are_skipped_without_waiting_as_they_are_when_each_is_waited_for(model, bad, optimizer):
    config = small(model, optimizer=optimizer, skip_bad_steps=3)
    found = []
    for waited_for in (True, False):
        lm = poisoned(build_model(config), "head", bad)
        watched = () if waited_for else (LONGEST, STEPS - 1)
        with pytest.warns(RuntimeWarning) as warned:
            state, records = trained(lm, config, DOCUMENTS, waited_for, watched)
        lines = [str(w.message) for w in warned]
        assert [f"(step {step})" in line for step, line in zip(sorted(bad), lines, strict=True)]
        found.append((tensors_of(lm), lines, state.skipped, records[0]["loss.train"]))
    assert all(torch.equal(tensor, found[1][0][name]) for name, tensor in found[0][0].items())
    assert found[0][1:] == found[1][1:]
    assert found[0][2] == len(bad)


def test_after_one_bad_step_too_many_nothing_is_learned_and_the_error_is_the_same():
    config, found = small("compressive", skip_bad_steps=1), []
    for waited_for in (True, False):
        lm = poisoned(build_model(config), "head", {5, 7, 9})
        with (
            pytest.warns(RuntimeWarning, match="step 5"),
            pytest.raises(NotFiniteError, match="step 7") as error,
        ):
            trained(lm, config, (), waited_for)
        found.append((tensors_of(lm), str(error.value)))
    assert found[0][1] == found[1][1]
    assert all(torch.equal(tensor, found[1][0][name]) for name, tensor in found[0][0].items())
    assert all(tensor.isfinite().all() for tensor in found[1][0].values())


def test_a_checkpoint_knows_all_steps_before_it(tmp_path, monkeypatch):
    """A run that is saved between records, and goes on, records what one that isn't stopped does."""
    monkeypatch.setattr(loop, "FREE_TO_WAIT_FOR", ())
    config = small_training(log_every=10, tokens=64 * 25)
    train_run(config, tmp_path / "whole")
    stop(config, tmp_path / "resumed", 13)
    train_run(config, tmp_path / "resumed", resume=True)
    whole, resumed = (without_times(read_metrics(tmp_path / name)) for name in ("whole", "resumed"))
    assert whole == resumed
