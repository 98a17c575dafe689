import pytest


@pytest.fixture(autouse=True)
def _no_corpus_of_this_machine_and_a_cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("MEMFORMERS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}-cache")
