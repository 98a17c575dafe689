"""The fused kernel proves itself before ``auto`` takes it. Without a GPU, Triton's interpreter runs it."""

import warnings

import pytest
import torch

pytest.importorskip("triton")

from memformers import RelativeMultiHeadAttention
from memformers.kernels import dispatch, fused, naive
from memformers.kernels.self_test import find_mismatch, trust
from tests.kernels.against_naive import DEVICE

ON = torch.device(DEVICE)


@pytest.fixture(autouse=True)
def _nothing_is_proven_yet():
    trust.cache_clear()
    find_mismatch.cache_clear()
    yield
    trust.cache_clear()
    find_mismatch.cache_clear()


@pytest.fixture
def _as_on_a_gpu(monkeypatch):
    """``auto`` meets the fused kernel on this device."""
    changed = {"fused": dispatch.SUPPORT["fused"]._replace(device=ON.type)}
    monkeypatch.setattr(dispatch, "SUPPORT", dispatch.SUPPORT | changed)


def attend(kernel="auto"):
    torch.manual_seed(0)
    module = RelativeMultiHeadAttention(2, 8, 0.0, positions="sinusoidal", kernel=kernel).to(ON)
    x = torch.randn(5, 3, 8, device=ON)
    return module, {"query": x[-2:], "key": x, "value": x}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("bfloat16_as_on_the_gpu")
def test_the_fused_kernel_is_proven_on_a_small_problem(dtype):
    assert find_mismatch(fused.relative_attention, ON, dtype, 16) == ""


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_auto_takes_a_proven_kernel_also_when_it_is_compiled(monkeypatch):
    wanted, inputs = attend("naive")
    module, _ = attend()
    used = []
    real = fused.fused_attention
    monkeypatch.setattr(fused, "fused_attention", lambda *a: used.append(1) or real(*a))
    torch.testing.assert_close(module(**inputs), wanted(**inputs), rtol=1e-4, atol=1e-5)
    assert len(used) == 2, "once for the proof, once for the attention"
    module(**inputs)
    assert len(used) == 3, "the proof is given once"
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs), wanted(**inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_as_on_a_gpu")
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


def test_the_environment_names_the_kernel_of_auto(monkeypatch):
    monkeypatch.setenv("MEMFORMERS_KERNEL", "fused")
    assert attend()[0].kernel == "fused"
    assert attend("naive")[0].kernel == "naive"
    monkeypatch.setenv("MEMFORMERS_KERNEL", "quick")
    with pytest.raises(ValueError, match=r"MEMFORMERS_KERNEL.*quick"):
        attend()
