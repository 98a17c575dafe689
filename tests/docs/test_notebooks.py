"""The notebooks, run with a hundredth of their budget; and what they show."""

import ast
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import nbformat
import pytest
from nbclient import NotebookClient

from docs.building.results import ROOT
from memformers.data.builtin import write_play

NOTEBOOKS = sorted((ROOT / "experiments/notebooks").glob("*.ipynb"))
LARGEST = 300_000
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


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
    assert f'"{installed.removeprefix("git+")}"' in PROJECT
    assert [cell.execution_count for cell in (first, *others)] == list(range(1, len(others) + 2))
    assert sum("image/png" in output.get("data", {}) for output in outputs(notebook)) >= 1
    assert path.stat().st_size < LARGEST
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr"  # which a notebook shows as errors
        shown = output.get("text", "") + output.get("data", {}).get("text/plain", "")
        assert not re.search(r"(/\w+){2,}|[A-Z]:\\", shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_list_what_they_need(path):
    """As inline script metadata (PEP 723) in the first cell; the package brings all the rest."""
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    block = re.match(r"# /// script\n((?:# .*\n)+)# ///\n", cells[0])
    python, needed = block[1].splitlines()
    assert python.removeprefix("# ") in PROJECT.splitlines()
    address = re.search(r"%pip install --quiet (\S+)", cells[0])[1]
    assert needed == f'# dependencies = ["memformers-torch @ {address}"]'

    imported = set()
    for statement in ast.walk(ast.parse("\n".join(cells[1:]))):
        if isinstance(statement, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            imported.add(statement.module.partition(".")[0])
    others = imported - {*sys.stdlib_module_names, "memformers"}
    dependencies = re.search(r"^dependencies = \[(.*?)^\]", PROJECT, re.MULTILINE | re.DOTALL)[1]
    assert others <= {*re.findall(r'"(\w+)', dependencies)}
