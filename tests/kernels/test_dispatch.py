"""Which kernel is chosen, and what a named one refuses."""

import pytest
import torch

from memformers import RelativeMultiHeadAttention, kernels
from memformers.kernels import blocked, naive, sdpa
from memformers.kernels.naive import causal_mask
from tests.builders import fill_zeros


@pytest.fixture
def called(monkeypatch):
    """The names of the kernels that are called."""
    names = []
    for name, home in (("naive", naive), ("blocked", blocked), ("sdpa", sdpa)):
        real = home.relative_attention
        monkeypatch.setattr(
            home, "relative_attention", lambda *a, n=name, f=real, **k: names.append(n) or f(*a, **k)
        )
    return names


def attention(kernel, **options):
    torch.manual_seed(0)
    return fill_zeros(RelativeMultiHeadAttention(2, 8, 0.0, kernel=kernel, **options))


def test_auto_takes_blocked_for_large_attention_on_a_cpu_and_sdpa_on_other_devices(called, monkeypatch):
    x, large = torch.randn(5, 1, 8), torch.randn(1100, 1, 8)

    def calls(x, module, **forward):
        called.clear()
        module(query=x, key=x, value=x, **forward)
        return called

    assert calls(x, attention("auto")) == ["naive"]
    assert calls(large, attention("auto")) == ["blocked"]
    assert calls(large, attention("naive")) == ["naive"]
    assert calls(x.to("meta"), attention("auto").to("meta")) == ["sdpa"]
    monkeypatch.setattr(kernels, "MIN_SCORES_FOR_BLOCKED", 1)
    mask = causal_mask(5, 5, x.device)[:, :, None]
    assert calls(x, attention("auto"), mask=mask) == ["naive"]
    assert calls(x, RelativeMultiHeadAttention(2, 8, 0.5)) == ["blocked"]


def test_the_blocked_kernel_refuses_a_mask_and_other_devices():
    for device, masked, why in (("cpu", True, "takes no mask"), ("meta", False, "the model is on meta")):
        x = torch.randn(5, 1, 8, device=device)
        mask = causal_mask(5, 5, x.device)[:, :, None] if masked else None
        with pytest.raises(ValueError, match=f"kernel='blocked' .*{why}"):
            attention("blocked").to(device)(query=x, key=x, value=x, mask=mask)


def test_the_environment_names_the_kernel_of_auto(monkeypatch):
    monkeypatch.setenv("MEMFORMERS_KERNEL", "sdpa")
    assert (attention("auto").kernel, attention("naive").kernel) == ("sdpa", "naive")
    monkeypatch.setenv("MEMFORMERS_KERNEL", "quick")
    with pytest.raises(ValueError, match=r"MEMFORMERS_KERNEL.*quick"):
        attention("auto")
