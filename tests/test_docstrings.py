"""Public names explain themselves."""

import ast
import doctest
import inspect
import re
from pathlib import Path

import pytest

import memformers

ROOT = Path(__file__).parents[1]
SHAPE = re.compile(r"``[^`]*\[[^`\]]+\][^`]*``|\bscalars?\b|\bany shape\b")
BY_NAME = re.compile(r"\b(?:Mapping|dict)\[str, Tensor\]")
MODULES = sorted((ROOT / "memformers").rglob("*.py"))


def public(body, prefix=""):
    """Functions, classes and methods of a module that don't begin with an underscore, by name."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}{node.name}.")


def takes_tensors(node):
    """Whether a function's arguments or its result are tensors or sequences of them, by their annotations;
    tensors by name, such as a state dict, are of as many shapes as there are names."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    annotations = [ast.unparse(a) for a in [*(a.annotation for a in arguments), node.returns] if a]
    return any(re.search(r"\bTensor\b", BY_NAME.sub("", annotation)) for annotation in annotations)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.relative_to(ROOT).as_posix())
def test_every_public_name_has_a_docstring_that_names_the_shapes_of_tensors(module):
    tree = ast.parse(module.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    said = [(name, node, ast.get_docstring(node) or "") for name, node in public(tree.body)]
    assert [name for name, _, text in said if not text] == []
    functions = [(name, node, text) for name, node, text in said if isinstance(node, ast.FunctionDef)]
    assert [name for name, node, text in functions if takes_tensors(node) and not SHAPE.search(text)] == []


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize("name", memformers.__all__)
def test_the_examples_of_a_public_name_run_and_print_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(getattr(memformers, name))
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
