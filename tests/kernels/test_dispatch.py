import pytest
import torch

from memformers import RelativeMultiHeadAttention
from memformers.kernels import blocked, dispatch, naive
from memformers.kernels.naive import causal_mask
from tests.builders import fill_zeros
from tests.kernels.against_naive import first_keys


def attention(kernel, **options):
    torch.manual_seed(0)
    return fill_zeros(RelativeMultiHeadAttention(2, 8, 0.0, kernel=kernel, **options))


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("kernel", ["auto", *dispatch.SUPPORT])
def test_every_kernel_gives_the_same_attention_and_gradients(kernel, positions):
    """With learned positions also where queries see the keys from another one on."""
    device, dtype, tolerance = "cpu", torch.float64, {"rtol": 0, "atol": 1e-11}
    if kernel == "fused":  # which has no float64
        pytest.importorskip("triton", reason="Triton is not installed")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype, tolerance = torch.float32, {"rtol": 1e-4, "atol": 1e-5}
    x, results = torch.randn(11, 3, 8, device=device, dtype=dtype), []
    key_start = first_keys(3, 5, 11, device) if positions == "learned" else None
    for name in ("naive", kernel):
        module = attention(name, positions=positions).to(device, dtype)
        output = module(query=x[-5:], key=x, value=x, key_start=key_start)
        output.square().sum().backward()
        results.append([output, *(p.grad for p in module.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_auto_takes_the_blocked_kernel_for_large_attention_without_a_mask(monkeypatch):
    x, large, called = torch.randn(5, 1, 8), torch.randn(1100, 1, 8), []

    def calls(x, module, **forward):
        called.clear()
        module(query=x, key=x, value=x, **forward)
        return called

    for name, kernel in (("naive", naive), ("blocked", blocked)):
        real = kernel.relative_attention
        monkeypatch.setattr(
            kernel,
            "relative_attention",
            lambda *a, real=real, name=name, **k: called.append(name) or real(*a, **k),
        )
    assert calls(x, attention("auto")) == ["naive"]
    assert calls(large, attention("auto")) == ["blocked"]
    assert calls(large, attention("naive")) == ["naive"]
    monkeypatch.setattr(dispatch, "WORTH_BLOCKING", 1)
    mask = causal_mask(5, 5, x.device)[:, :, None]
    assert calls(x, attention("auto"), mask=mask) == ["naive"]
    assert calls(x, RelativeMultiHeadAttention(2, 8, 0.5)) == ["blocked"]


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
