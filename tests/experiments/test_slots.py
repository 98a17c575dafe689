"""The search for what makes a slot hold more, at a size of moments."""

import pytest

from experiments.slots import VARIANTS, Slots
from memformers.common.files import read_json
from memformers.comparison.recall import SETTINGS
from memformers.report import document
from memformers.report.page import write_page

TWO = ("as in the experiment", "c = 8")


@pytest.fixture
def small(monkeypatch, quick_runs):
    """No report, which takes longer than all trainings."""
    monkeypatch.setattr(document, "write_report", lambda folder: write_page(["# Slots"], folder))


@pytest.mark.usefixtures("small")
def test_each_variant_is_trained_once_and_has_its_row(tmp_path):
    Slots(out=tmp_path, variants=TWO, tokens=128, seeds=2).run()
    results = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    assert len(results) == 4
    configs = [read_json(p.parent / "config.json") for p in results]
    assert {config["model"]["compression_rate"] for config in configs} == {4, 8}
    assert {config["recall"]["measured_for"] for config in configs} == {"choosing"}
    rows = (tmp_path / "table.md").read_text().splitlines()
    assert [row.split(" | ")[0].strip("| ") for row in rows[2:]] == list(TWO)
    assert all(row.count("±") >= 2 and row.endswith("| 2 |") for row in rows[2:])
    Slots(out=tmp_path, variants=TWO, tokens=128, seeds=2, resume=True).run()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")} == results


@pytest.mark.usefixtures("small")
def test_transformer_xl_has_the_variants_that_are_not_of_slots(tmp_path):
    Slots(out=tmp_path, memory="transformer-xl", variants=(*TWO, "1 head"), tokens=128).run()
    configs = [read_json(p.parent / "config.json") for p in tmp_path.glob("*/result.json")]
    assert sorted(config["model"]["heads"] for config in configs) == [1, SETTINGS["near"].train.model.heads]
    assert {config["model"]["model"] for config in configs} == {"transformer-xl"}


def test_every_variant_differs_from_the_experiment_in_its_own_settings():
    settings = [tuple(sorted(variant.items())) for variant in VARIANTS.values()]
    assert len(set(settings)) == len(VARIANTS)
    assert not any(name.startswith("recall.stream") for variant in VARIANTS.values() for name in variant)
