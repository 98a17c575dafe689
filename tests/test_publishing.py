"""What GitHub and those who publish or try the package read: workflows, hooks, notebooks and model cards."""

import re
from pathlib import Path

import nbformat
import pytest
import yaml

from experiments.pretrained import CARD, card
from memformers.common.files import read_json
from memformers.models.io import PACKAGED, RECIPE, packaged_names

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
NOTEBOOKS = sorted((ROOT / "experiments/notebooks").glob("*.ipynb"))


def test_the_workflow_runs_what_every_change_must_pass_on_each_python_and_builds_what_is_published():
    jobs = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text())["jobs"]
    matrix = jobs["checks"]["strategy"]["matrix"]
    assert matrix["python"] == [f"3.{minor}" for minor in range(10, 15)]
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos"}
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands
    targets = {word for line in commands for word in line.split()[1:] if "=" not in word}
    assert targets == {"test-integrations", "dist", "docs"}
    assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_installs_the_package_from_its_repository_where_it_is_not(path):
    """And none by name: whoever takes a name first on PyPI decides what it installs."""
    first = next(cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    (installed,) = re.findall(r"%pip install --quiet (\S+)$", first.source, re.MULTILINE)
    assert f'"{installed.removeprefix("git+")}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", packaged_names())
def test_a_model_of_the_package_has_a_card_with_the_numbers_of_its_recipe(name):
    recipe = read_json(PACKAGED / name / RECIPE)
    text = (PACKAGED / name / CARD).read_text(encoding="utf-8")
    assert text == card(name, recipe)
    assert f"{recipe['held_out']['loss_nats']:.4f} nats" in text
    assert yaml.safe_load(text.split("---")[1])["license"] == "mit"
