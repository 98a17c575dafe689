from itertools import product

import pytest
import torch

from memformers import RelativeMultiHeadAttention
from memformers.kernels import blocked, dispatch, naive
from memformers.kernels.naive import causal_mask
from memformers.models.config import ModelConfig
from tests.builders import fill_zeros
from tests.kernels.against_naive import first_keys


def attention(kernel, **options):
    torch.manual_seed(0)
    return fill_zeros(RelativeMultiHeadAttention(2, 8, 0.0, kernel=kernel, **options))


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        *product(["blocked", "auto", "fused"], [{"positions": p} for p in ("learned", "sinusoidal")]),
        ("augmented", {"positions": "sinusoidal"}),
        ("augmented", {"positions": "sinusoidal", "position_features": 4}),
    ],
)
def test_every_kernel_gives_the_same_attention_and_gradients(kernel, options):
    """With learned positions also where queries see the keys from another one on."""
    device, dtype, tolerance = "cpu", torch.float64, {"rtol": 0, "atol": 1e-11}
    if kernel == "fused":  # which has no float64
        pytest.importorskip("triton", reason="Triton is not installed")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype, tolerance = torch.float32, {"rtol": 1e-4, "atol": 1e-5}
    x, results = torch.randn(11, 3, 8, device=device, dtype=dtype), []
    key_start = first_keys(3, 5, 11, device) if options["positions"] == "learned" else None
    for name in ("naive", kernel):
        module = attention(name, **options).to(device, dtype)
        output = module(query=x[-5:], key=x, value=x, key_start=key_start)
        output.square().sum().backward()
        results.append([output, *(p.grad for p in module.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def calls(monkeypatch, x, module, **forward):
    """Which kernel was really called."""
    called = []
    for kernel in (naive, blocked):
        real = kernel.relative_attention
        monkeypatch.setattr(
            kernel,
            "relative_attention",
            lambda *a, real=real, name=kernel.__name__, **k: (called.append(name), real(*a, **k))[1],
        )
    module(query=x, key=x, value=x, **forward)
    return [name.rpartition(".")[2] for name in called]


def test_auto_takes_the_blocked_kernel_for_large_attention_only(monkeypatch):
    small, large = torch.randn(5, 1, 8), torch.randn(1100, 1, 8)
    assert calls(monkeypatch, small, attention("auto")) == ["naive"]
    assert calls(monkeypatch, large, attention("auto")) == ["blocked"]
    assert calls(monkeypatch, large, attention("naive")) == ["naive"]


def test_auto_takes_the_naive_kernel_for_a_mask(monkeypatch):
    monkeypatch.setattr(dispatch, "WORTH_BLOCKING", 1)
    x = torch.randn(5, 1, 8)
    mask = causal_mask(5, 5, x.device)[:, :, None]
    assert calls(monkeypatch, x, attention("auto")) == ["blocked"]
    assert calls(monkeypatch, x, attention("auto"), mask=mask) == ["naive"]
    assert calls(monkeypatch, x, RelativeMultiHeadAttention(2, 8, 0.5)) == ["blocked"]


def test_a_named_kernel_that_cannot_run_says_why():
    x = torch.randn(5, 1, 8)
    mask = causal_mask(5, 5, x.device)[:, :, None]
    with pytest.raises(ValueError, match="kernel='blocked' is causal and takes no explicit mask"):
        attention("blocked")(query=x, key=x, value=x, mask=mask)
    with pytest.raises(ValueError, match=r"can't drop attention probabilities, but dropout_prob=0.5"):
        RelativeMultiHeadAttention(2, 8, 0.5, kernel="fused")(query=x, key=x, value=x)
    meta = x.to("meta")
    with pytest.raises(ValueError, match="runs on CPU, but the model is on meta"):
        attention("blocked").to("meta")(query=meta, key=meta, value=meta)


def test_the_fused_kernel_says_what_it_lacks(monkeypatch):
    x = torch.randn(5, 1, 8)

    def refusal(module, x):
        with pytest.raises(ValueError, match="kernel='fused'") as error:
            module(query=x, key=x, value=x)
        return str(error.value)

    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda _: None)
    assert "needs Triton, which is not installed" in refusal(attention("fused"), x)
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda _: True)
    assert "float64" in refusal(attention("fused").double(), x.double())
    wide = torch.randn(5, 1, 260)
    wide_heads = RelativeMultiHeadAttention(2, 260, 0.0, kernel="fused")
    assert "takes d_head up to 128, but d_head=130" in refusal(wide_heads, wide)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "runs on a GPU, but the model is on cpu" in refusal(attention("fused"), x)


def test_an_unknown_kernel_is_an_error():
    with pytest.raises(
        ValueError, match="kernel='fast' is unknown; use one of auto, naive, blocked, fused, augmented"
    ):
        RelativeMultiHeadAttention(2, 8, kernel="fast")
    with pytest.raises(ValueError, match="kernel='fast'"):
        ModelConfig(kernel="fast")
