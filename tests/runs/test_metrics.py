"""Curves of metrics."""

import json

from memformers.runs.metrics import Metrics

RECORDS = [
    {"tokens": 3, "seconds": 30.0, "loss": 1.0},
    {"tokens": 1, "seconds": 10.0, "loss": 5.0},
    {"tokens": 1, "seconds": 11.0, "loss": 4.0},  # of a resumed run, which recorded these tokens again
    {"tokens": 2, "loss": 3.0},
    {"tokens": 4, "seconds": 40.0},
]


def curve_of(folder, *names):
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    metrics = Metrics(path)
    metrics.read()
    return [part.tolist() for part in metrics.points(*names)]


def test_curve_has_the_last_record_of_each_number_of_tokens(tmp_path):
    assert curve_of(tmp_path, "loss") == [[1, 2, 3], [1, 2, 3], [4, 3, 1]]


def test_curve_over_seconds_leaves_out_records_without_them(tmp_path):
    assert curve_of(tmp_path, "loss", "seconds") == [[1, 3], [11, 30], [4, 1]]


def test_curve_of_a_metric_without_records_is_empty(tmp_path):
    assert curve_of(tmp_path, "accuracy") == [[], [], []]
