"""The fused kernel proves itself before ``auto`` takes it. Without a GPU, Triton's interpreter runs it."""

import warnings
from functools import cache, partial

import pytest
import torch

pytest.importorskip("triton")

from memformers import RelativeMultiHeadAttention
from memformers.kernels import blocked, dispatch, fused, naive, self_test
from tests.kernels.against_naive import DEVICE

ON = torch.device(DEVICE)
TWO_LENGTHS, HEADS = ((7, 19), (16, 32)), self_test.H


@pytest.fixture(autouse=True)
def _nothing_is_proven_yet(monkeypatch):
    """And ``auto`` meets the fused kernel on this device, with problems that the interpreter can do."""
    changed = {"fused": dispatch.SUPPORT["fused"]._replace(device=ON.type)}
    monkeypatch.setattr(dispatch, "SUPPORT", dispatch.SUPPORT | changed)
    if DEVICE == "cpu":
        for name, size in (("LENGTHS", ((3, 7),)), ("H", 1)):
            monkeypatch.setattr(self_test, name, size)
    monkeypatch.setattr(self_test, "trust", cache(self_test.trust.__wrapped__))
    monkeypatch.setattr(self_test, "find_mismatch", cache(self_test.find_mismatch.__wrapped__))


def attend(kernel="auto"):
    torch.manual_seed(0)
    module = RelativeMultiHeadAttention(2, 32, 0.0, positions="sinusoidal", kernel=kernel).to(ON)
    x = torch.randn(5, 3, 32, device=ON)
    return module, {"query": x[-2:], "key": x, "value": x}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("bfloat16_as_on_the_gpu")
def test_the_fused_kernel_is_proven_on_small_problems(dtype, monkeypatch):
    monkeypatch.setattr(self_test, "LENGTHS", TWO_LENGTHS)
    monkeypatch.setattr(self_test, "H", HEADS)
    assert self_test.find_mismatch(fused.relative_attention, ON, dtype, 16) == ""


@pytest.mark.parametrize("fault", ["documents", "dropout", "S=16"])
def test_each_case_is_proven(fault, monkeypatch):
    def broken(query, key_start=None, dropout_prob=0.0, **others):
        query = query * 1.01 if fault == "S=16" and query.shape[2] == 16 else query
        key_start = None if fault == "documents" else key_start
        kernel = partial(blocked.relative_attention, query, key_start=key_start, dropout_prob=dropout_prob)
        out = kernel(**others)
        other = kernel(**others) if fault == "dropout" else out  # which drops others in its backward pass
        return other + (out - other).detach()

    monkeypatch.setattr(self_test, "LENGTHS", TWO_LENGTHS)
    assert fault in self_test.find_mismatch(broken, torch.device("cpu"), torch.float32, 16)


@pytest.mark.long
def test_auto_takes_a_proven_kernel_also_when_it_is_compiled(monkeypatch):
    (wanted, inputs), (module, _), used = attend("naive"), attend(), []
    real = fused.fused_attention
    monkeypatch.setattr(fused, "fused_attention", lambda *a: used.append(1) or real(*a))
    before = torch.random.get_rng_state()
    torch.testing.assert_close(module(**inputs), wanted(**inputs), rtol=1e-4, atol=1e-5)
    assert torch.equal(torch.random.get_rng_state(), before), "the proof's dropout takes no one's numbers"
    proof_and_use = len(used)
    module(**inputs)
    assert len(used) == proof_and_use + 1 > 2, "the proof is given once"
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs), wanted(**inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fault", ["a number", "NaN", "error"])
def test_a_kernel_that_differs_is_not_taken_and_one_warning_says_by_how_much(fault, monkeypatch):
    def broken(query, key, value, r, **others):
        if fault == "error":
            raise RuntimeError("no\nsuch instruction")
        out = naive.relative_attention(query, key, value, r, **others)
        return out * float("nan") if fault == "NaN" else out + (r - r.detach()).mean()

    monkeypatch.setattr(fused, "relative_attention", broken)
    said = {"a number": r"differs in r by \d\.\de-0\d", "NaN": "differs in output by nan",
            "error": "can't run here: RuntimeError: no such instruction"}[fault]  # fmt: skip
    module, inputs = attend()
    with pytest.warns(RuntimeWarning, match=f"kernel='fused' {said}"):
        output = module(**inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(**inputs)
    assert torch.equal(output, attend("naive")[0](**inputs))
