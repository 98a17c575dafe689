"""The three memories beside those of the package, at a size of moments."""

import csv
import json

from experiments.memories import __main__ as program
from experiments.memories.__main__ import MODELS, Memories, write_report
from memformers.data.builtin import write_play


def test_every_memory_has_its_line_on_every_task_and_differences_are_paired(
    tmp_path, monkeypatch, quick_runs
):
    monkeypatch.setattr(
        program, "MEMORIES", program.replace(program.MEMORIES, d_model=16, n_layers=2, d_ff=16)
    )
    (tmp_path / "text.txt").write_text(write_play(60_000), encoding="utf-8")
    monkeypatch.setenv("MEMFORMERS_DATA", str(tmp_path / "text.txt"))
    out = tmp_path / "a"
    Memories(quick=True, out=out, dashboard="off").run()
    found = json.loads((out / "results.json").read_text())
    assert list(found) == ["recall", "tiny-shakespeare"]
    assert all(list(arms) == list(MODELS) for arms in found.values())
    with (out / "results.csv").open() as file:
        rows = {(row["measure"], row["memory"]): float(row["value"]) for row in csv.DictReader(file)}
    bits = {name: found["tiny-shakespeare"][name]["0"]["bits_per_character"] for name in MODELS}
    assert rows["bits per character, tiny-shakespeare", "infini"] == bits["infini"]
    page = (out / "report.md").read_text()
    difference = f"{bits['infini'] - bits['transformer-xl']:+.3f}".replace("-", "−")
    assert f"| {difference} |" in page.split("## Minus Transformer-XL")[1]
    assert "differ in more than their memory**: batch_size, tbptt;" in page
    write_report(out)
    assert (out / "report.md").read_text() == page
