"""What the page of common errors quotes is what the package says."""

import ast
import re

import pytest

from docs.building.results import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^### `(.+)`$", PAGE, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def texts():
    """The texts in the package, with … for what is filled in."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.glob("memformers/**/*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    filled = [filled_in(node) for node in nodes if isinstance(node, ast.JoinedStr)]
    return filled + [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def filled_in(node):
    return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_the_package(message, texts):
    assert any(message in text for text in texts)
