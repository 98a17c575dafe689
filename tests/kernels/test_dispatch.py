from functools import partial

import pytest
import torch

from memformers import RelativeMultiHeadAttention
from memformers.kernels import blocked, dispatch, naive
from memformers.kernels.naive import causal_mask
from tests.builders import fill_zeros


def attention(kernel, **options):
    torch.manual_seed(0)
    return fill_zeros(RelativeMultiHeadAttention(2, 8, 0.0, kernel=kernel, **options))


def test_auto_takes_the_blocked_kernel_for_large_attention_without_a_mask(monkeypatch):
    x, large, called = torch.randn(5, 1, 8), torch.randn(1100, 1, 8), []

    def calls(x, module, **forward):
        module(query=x, key=x, value=x, **forward)
        return called.pop()

    for name, home in (("naive", naive), ("blocked", blocked)):
        real = home.relative_attention
        spy = partial(lambda name, real, *a, **k: called.append(name) or real(*a, **k), name, real)
        monkeypatch.setattr(home, "relative_attention", spy)
    assert calls(x, attention("auto")) == "naive"
    assert calls(large, attention("auto")) == "blocked"
    assert calls(large, attention("naive")) == "naive"
    monkeypatch.setattr(dispatch, "WORTH_BLOCKING", 1)
    mask = causal_mask(5, 5, x.device)[:, :, None]
    assert calls(x, attention("auto"), mask=mask) == "naive"
    assert calls(x, RelativeMultiHeadAttention(2, 8, 0.5)) == "blocked"
    assert not called, "one kernel a call"


def refusal(kernel, d_model=8, masked=False, **like):
    x = torch.randn(5, 1, d_model).to(**like)
    module = RelativeMultiHeadAttention(2, d_model, 0.0, kernel=kernel).to(**like)
    mask = causal_mask(5, 5, x.device)[:, :, None] if masked else None
    with pytest.raises(ValueError, match=f"kernel='{kernel}'") as error:
        module(query=x, key=x, value=x, mask=mask)
    return str(error.value)


def test_a_named_kernel_that_cannot_run_says_why(monkeypatch):
    assert "mask" in refusal("blocked", masked=True)
    assert "cpu, but the model is on meta" in refusal("blocked", device="meta")
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda _: None)
    assert "pip install triton" in refusal("fused")
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda _: True)
    assert "float64" in refusal("fused", dtype=torch.float64)
    assert "128 in torch.float32, but d_head=130" in refusal("fused", d_model=260)
    assert "256 in torch.bfloat16, but d_head=258" in refusal("fused", d_model=516, dtype=torch.bfloat16)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "cuda, but the model is on cpu" in refusal("fused")


def test_the_environment_names_the_kernel_of_auto(monkeypatch):
    monkeypatch.setenv("MEMFORMERS_KERNEL", "fused")
    assert (attention("auto").kernel, attention("naive").kernel) == ("fused", "naive")
    monkeypatch.setenv("MEMFORMERS_KERNEL", "quick")
    with pytest.raises(ValueError, match=r"MEMFORMERS_KERNEL.*quick"):
        attention("auto")
