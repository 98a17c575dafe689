import pytest


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """No corpus of this machine's, and a cache of the test's own."""
    monkeypatch.delenv("MEMFORMERS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}-cache")
