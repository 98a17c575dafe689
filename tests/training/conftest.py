"""Trainings within seconds."""

import pytest

from memformers.training import run as run_module
from tests.training.runs import find_short_text


@pytest.fixture(autouse=True)
def _short_runs(quick_runs, monkeypatch):
    """Small trainings read a part of the built-in play, and labml doesn't hear of them."""
    monkeypatch.setattr(run_module, "find_text", find_short_text)
