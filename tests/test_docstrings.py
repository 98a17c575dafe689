"""Public names explain themselves."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHAPE = re.compile(r"``[^`]*\[[^`\]]+\][^`]*``|\bscalars?\b|\bany shape\b")
BY_NAME = re.compile(r"\b(?:Mapping|dict)\[str, Tensor\]")
MODULES = sorted((ROOT / "memformers").rglob("*.py"))


def name_of(module):
    return module.relative_to(ROOT).as_posix()


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


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_every_public_name_has_a_docstring(module):
    tree = ast.parse(module.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert [name for name, node in public(tree.body) if not ast.get_docstring(node)] == []


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_every_public_function_of_tensors_names_their_shapes(module):
    tree = ast.parse(module.read_text(encoding="utf-8"))
    functions = [(name, node) for name, node in public(tree.body) if isinstance(node, ast.FunctionDef)]
    silent = [
        name
        for name, node in functions
        if takes_tensors(node) and not SHAPE.search(ast.get_docstring(node) or "")
    ]
    assert silent == []


def test_a_name_without_a_docstring_or_a_shape_is_found():
    methods = 'def f(self, x: Tensor) -> int:\n        """F of x[0]."""\n    def _g(self): ...'
    tree = ast.parse(f'class A:\n    """A."""\n    {methods}')
    found = dict(public(tree.body))
    assert set(found) == {"A", "A.f"}
    assert takes_tensors(found["A.f"])
    assert not SHAPE.search(ast.get_docstring(found["A.f"]))
    assert SHAPE.search("of ``x [S, B, D]``")
