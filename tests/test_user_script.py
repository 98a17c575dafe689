"""What a type checker tells users of the package."""

import runpy
import sys

import pytest

from docs.building.results import ROOT
from tests.processes import finish

SCRIPT = ROOT / "tests/typed_script.py"


def check_types(script, folder):
    """What mypy says of a ``script``, as strictly as it can."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={folder}", script]
    return finish(command, cwd=ROOT)


def test_the_typed_script_runs():
    names = runpy.run_path(str(SCRIPT), run_name="__main__")
    assert callable(names["train_on"])


@pytest.mark.long
def test_types_of_public_names_are_known(tmp_path):
    result = check_types(SCRIPT, tmp_path / "cache")
    assert result.returncode == 0, result.stdout

    wrong = tmp_path / "wrong.py"
    text = SCRIPT.read_text(encoding="utf-8").replace("    LMOutput,", "    LMOutputs as LMOutput,")
    wrong.write_text(text.replace("(features, torch.Tensor)", "(features, Memory)"), encoding="utf-8")
    errors = check_types(wrong, tmp_path / "cache").stdout
    assert 'Module "memformers" has no attribute "LMOutputs"' in errors
    assert 'Expression is of type "Tensor", not "Memory"' in errors
