"""Public names explain themselves."""

import ast
import doctest
import inspect
import re
import textwrap

import pytest

import memformers

SHAPE = re.compile(r"``[^`]*\[[^`\]]+\][^`]*``|\bscalars?\b|\bany shape\b")
BY_NAME = re.compile(r"\b(?:Mapping|dict)\[str, Tensor\]")


def public(name):
    """The function or class of this public name and its methods without an underscore: names, syntax, and
    docstrings, which methods inherit."""
    kind = getattr(memformers, name)
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    yield name, node, inspect.getdoc(kind) or ""
    for method in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            yield f"{name}.{method.name}", method, inspect.getdoc(getattr(kind, method.name)) or ""


def takes_tensors(node):
    """Whether a function's arguments or its result are tensors or sequences of them, by their annotations;
    tensors by name, such as a state dict, differ in shape."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    annotations = [ast.unparse(a) for a in [*(a.annotation for a in arguments), node.returns] if a]
    return any(re.search(r"\bTensor\b", BY_NAME.sub("", annotation)) for annotation in annotations)


@pytest.mark.parametrize("name", memformers.__all__)
def test_a_public_name_has_a_docstring_with_shapes(name):
    documented = list(public(name))
    assert [n for n, _, text in documented if not text] == []
    functions = [(n, node, text) for n, node, text in documented if isinstance(node, ast.FunctionDef)]
    assert [n for n, node, text in functions if takes_tensors(node) and not SHAPE.search(text)] == []


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize("name", memformers.__all__)
def test_the_examples_of_a_public_name_run_and_print_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(getattr(memformers, name))
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
