"""The search for what makes a slot hold more, at a size of moments."""

from dataclasses import replace

import pytest

from experiments import slots
from memformers.common.errors import UserError
from memformers.common.files import read_json
from memformers.tracking import relay
from tests.builders import tiny_recall
from tests.processes import recall_here

TWO = ("as in the experiment", "c = 8")


@pytest.fixture
def small(monkeypatch):
    """Settings of a moment, and trainings in this process."""
    monkeypatch.setattr(slots, "BASE", replace(tiny_recall(), evaluated=256))
    monkeypatch.setattr(slots, "run_modules", recall_here)
    monkeypatch.setattr(relay, "module_command", lambda *_: ["cat"])


@pytest.mark.usefixtures("small")
def test_each_variant_is_trained_once_and_has_its_row(tmp_path):
    arguments = slots.Slots(out=tmp_path, variants=TWO, tokens=128, seeds=2)
    slots.main(arguments)
    results = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    assert len(results) == 4
    rates = {read_json(p.parent / "config.json")["model"]["compression_rate"] for p in results}
    assert rates == {4, 8}
    rows = (tmp_path / "table.md").read_text().splitlines()
    assert [row.split(" | ")[0].strip("| ") for row in rows[2:]] == list(TWO)
    assert all(row.count("±") == 4 and row.endswith("| 2 |") for row in rows[2:])
    slots.main(arguments)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")} == results


def test_every_variant_differs_from_the_experiment_in_its_settings_only():
    runs = {name: variant.run(0, 1000, 1) for name, variant in slots.VARIANTS.items()}
    assert len({(run.train, run.more) for run in runs.values()}) == len(runs)
    first = runs.pop("as in the experiment")
    assert first.train.model.compression_rate == 4
    assert all(run.more.stream == first.more.stream for run in runs.values())


def test_an_unknown_variant_is_an_error(tmp_path):
    with pytest.raises(UserError, match="variants c = 3 are unknown; there are as in the experiment, c = 2"):
        slots.main(slots.Slots(out=tmp_path, variants=("c = 3",)))
