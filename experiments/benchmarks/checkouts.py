"""This checkout beside another one: commands in both, and their seconds."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

HERE = Path(__file__).parents[2]


def run_command(checkout: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run ``memformers`` with these ``arguments`` as it is in a ``checkout``, in a folder that is removed."""
    command = [sys.executable, "-m", "memformers", *arguments]
    variables = {**environment, "PYTHONPATH": str(checkout.resolve())}
    with TemporaryDirectory() as folder:
        subprocess.run(command, env=variables, cwd=folder, check=True, capture_output=True)


def budget_option(checkout: Path) -> str:
    """The option for the tokens of a training run in a ``checkout``."""
    # Versions that have this file have the earlier name.
    has_earlier_name = (checkout / "memformers" / "training" / "loop.py").exists()
    return "--tokens" if has_earlier_name else "--max-tokens"


def median_and_range(seconds: Sequence[float], form: str) -> str:
    low = min(seconds)
    high = max(seconds)
    return f"{median(seconds):{form}} s [{low:{form}}, {high:{form}}]"
