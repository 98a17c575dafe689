"""The notebooks, run with a hundredth of their budget; and what they show."""

import re
from concurrent.futures import ThreadPoolExecutor

import nbformat
import pytest
from nbclient import NotebookClient

from docs.building.results import ROOT
from memformers.data.builtin import write_play

NOTEBOOKS = sorted((ROOT / "experiments/notebooks").glob("*.ipynb"))
LARGEST = 300_000


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.long
def test_all_notebooks_run_to_their_end_on_a_small_budget(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(write_play(60_000), encoding="utf-8")
    monkeypatch.setenv("MEMFORMERS_BUDGET", "0.01")
    monkeypatch.setenv("MEMFORMERS_DATA", str(tmp_path / "text.txt"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def run(path):
        notebook = nbformat.read(path, as_version=4)
        resources = {"metadata": {"path": str(tmp_path)}}
        return NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()

    with ThreadPoolExecutor(2) as pool:
        for notebook in pool.map(run, NOTEBOOKS):
            assert any("image/png" in output.get("data", {}) for output in outputs(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_as_they_ran(path):
    """Not a package by its name: whoever takes a name first on PyPI decides what it installs."""
    notebook = nbformat.read(path, as_version=4)
    first, *others = (cell for cell in notebook.cells if cell.cell_type == "code")
    (installed,) = re.findall(r"%pip install --quiet (\S+)$", first.source, re.MULTILINE)
    assert f'"{installed.removeprefix("git+")}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert [cell.execution_count for cell in (first, *others)] == list(range(1, len(others) + 2))
    assert sum("image/png" in output.get("data", {}) for output in outputs(notebook)) >= 1
    assert path.stat().st_size < LARGEST
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr"  # which a notebook shows as errors
        shown = output.get("text", "") + output.get("data", {}).get("text/plain", "")
        assert not re.search(r"(/\w+){2,}|[A-Z]:\\", shown)
