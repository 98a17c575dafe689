"""What a training run survives, and what a large text costs, at a size of moments."""

import csv
import sys

import pytest

from experiments.soak import Soak, draw_faults
from tests.processes import run_module


def test_each_interval_has_a_fault_and_kinds_are_equally_many():
    drawn = draw_faults(Soak(steps=600, every=100))
    assert [step // 100 for step, _, _ in drawn] == [*range(6)]
    assert sorted(kind for _, kind, _ in drawn) == sorted(2 * ["SIGKILL", "SIGTERM", "disk full"])


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="psutil limits the files of a process on Linux only")
def test_a_soak_ends_with_the_bits_of_the_undisturbed_run(tmp_path):
    arguments = ["--steps", 45, "--every", 15, "--out", tmp_path / "soak.md"]
    ended = run_module("experiments.soak", *arguments)
    assert ended.code == 0, ended.out + ended.err
    text = (tmp_path / "soak.md").read_text(encoding="utf-8")
    assert all(f"| {kind}, rank " in text for kind in ("SIGKILL", "SIGTERM", "disk full"))
    assert "3 faults, 4 starts" in text


@pytest.mark.long
def test_a_large_text_is_measured_and_a_killed_run_is_the_same(tmp_path):
    path = tmp_path / "results.csv"
    Soak("large-text", size=2_000_000, tokens=20_480, out=path).run()
    with path.open(encoding="utf-8") as file:
        measured = {row["what"]: row["measured"] for row in csv.DictReader(file)}
    assert measured["resumed after SIGKILL"] == "the same bits"
    for what in ("tokenize as bytes: memory", "tokenize as subwords: memory", "evaluate: memory"):
        assert 0 < int(measured[what].removesuffix(" MiB").replace(",", "")) <= 500
    assert abs(int(measured["… more than on a text of 1 MB"].removesuffix(" MiB"))) <= 100
