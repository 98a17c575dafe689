"""Comparisons of a user's memories, trained in separate processes, wherever their files are."""

import pytest

from memformers.common.files import read_json
from memformers.comparison import experiment, text
from memformers.comparison.text import CompareConfig, compare
from memformers.models import registry
from memformers.report import plotting
from tests.builders import small_training, write_memory
from tests.processes import train_here

TEXT = "the quick brown fox jumps over the lazy dog\n" * 200


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """What forgets which memories were named, as another process does; reports have no figures."""
    built_in = {name: kind for name, kind in registry.MODELS.items() if ":" not in name}
    monkeypatch.setattr(text, "PROBED", 64)
    monkeypatch.setattr(plotting, "save", lambda _, path: path.touch())

    def forget():
        monkeypatch.setattr(registry, "MODELS", dict(built_in))

    forget()
    return forget


@pytest.mark.long
def test_memories_in_any_folder_are_compared_and_resumed(forget, tmp_path, monkeypatch):
    folder = tmp_path / "thesis.v2"
    write_memory(folder / "mine.py")
    write_memory(folder / "a b" / "my.memory.py")
    (folder / "text.txt").write_text(TEXT)
    (tmp_path / "link").symlink_to(folder)
    training = small_training(model="compressive", max_tokens=128, data=str(folder / "text.txt"))

    monkeypatch.chdir(folder)
    config = CompareConfig(training, models=(), arms=("one: model=mine.py:Mine",))
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "run_modules", train_here)
        compare(config, folder / "out", dashboard="off")

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    forget()
    arms = ("one: model=../link/mine.py:Mine", "two: model='../thesis.v2/a b/my.memory.py:Mine'")
    compare(CompareConfig(training, models=(), arms=arms), folder / "out", dashboard="off", resume=True)

    models = {}
    for result in folder.glob("out/*/result.json"):
        models[result.parent.name] = read_json(result.with_name("config.json"))["model"]["model"]
    assert models == {"one": "mine.py:Mine", "two": "my.memory.py:Mine"}
