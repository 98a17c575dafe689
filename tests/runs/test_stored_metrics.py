"""Metrics whose columns are stored beside them."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from memformers.runs.folder import COLUMNS, METRICS
from memformers.runs.metrics import Metrics
from memformers.runs.stored_metrics import MIN_BYTES, StoredMetrics


def lines_of(n_records, loss=2.0):
    """Records of which every tenth has a second metric."""
    lines = []
    for i in range(n_records):
        record = {"tokens": 10 * i, "seconds": i / 4, "loss.train": loss + 1 / (i + 1)}
        if i % 10 == 0:
            record["loss.valid"] = loss - 1 / (i + 1)
        lines.append(json.dumps(record) + "\n")
    return "".join(lines)


LONG = lines_of(20_000)


@pytest.fixture
def folder(tmp_path):
    """A folder with long metrics whose columns are stored."""
    assert len(LONG) > MIN_BYTES
    (tmp_path / METRICS).write_text(LONG)
    StoredMetrics(tmp_path / METRICS).read()
    assert (tmp_path / COLUMNS).exists()
    return tmp_path


def assert_as_parsed(folder, is_stored):
    """The same numbers as by parsing, of which all or none come from the stored columns."""
    stored = StoredMetrics(folder / METRICS)
    records = stored.read()
    parsed = Metrics(folder / METRICS)
    all_records = parsed.read()
    assert len(records) == (0 if is_stored else len(all_records))
    assert stored.n_records == parsed.n_records == len(all_records)
    assert (stored.offset, stored.n_lines, stored.changed) == (parsed.offset, parsed.n_lines, parsed.changed)
    assert stored.names == parsed.names
    for name in parsed.names:
        for over in ("tokens", "seconds"):
            for ours, theirs in zip(stored.points(name, over), parsed.points(name, over), strict=True):
                assert np.array_equal(ours, theirs)


def test_long_metrics_are_parsed_once(folder):
    assert_as_parsed(folder, is_stored=True)
    columns = load_file(folder / COLUMNS)
    assert columns['"loss.train"'][:2].tolist() == [3.0, 2.5]
    assert np.isnan(columns['"loss.valid"']).sum() == 18_000


def test_short_metrics_are_not_stored(tmp_path):
    (tmp_path / METRICS).write_text(lines_of(100))
    assert StoredMetrics(tmp_path / METRICS).read()
    assert not (tmp_path / COLUMNS).exists()


def test_metrics_that_grew_are_parsed_again(folder):
    with open(folder / METRICS, "a") as file:
        file.write(lines_of(5))
    assert_as_parsed(folder, is_stored=False)


def test_records_that_come_later_are_read_beside_the_stored_ones(folder):
    metrics = StoredMetrics(folder / METRICS)
    assert metrics.read() == []
    with open(folder / METRICS, "a") as file:
        file.write('{"tokens": 7000000, "new": 1}\n')
    assert metrics.read() == [{"tokens": 7000000, "new": 1}]
    assert metrics.points("new")[2].tolist() == [1.0]
    assert metrics.n_records == 20_001


def test_metrics_that_were_replaced_are_parsed_again(folder):
    (folder / "other").write_text(lines_of(20_000, loss=3.0))
    (folder / "other").replace(folder / METRICS)
    assert_as_parsed(folder, is_stored=False)
    assert_as_parsed(folder, is_stored=True)


@pytest.mark.parametrize("later", [0, 1])
def test_metrics_that_were_edited_in_place_are_parsed_again(folder, later):
    """Also where the time of modification is set back afterwards."""
    before = os.stat(folder / METRICS)
    with open(folder / METRICS, "r+") as file:
        file.write(LONG.splitlines(keepends=True)[0].replace("3.0", "9.0"))
    os.utime(folder / METRICS, ns=(before.st_atime_ns, before.st_mtime_ns + later))
    after = os.stat(folder / METRICS)
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns + later)
    assert_as_parsed(folder, is_stored=False)
    assert StoredMetrics(folder / METRICS).points("loss.train")[2][0] == 9.0


def test_a_reader_of_an_earlier_file_stores_nothing(tmp_path):
    """The file is written anew and has grown before it is read again, as by a repeated copy."""
    lines = LONG.splitlines(keepends=True)
    others = LONG.replace('"loss.train": ', '"loss.train": 1').splitlines(keepends=True)
    first = "".join(lines[:1000])
    (tmp_path / METRICS).write_text(first)
    metrics = StoredMetrics(tmp_path / METRICS)
    assert len(metrics.read()) == 1000
    # The other file has the end of a line at the same byte.
    others.insert(0, '{"tokens": 0}' + " " * (len(first) - len("".join(others[:900])) - 14) + "\n")
    other = "".join(others)
    assert other[len(first) - 1] == "\n"
    (tmp_path / METRICS).write_text(other)
    assert len(metrics.read()) == 20_001 - 901
    assert_as_parsed(tmp_path, is_stored=False)


def test_a_file_that_changes_while_it_is_read_is_not_stored(tmp_path):
    path = tmp_path / METRICS
    path.write_text(LONG)
    metrics = StoredMetrics(path)
    append = metrics.append

    def append_late(records):
        append(records)
        path.write_text(LONG.replace('"loss.train": 2.', '"loss.train": 7.'))

    metrics.append = append_late
    assert metrics.read()
    assert path.stat().st_size == metrics.offset
    assert_as_parsed(tmp_path, is_stored=False)


@pytest.mark.parametrize("name", ["__metadata__", "\ud800", "source", "", 'a"b', "\x00"])
def test_a_metric_of_any_name_is_stored(tmp_path, name):
    (tmp_path / METRICS).write_text(LONG + json.dumps({"tokens": 1e6, name: 7}) + "\n")
    StoredMetrics(tmp_path / METRICS).read()
    assert_as_parsed(tmp_path, is_stored=True)
    assert StoredMetrics(tmp_path / METRICS).points(name)[2].tolist() == [7.0]


def damage_by_cutting(path):
    os.truncate(path, 1000)


def damage_by_emptying(path):
    path.write_bytes(b"")


def damage_by_another_file(path):
    save_file({"tokens": np.zeros(3)}, path)


def damage_by_uneven_columns(path):
    with_source = path.read_bytes()
    columns = load_file(path)
    columns['"tokens"'] = columns['"tokens"'][:-1]
    header_length = int.from_bytes(with_source[:8], "little")
    metadata = json.loads(with_source[8 : 8 + header_length])["__metadata__"]
    save_file(columns, path, metadata)


def damage_by_a_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = [
    damage_by_cutting, damage_by_emptying, damage_by_another_file, damage_by_uneven_columns,
    damage_by_a_folder,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_columns_that_are_damaged_are_not_used(folder, damage):
    damage(folder / COLUMNS)
    assert_as_parsed(folder, is_stored=False)


def test_broken_lines_are_reported_each_time(tmp_path):
    (tmp_path / METRICS).write_text(LONG + "[1]\n")
    for _ in range(2):
        metrics = StoredMetrics(tmp_path / METRICS)
        metrics.read()
        assert "line 20,001:" in metrics.broken
    assert not (tmp_path / COLUMNS).exists()
