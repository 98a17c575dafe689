"""Trainings within seconds."""

import os

import pytest

from memformers.training import callbacks
from memformers.training import run as run_module
from tests.training.runs import find_short_text


@pytest.fixture(autouse=True)
def _short_runs(quick_runs, monkeypatch):
    """Small trainings read a part of the built-in play, labml doesn't hear of them, and nobody waits for the
    disk: no test turns the machine off."""
    monkeypatch.setattr(run_module, "find_text", find_short_text)
    monkeypatch.setattr(callbacks, "SAMPLE_CHARACTERS", 10)
    monkeypatch.setattr(callbacks, "GLIMPSE_CHARACTERS", 3)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
