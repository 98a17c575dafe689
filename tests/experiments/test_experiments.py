"""The experiments, started as a user starts them, but in this process."""

import pytest

from tests.builders import SMALL_RUN
from tests.processes import run_module


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize(
    ("name", "more"),
    [("compressive_transformer", ()), ("compare", ("--models", "transformer-xl"))],
)
def test_an_experiment_ends_with_a_report(name, more, tmp_path):
    ended = run_module(f"experiments.{name}", "--out", tmp_path / "run", *SMALL_RUN, *more)
    assert ended.code == 0, ended.err
    assert (tmp_path / "run" / "report.html").is_file()
    assert f"report: {tmp_path / 'run' / 'report.html'}" in ended.out


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [("transformer_xl", ["--n-heads", 3], "error: d_model=128 is not divisible by n_heads=3"),
     ("soak", ["--size", 0], "size to be a whole number, at least 1, got size=0"),
     ("soak", ["--steps", 5], "every=100 must be between 10 and steps=5"),
     ("memory_worth", ["--arms", "none", "c3"], "arm 'c3' is unknown; there are none, xl-64, slots-32-32"),
     ("ablation", ["--arms", "max", "max"], "arms=max max must name each arm once."),
     ("ablation", ["--resume"], "name the experiment to resume as --out."),
     ("ablation", ["--seeds", 0], "seeds=0")],
)  # fmt: skip
def test_a_mistake_gets_one_line(module, arguments, message):
    assert run_module(f"experiments.{module}", *arguments).says(message)
