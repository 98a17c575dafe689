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
from tests.docs.pages import read_file

NOTEBOOKS = sorted((ROOT / "experiments/notebooks").glob("*.ipynb"))
# A notebook with pictures at their usual size stays below; each clone has all of them.
MOST_BYTES = 300_000
PROJECT = read_file("pyproject.toml")


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    for cell in code_cells(notebook):
        yield from cell.outputs


def count_pictures(notebook):
    return len([output for output in outputs(notebook) if "image/png" in output.get("data", {})])


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
            assert count_pictures(notebook) >= 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_as_they_ran(path):
    notebook = nbformat.read(path, as_version=4)
    cells = code_cells(notebook)
    # In order, from a fresh start.
    for number, cell in enumerate(cells, start=1):
        assert cell.execution_count == number
    # Not a package by its name: whoever takes a name first on PyPI decides what it installs.
    (installed,) = re.findall(r"%pip install --quiet (\S+)$", cells[0].source, re.MULTILINE)
    assert f'"{installed.removeprefix("git+")}"' in PROJECT
    assert count_pictures(notebook) >= 1
    assert path.stat().st_size < MOST_BYTES
    for output in outputs(notebook):
        assert output.output_type != "error"
        # A notebook shows stderr as errors.
        assert output.get("name") != "stderr"
        # No path of the machine that it ran on.
        text = output.get("text", "") + output.get("data", {}).get("text/plain", "")
        assert not re.search(r"(/\w+){2,}|[A-Z]:\\", text)


def imported_packages(source):
    packages = set()
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                packages.add(alias.name.partition(".")[0])
        elif isinstance(statement, ast.ImportFrom):
            packages.add(statement.module.partition(".")[0])
    return packages


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_list_what_they_need(path):
    """As inline script metadata (PEP 723) in the first cell; the package brings all the rest."""
    first, *rest = [cell.source for cell in code_cells(nbformat.read(path, as_version=4))]
    block = re.match(r"# /// script\n((?:# .*\n)+)# ///\n", first)
    python, needed = block[1].splitlines()
    assert python.removeprefix("# ") in PROJECT.splitlines()
    address = re.search(r"%pip install --quiet (\S+)", first)[1]
    assert needed == f'# dependencies = ["memformers-torch @ {address}"]'

    # What they import comes with Python, or with the package.
    installed = imported_packages("\n".join(rest)) - {*sys.stdlib_module_names, "memformers"}
    dependencies = re.search(r"^dependencies = \[(.*?)^\]", PROJECT, re.MULTILINE | re.DOTALL)[1]
    assert installed <= {*re.findall(r'"(\w+)', dependencies)}
