"""What all tests share."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when kernels are defined


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def float64():
    """Modules made in this test work in double precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def _no_dashboard_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("labml_app_url", raising=False)
