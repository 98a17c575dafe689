"""On a device that computes while the program goes on, no training step waits for it, and bad steps are
skipped with the same meaning. The CPU stands for such a device: what would wait for one fails the test."""

import warnings
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
from memformers.training import loop
from memformers.training.loop import NotFiniteError, train_steps
from memformers.training.optimizers import build_optimizers
from memformers.training.run import build_model
from memformers.training.state import TrainingState
from tests.builders import MODELS, small_training
from tests.training.runs import poisoned, tensors_of

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


def small(model="compressive", **changes):
    """Settings of STEPS steps with a memory of fixed shape in the end, and with the one kernel that needs no
    GPU and never waits for one."""
    config = small_training(model=model, **changes)
    own = replace(config.model, kernel="naive", **({"compression_rate": 4} if model == "compressive" else {}))
    return changed(config, model=own, tokens=STEPS * config.tokens_a_step, log_every=STEPS, evaluations=1)


def trained(config, documents=(), bad=(), waited_for=True, watched=()):
    """Train with bad steps of these numbers, while nothing waits in those that are ``watched``; returns what
    the training comes to, and the weights and memory before each step."""
    lm, records, seen, block = poisoned(build_model(config), "embed", bad), [], [], ExitStack()
    segments = training_segments(TEXT[: sum(documents) or None], 4, 16, documents=documents)
    state = TrainingState(build_optimizers(lm, config))
    said = ""

    def between(state):
        if state.step == min(watched, default=None):
            block.enter_context(no_waiting())
        if state.step == max(watched, default=None):
            block.close()
        if not watched:
            seen.append([*tensors_of(lm).values(), *state.memory.mem, *state.memory.c_mem])

    with block, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if not waited_for:
            patch.setattr(loop, "FREE_TO_WAIT_FOR", ())
        try:
            train_steps(lm, islice(segments, STEPS * (1 + config.tbptt)), config, state=state,
                        evaluate=lambda _: None, maybe_checkpoint=between,
                        record=lambda _, metrics: records.append(metrics))  # fmt: skip
        except NotFiniteError as error:
            said = str(error)
    numbers = [(metrics["loss.train"], metrics["accuracy.train"]) for metrics in records]
    lines = [str(each.message) for each in warned if each.category is RuntimeWarning]
    return (numbers, lines, said, state.skipped, [x.tolist() for x in tensors_of(lm).values()]), seen


MODES = [{"model": model} for model in MODELS] + [
    {"optimizer": "adamw"}, {"accumulate": 2}, {"model": "transformer-xl", "tbptt": 1},
    {"tbptt": 1, "accumulate": 2}, {"precision": "bfloat16"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "documents", "bad"),
    [(changes, DOCUMENTS if i % 2 else (), ()) for i, changes in enumerate(MODES)]
    + [({"model": model, "optimizer": optimizer}, DOCUMENTS, (0, 6, 7))
       for model, optimizer in zip(MODELS, ("muon", "adamw", "muon"), strict=True)],
)  # fmt: skip
def test_no_step_waits_for_the_device_and_all_is_as_if_each_did(changes, documents, bad):
    config = small(**changes, skip_bad_steps=3)
    waited, _ = trained(config, documents, bad)
    assert trained(config, documents, bad, False, (LONGEST, STEPS - 1))[0] == waited
    assert all(f"(step {step})" in line for step, line in zip(bad, waited[1], strict=True))
    assert (len(waited[0]), waited[2], waited[3]) == (1, "", len(bad))


def test_after_one_bad_step_too_many_nothing_is_learned_and_the_error_is_the_same():
    config = small(skip_bad_steps=1)
    (_, lines, said, _, weights), seen = waited = trained(config, (), {5, 7, 9})
    assert trained(config, (), {5, 7, 9}, waited_for=False)[0] == waited[0]
    assert "step 7" in said
    assert "step 5" in lines[0]
    assert weights == [x.tolist() for x in seen[7][: len(weights)]]


@pytest.mark.parametrize("model", MODELS)
def test_a_skipped_step_changes_neither_weights_nor_memory(model):
    _, seen = trained(small(model, skip_bad_steps=1), bad={3})
    assert all(map(torch.equal, seen[3], seen[4]))
    assert not all(map(torch.equal, seen[4][: len(seen[4]) // 2], seen[5]))
    assert all(x.isfinite().all() for x in seen[-1])
