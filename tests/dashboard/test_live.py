"""What the live page gets, from runs' folders in every state that they can be in."""

import json
import math
import os
import shutil
import time
from contextlib import ExitStack

import pytest

from memformers.common.files import write_json
from memformers.common.intervals import mean_of
from memformers.dashboard.live import Comparisons, describe, list_of, status, version_of
from memformers.report.rendering import html_of
from memformers.runs.folder import alone_in, in_use
from memformers.runs.metrics import Metrics
from memformers.runs.plan import runs_of
from memformers.runs.reader import Runs
from memformers.runs.time_left import seconds_left, share_trained
from memformers.tracking.discovery import comparison_id, note_comparison, noted_comparisons
from tests.dashboard.conftest import record_losses, write_plan
from tests.report.fake_runs import changed

ARMS = {"short": {"model.mem_len": 8}, "long": {"model.mem_len": 32}}
TRAIN = {"model": {"d_model": 16, "mem_len": 8}, "max_tokens": 100, "seed": 0, "data": "builtin"}


# Holds the locks of the runs that are trained.
TRAINED = ExitStack()


@pytest.fixture(autouse=True)
def _trainings_end():
    yield
    TRAINED.close()


def plan(folder, seeds=(0, 1)):
    """A comparison that nobody has begun to train."""
    runs = runs_of(list(ARMS), seeds)
    write_plan(folder, runs, TRAIN, ARMS)
    for run in runs:
        write_json(folder / run / "labml.json", {"run": f"idof{run.replace('-', '')}", "name": run})
    return folder


def record(folder, losses, status="", result=None):
    """A run that recorded ``losses``, and is trained while it has no ``status``."""
    record_losses(folder, losses)
    if not (status or result or in_use(folder)):
        TRAINED.enter_context(alone_in(folder))
    card = {"run": f"idof{folder.name.replace('-', '')}", "started": time.time(), "status": status}
    write_json(folder / "labml.json", card)
    if result:
        write_json(folder / "result.json", {"bits_per_character": result})


def curves(data):
    return {trace["name"]: trace for trace in data["figure"]["data"] if trace["showlegend"]}


def test_planned_runs_are_shown_before_they_begin(tmp_path):
    runs = Runs(plan(tmp_path / "both", seeds=(0,)))
    data = describe(runs, knows=lambda run: run == "idofshort")
    assert (data["title"], data["metric"], data["figure"]["data"]) == ("both", "", [])
    assert status(runs) == "2 runs, 0 finished; no record yet"
    assert '<a href="/run/idofshort">short</a>' in data["below"]
    assert data["below"].count("<a ") == 1
    cells = data["below"].partition("mem_len</td>")[2].partition("</tr>")[0]
    assert [cell.rpartition(">")[2] for cell in cells.split("</td>")[:2]] == ["8", "32"]
    record(runs.folder / "short", [3.0] * 5)  # 50 of 100 tokens, in 2.5 seconds
    runs.update()
    assert share_trained(runs.all) == 0.25
    assert seconds_left(runs) == pytest.approx(7.5)
    assert "25 % trained, about 8 s left" in status(runs)
    assert "running, 50" in describe(runs)["above"]
    assert not describe(runs)["report"]
    (runs.folder / "report.html").write_text("")
    assert describe(runs)["report"]


def test_half_written_records_wait(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.read()
    assert metrics.n_records == 0
    path.write_bytes(b'{"tokens": 1, "a": 2.5}\n[1]\n{"tokens": "x"}\n\xff\n{"half\n{"tokens": 2, "a": 3')
    assert metrics.read() == [{"tokens": 1, "a": 2.5}]
    assert "line 2:" in metrics.broken
    with open(path, "a") as file:
        file.write('.5, "b": true}\n{"tokens": 3, "b": 1e400, "c": 7}\n')
    metrics.read()
    assert metrics.n_records == 3, "only what is new is read"
    points = {name: [part.tolist() for part in metrics.points(name)[::2]] for name in "abc"}
    assert points == {"a": [[1.0, 2.0], [2.5, 3.5]], "b": [[], []], "c": [[3.0], [7.0]]}
    os.truncate(path, len('{"tokens": 1, "a": 2.5}\n'))
    metrics.read()
    assert metrics.n_records == 1
    (tmp_path / "new").write_text('{"tokens": 1, "a": 1}\n' * 9)
    (tmp_path / "new").replace(path)
    metrics.read()
    assert metrics.n_records == 9
    path.unlink()
    metrics.read()
    assert metrics.n_records == 0


def test_a_live_verdict_counts_finished_seeds_only(tmp_path):
    runs = Runs(plan(tmp_path, seeds=(0, 1, 2)))
    losses = {"short": [3.0, 2.0, 1.0], "short-seed1": [3.5, 2.2, 1.4], "short-seed2": [9.0]}
    losses |= {"long": [3.0, 2.0, 0.5], "long-seed1": [3.5, 2.2, 0.95]}
    for name, recorded in losses.items():
        record(tmp_path / name, recorded, *("completed", recorded[-1]) * (len(recorded) == 3))
    runs.update()
    data = describe(runs, "loss.valid")
    mean = data["figure"]["data"][0]
    assert (mean["name"], mean["x"]) == ("short", [10.0, 20.0, 30.0])
    wanted = [mean_of([losses["short"][i], losses["short-seed1"][i]]) for i in range(3)]
    assert mean["y"] == pytest.approx([m.mean for m in wanted])
    assert describe(runs, "loss.valid", "seconds")["figure"]["data"][0]["x"] == [0.5, 1.0, 1.5]
    expected = ("<strong>So far</strong>: 4 of 6", "2 finished, 1 running", "1.200\u00a0±\u00a02.541",
            "<strong>Two seeds are too few to claim which model is better.</strong>",
            "<em>−0.500 and −0.450</em>")  # fmt: skip
    assert [words for words in expected if words not in data["above"]] == []
    assert data["above"].count("<li style=") == 2


def test_a_live_band_needs_three_finished_seeds(tmp_path):
    runs = Runs(plan(tmp_path, seeds=(0, 1, 2)))
    losses = {"short": [3.0, 2.0], "short-seed1": [3.5, 2.2], "short-seed2": [3.1, 2.4]}
    losses |= {"long": [3.0, 2.0], "long-seed1": [3.5, 2.2]}
    for name, recorded in losses.items():
        record(tmp_path / name, recorded, "completed", recorded[-1])
    runs.update()
    low, high, mean, other = describe(runs, "loss.valid")["figure"]["data"]
    assert (mean["name"], other["name"]) == ("short", "long")
    wanted = [mean_of([3.0, 3.5, 3.1]), mean_of([2.0, 2.2, 2.4])]
    for trace, sign in ((low, -1), (mean, 0), (high, 1)):
        assert trace["y"] == pytest.approx([m.mean + sign * m.half_width for m in wanted])


def test_the_live_page_says_why_its_two_losses_differ(tmp_path):
    runs = Runs(plan(tmp_path, seeds=(0,)))
    record(tmp_path / "short", [3.0, 2.0])
    result = {"bits_per_character": 1.9, "evaluated_tokens": 9_000, "held_out_tokens": 9_000}
    with open(tmp_path / "short" / "metrics.jsonl", "a") as file:
        file.write(
            json.dumps({"tokens": 30, "seconds": 2, "loss.valid": 1.8, "evaluated_tokens": 512}) + "\n"
        )
    runs.update()
    paragraph = "Tables and figures read different parts of the held-out text"
    assert paragraph not in describe(runs)["above"], "there is only one loss yet"
    write_json(tmp_path / "short" / "result.json", result)
    write_json(tmp_path / "short" / "labml.json", {"run": "idofshort", "started": 1.0, "status": "completed"})
    runs.update()
    above = describe(runs)["above"]
    assert paragraph in above
    assert "over the whole held-out text; " in above
    assert "over the first 512 tokens" in above
    write_json(tmp_path / "short" / "result.json", result | {"evaluated_tokens": [1], "held_out_tokens": "x"})
    runs.update()
    assert paragraph in describe(runs)["above"], "a broken number breaks nothing"


def test_the_live_page_falls_back_to_nats(tmp_path):
    runs = Runs(plan(tmp_path, seeds=(0,)))
    for name, loss in (("short", 2.5), ("long", 2.25)):
        record(tmp_path / name, [3.0, loss], "completed")
        write_json(tmp_path / name / "result.json", {"bits_per_character": None, "loss": loss})
    runs.update()
    above = describe(runs)["above"]
    assert "nats per token" in above
    assert "<em>−0.250</em>" in above or "0.250 nats per token apart" in above


def test_only_changes_are_sent(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    one, two = (plan(tmp_path / name) for name in ("one", "two"))
    for folder in (one, two):
        note_comparison(folder)
        time.sleep(0.02)
    comparisons = Comparisons()
    identity = comparison_id(one)
    first = version_of(comparisons.get(identity), "tokens")
    assert version_of(comparisons.get(identity), "tokens") == first
    assert version_of(comparisons.get(identity), "seconds") != first
    record(one / "long", [2.0])
    assert version_of(comparisons.get(identity), "tokens") != first
    assert [runs.folder.name for runs in comparisons.all().values()] == ["two", "one"]
    assert "&lt;b&gt;" in html_of(list_of({identity: Runs(plan(tmp_path / "<b>"))}, "/c"))
    shutil.rmtree(one)
    assert comparisons.get(identity) is None
    note_comparison(two)
    note = tmp_path / "state" / "memformers" / "comparisons" / f"{identity}.json"
    # The last folder has another id.
    for text in ("", "[1]", '{"folder": 3}', json.dumps({"folder": "/etc"})):
        note.write_text(text)
        assert list(noted_comparisons()) == [comparison_id(two)]


def test_runs_that_were_not_planned_together_are_shown_too(tmp_path):
    for name, mem_len in (("a", 8), ("b", 16)):
        record(tmp_path / name, [2.0, math.nan])
        config = TRAIN | {"seed": 3, "model": {"d_model": 16, "mem_len": mem_len}}
        write_json(tmp_path / name / "config.json", config)
    data = describe(Runs(tmp_path))
    traces = {name: (trace["x"], trace["y"]) for name, trace in curves(data).items()}
    assert traces == {"a": ([10.0], [2.0]), "b": ([10.0], [2.0])}
    json.dumps(data, allow_nan=False)


@pytest.mark.parametrize("name", ["experiment", "a/labml", "a/config", "a/result", "a/run"])
@pytest.mark.parametrize(
    "text", ["", '{"half', "[]", '{"run": {"x": 1}, "status": 5, "loss": "x", "tokens": "y", "model": 1}']
)
def test_a_broken_file_breaks_nothing(name, text, tmp_path):
    record(plan(tmp_path) / "a", [2.0])
    (tmp_path / f"{name}.json").write_text(text)
    runs = Runs(tmp_path)
    assert "a" in [run.folder.name for run in runs.all]
    assert "a</td>" in describe(runs)["below"]
    assert status(runs)


@pytest.mark.parametrize("measure", [{"name": "x"}, {"label": "x", "of": "bits_per_character", "form": "x"}])
def test_a_broken_measure_is_said(measure, tmp_path):
    record(plan(tmp_path) / "a", [2.0], result=2.0)
    changed(tmp_path / "experiment.json", task="games", task_info={"measure": measure})
    data = describe(Runs(tmp_path))
    assert "<p>" in data["above"]
    assert "a</td>" in data["below"]


def test_facts_and_results_may_have_any_values(tmp_path):
    record(plan(tmp_path) / "a", [2.0], result=10**400)
    write_json(tmp_path / "a" / "run.json", {"unused": [{}, "seed"], "memory": {"one_layer": 10**400}})
    write_json(tmp_path / "a" / "config.json", TRAIN)
    assert "a</td>" in describe(Runs(tmp_path))["below"]
