"""The experiments, started as a user starts them, but in this process."""

import sys
from pathlib import Path

import pytest

from tests.builders import SMALL_RUN
from tests.processes import finish, run_module

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [*((name, SMALL_RUN) for name in ("transformer_xl", "compressive_transformer", "compare")),
     ("recall", ["--arms", "compressive", "--seeds", 1])],
)  # fmt: skip
def test_an_experiment_ends_with_a_report(name, arguments, tmp_path):
    ended = run_module(f"experiments.{name}", "--out", tmp_path / "run", *arguments)
    assert ended.code == 0, ended.err
    assert (tmp_path / "run" / "report.html").is_file()
    assert f"report: {tmp_path / 'run' / 'report.html'}" in ended.out


@pytest.mark.long
def test_the_tables_in_the_docs_are_those_that_scaling_writes(tmp_path):
    ended = run_module("experiments.scaling", "--out", tmp_path / "scaling.md")
    assert ended.code == 0, ended.err
    text = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    assert (tmp_path / "scaling.md").read_text(encoding="utf-8") == text
    assert text in ended.out


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [("transformer_xl", ["--heads", 3], "error: d_model=128 is not divisible by heads=3"),
     ("scaling", ["--bandwidth", 0], "bandwidth to be a number, above 0, got bandwidth=0.0"),
     ("soak", ["--steps", 5], "every=100 must be between 10 and steps=5"),
     ("recipes", ["--arms", "β₂ 2"], "arm 'β₂ 2' is unknown; there are default, first-version"),
     ("slots", ["--arms", "c3"], "arm 'c3' is unknown; there are usual, c2"),
     ("ablation", ["--arms", "min"], "arm 'min' is unknown; there are transformer-xl, bptt, max, "),
     ("ablation", ["--arms", "max", "max"], "arms=max max must name each arm once."),
     ("ablation", ["--resume"], "name the experiment to resume as --out."),
     ("ablation", ["--seeds", 0], "seeds=0"),
     ("ablation", ["--text-tokens", 0], "text_tokens=0"),
     ("ablation", ["--recall-tokens", 0], "recall_tokens=0")],
)  # fmt: skip
def test_a_mistake_gets_one_line(module, arguments, message):
    assert run_module(f"experiments.{module}", *arguments).said(message)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="a rank's process is found in /proc")
def test_a_soak_ends_with_the_bits_of_the_undisturbed_training_and_a_table(tmp_path):
    pytest.importorskip("labml_app", reason="the dashboard's extra is not installed")
    arguments = ["--steps", 30, "--every", 15, "--out", tmp_path / "soak.md"]
    result = finish([sys.executable, "-m", "experiments.soak", *arguments], cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    text = (tmp_path / "soak.md").read_text(encoding="utf-8")
    assert "| SIGKILL, rank " in text
    assert "| SIGTERM, rank " in text
    assert "2 faults, 3 starts" in text
    assert "the same bits as the undisturbed one" in " ".join(text.split())
