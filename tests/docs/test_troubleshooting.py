"""What the page of common errors quotes is what the package says."""

import ast
import re

import pytest

from docs.building.results import ROOT
from tests.docs.pages import read_file

QUOTED = re.findall(r"^### `(.+)`$", read_file("docs/troubleshooting.md"), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def texts():
    """The texts in the package, with … for the values that are filled in."""
    texts = []
    for path in ROOT.glob("memformers/**/*.py"):
        for node in ast.walk(ast.parse(read_file(path))):
            if isinstance(node, ast.JoinedStr):
                texts.append(text_of(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def text_of(f_string):
    text = ""
    for part in f_string.values:
        text += part.value if isinstance(part, ast.Constant) else "…"
    return text


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_the_package(message, texts):
    assert any(message in text for text in texts)
