"""The experiments as a user starts them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import SMALL_RUN

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def start(name, *arguments):
    command = [sys.executable, str(EXPERIMENTS / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("name", ["transformer_xl.py", "compressive_transformer.py", "compare.py"])
def test_an_experiment_ends_with_a_report(name, tmp_path):
    result = start(name, "--out", tmp_path / "run", *SMALL_RUN)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "report.html").is_file()
    assert f"report: {tmp_path / 'run' / 'report.html'}" in result.stdout


def test_a_mistake_gets_one_line():
    result = start("transformer_xl.py", "--heads", 3)
    assert result.returncode == 2
    assert "error: d_model=128 is not divisible by heads=3" in result.stderr
    assert "Traceback" not in result.stderr
