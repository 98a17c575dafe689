"""What the comparison page is told, from runs' folders in every state that they can be in."""

import json
import math
import os
import shutil
import time

import numpy as np
import pytest

from memformers.common.files import write_json
from memformers.common.intervals import mean_of
from memformers.dashboard.comparisons import LiveComparison, LiveComparisons, mean_curve
from memformers.dashboard.live_run import POINTS, Curve, FollowedMetrics, thinned
from memformers.runs.plan import runs_of
from memformers.tracking.discovery import comparison_id, note_comparison, noted_comparisons
from tests.dashboard.conftest import record_losses, write_plan

ARMS = {"short": {"model.mem_len": 8}, "long": {"model.mem_len": 32}}
TRAIN = {"model": {"d_model": 16, "mem_len": 8}, "tokens": 100, "seed": 0, "data": "builtin"}


def plan(folder, seeds=(0, 1)):
    """A comparison that nobody has begun to train."""
    runs = runs_of(list(ARMS), seeds)
    write_plan(folder, runs, TRAIN, ARMS)
    for run in runs:
        write_json(folder / run / "labml.json", {"run": f"id-of-{run}", "name": run})
    return folder


def record(folder, losses, status="", result=None):
    """A run that recorded ``losses``."""
    record_losses(folder, losses)
    card = {"run": f"id-of-{folder.name}", "started": time.time(), "status": status}
    write_json(folder / "labml.json", card)
    if result:
        write_json(folder / "result.json", result)


def shown(comparison, metric="", over="tokens"):
    comparison.update()
    return comparison.describe(metric, over, lambda run: run == "id-of-short")


def state_of(comparison, name):
    return next(run["state"] for run in shown(comparison)["runs"] if run["name"] == name)


def test_planned_runs_are_shown_before_anything_is_trained(tmp_path):
    data = shown(LiveComparison(plan(tmp_path / "both")))
    assert data["name"] == "both"
    assert [run["name"] for run in data["runs"]] == ["short", "long", "short-seed1", "long-seed1"]
    assert {run["state"] for run in data["runs"]} == {"waiting"}
    assert data["settings"] == {"model.mem_len": "mem_len"}
    assert [run["settings"]["model.mem_len"] for run in data["runs"]] == [8, 32, 8, 32]
    assert [run["page"] for run in data["runs"]] == ["id-of-short", "", "", ""]
    assert data["metric"] == ""


def test_a_setting_is_shown_as_it_is_used_and_only_for_models_that_use_it(tmp_path):
    comparison = LiveComparison(plan(tmp_path, seeds=(0,)))
    shared = {"tokens": 100, "memory_warmup": None}
    model = {"mem_len": 8, "vocab_size": 65, "model": "transformer"}
    write_json(tmp_path / "short" / "config.json", shared | {"model": model})
    write_json(tmp_path / "short" / "run.json", {"decided": {"memory_warmup": 0.5}})
    waiting = model | {"vocab_size": 256, "model": "transformer-xl"}
    write_json(tmp_path / "long" / "config.json", shared | {"model": waiting})
    short, long = (run["settings"] for run in shown(comparison)["runs"])
    assert (short["model.mem_len"], long["model.mem_len"]) == (None, 8)
    assert "model.vocab_size" not in short
    write_json(tmp_path / "long" / "run.json", {"decided": {"memory_warmup": 0.5}})
    short, long = (run["settings"] for run in shown(comparison)["runs"])
    assert (short["memory_warmup"], long["memory_warmup"]) == (None, 0.5)


def test_a_comparison_says_how_much_is_trained_and_left(tmp_path):
    comparison = LiveComparison(plan(tmp_path, seeds=(0,)))
    record(tmp_path / "short", [3.0] * 5)  # 50 of 100 tokens, in 2.5 seconds
    data = shown(comparison)
    assert (data["progress"], data["left"], data["report"]) == (0.25, pytest.approx(7.5), False)
    (tmp_path / "report.html").write_text("")
    assert shown(comparison)["report"]


def test_each_state_of_a_run_has_its_name(tmp_path):
    comparison = LiveComparison(plan(tmp_path))
    run = tmp_path / "short"
    record(run, [3.0])
    assert state_of(comparison, "short") == "running"
    for status, state in [
        ("completed", "finished"), ("killed", "stopped"), ("crashed: KeyboardInterrupt ", "stopped"),
        ("crashed: SystemExit 143", "stopped"), ("crashed: NotFiniteError loss is nan", "failed"),
    ]:  # fmt: skip
        record(run, [], status)
        assert state_of(comparison, "short") == state
    record(run, [])
    long_ago = time.time() - 7200
    os.utime(run / "metrics.jsonl", (long_ago, long_ago))
    assert state_of(comparison, "short") == "silent"
    record(run, [2.0], result={"loss": 2.0})
    assert state_of(comparison, "short") == "finished"


def test_half_a_line_waits_for_its_rest_and_what_is_no_record_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = FollowedMetrics(path)
    metrics.update()
    assert metrics.rows == 0
    path.write_bytes(b'{"tokens": 1, "a": 2.5}\n[1]\n{"tokens": "x"}\n\xff\n{"half\n{"tokens": 2, "a": 3')
    metrics.update()
    assert [list(part) for part in metrics.points("a")[::2]] == [[1.0], [2.5]]
    with open(path, "a") as file:
        file.write('.5, "b": true}\n{"tokens": 3, "b": 1e400, "c": 7}\n')
    metrics.update()
    assert [list(part) for part in metrics.points("a")[::2]] == [[1.0, 2.0], [2.5, 3.5]]
    assert len(metrics.points("b")[0]) == 0
    assert list(metrics.points("c")[0]) == [3.0]


@pytest.mark.parametrize("how", ["cut", "replaced", "gone"])
def test_a_file_that_was_cut_or_replaced_is_read_again(how, tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"tokens": i, "a": 1.0}) + "\n" for i in range(9)]
    path.write_text("".join(lines))
    metrics = FollowedMetrics(path)
    metrics.update()
    if how == "cut":
        os.truncate(path, sum(map(len, lines[:4])))
    elif how == "replaced":
        (tmp_path / "new").write_text("".join(lines[:4]) + " " * 1000)
        (tmp_path / "new").replace(path)
    else:
        path.unlink()
    metrics.update()
    assert metrics.rows == (0 if how == "gone" else 4)


def test_means_and_bands_are_those_of_the_seeds_that_are_finished(tmp_path):
    comparison = LiveComparison(plan(tmp_path, seeds=(0, 1, 2)))
    losses = {"short": [3.0, 2.0, 1.0], "short-seed1": [3.5, 2.2, 1.4], "short-seed2": [9.0]}
    for name, recorded in losses.items():
        ended = ("completed", {"loss": recorded[-1]}) if len(recorded) == 3 else ()
        record(tmp_path / name, recorded, *ended)
    data = shown(comparison)
    short, long = data["arms"]
    assert short["counted"] == ["short", "short-seed1"]
    assert short["mean"]["x"] == [10.0, 20.0, 30.0]
    for i in range(3):
        wanted = mean_of([losses["short"][i], losses["short-seed1"][i]])
        assert short["mean"]["y"][i] == pytest.approx(wanted.mean)
        assert short["mean"]["high"][i] == pytest.approx(wanted.mean + wanted.half_width)
        assert short["mean"]["low"][i] == pytest.approx(wanted.mean - wanted.half_width)
    wanted = mean_of([1.0, 1.4])
    assert short["values"]["held_out"] == pytest.approx([wanted.mean, wanted.half_width])
    assert short["states"] == ["finished", "finished", "running"]
    assert long["mean"]["seeds"] == 0
    assert shown(comparison, over="seconds")["arms"][0]["mean"]["x"] == [0.5, 1.0, 1.5]
    running = data["runs"][4]
    assert (running["name"], running["curve"]["y"], running["progress"]) == ("short-seed2", [9.0], 0.1)


def test_a_long_curve_is_thinned_alike_for_all_seeds():
    rng = np.random.default_rng(0)
    tokens = np.arange(1.0, 20_001.0)
    curves = [Curve(tokens, tokens / 7, rng.normal(size=tokens.size)) for _ in range(2)]
    thin = [thinned(curve, 20_000.0) for curve in curves]
    assert len(thin[0].y) == POINTS
    assert (thin[0].tokens == thin[1].tokens).all()
    assert thin[0].y[3] == pytest.approx(curves[0].y[120:160].mean())
    assert thin[0].x[3] == pytest.approx(160 / 7)
    assert len(mean_curve(thin)["y"]) == POINTS
    half = thinned(Curve(tokens[:10_010], tokens[:10_010], curves[0].y[:10_010]), 20_000.0)
    assert (half.tokens[:-1] == thin[0].tokens[:250]).all()


def test_what_has_not_changed_is_not_sent_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = plan(tmp_path / "one")
    note_comparison(folder)
    comparisons, identity = LiveComparisons(lambda run: False), comparison_id(folder)
    first = comparisons.describe(identity, "", "tokens", "")
    assert comparisons.describe(identity, "", "tokens", first["version"]) == {"version": first["version"]}
    assert "runs" in comparisons.describe(identity, "", "seconds", first["version"])
    record(folder / "long", [2.0])
    second = comparisons.describe(identity, "", "tokens", first["version"])
    assert second["runs"][1]["curve"]["y"] == [2.0]
    assert comparisons.of_run("id-of-long-seed1") == identity
    assert comparisons.of_run("id-of-nothing") == ""


def test_notes_lead_to_folders_and_those_that_are_gone_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    one, two = (plan(tmp_path / name) for name in ("one", "two"))
    for folder in (one, two):
        note_comparison(folder)
        time.sleep(0.02)
    comparisons = LiveComparisons(lambda run: False)
    assert [entry["name"] for entry in comparisons.list()] == ["two", "one"]
    shutil.rmtree(one)
    assert [entry["name"] for entry in comparisons.list()] == ["two"]
    assert comparisons.describe(comparison_id(one), "", "tokens", "") is None
    note_comparison(two)
    assert list(noted_comparisons()) == [comparison_id(two)]
    note = tmp_path / "state" / "memformers" / "comparisons" / f"{comparison_id(one)}.json"
    for text in ("", "[1]", '{"folder": 3}', json.dumps({"folder": "/etc"})):  # of another folder's id
        note.write_text(text)
        assert list(noted_comparisons()) == [comparison_id(two)]


def test_runs_that_were_not_planned_together_are_shown_too(tmp_path):
    for name, mem_len in (("a", 8), ("b", 16)):
        record(tmp_path / name, [2.0, math.nan])
        config = TRAIN | {"seed": 3, "model": {"d_model": 16, "mem_len": mem_len}}
        write_json(tmp_path / name / "config.json", config)
    data = shown(LiveComparison(tmp_path))
    assert [(run["arm"], run["seed"]) for run in data["runs"]] == [("a", 3), ("b", 3)]
    assert data["settings"] == {"model.mem_len": "mem_len"}
    assert data["runs"][0]["curve"] == {"x": [10.0], "y": [2.0]}
    json.dumps(data, allow_nan=False)


@pytest.mark.parametrize("name", ["experiment", "a/labml", "a/config", "a/result", "a/run"])
@pytest.mark.parametrize(
    "text", ["", '{"half', "[]", '{"run": {"x": 1}, "status": 5, "loss": "x", "tokens": "y"}']
)
def test_a_broken_file_breaks_nothing(name, text, tmp_path):
    record(plan(tmp_path) / "a", [2.0])
    (tmp_path / f"{name}.json").write_text(text)
    assert "a" in [run["name"] for run in shown(LiveComparison(tmp_path))["runs"]]
