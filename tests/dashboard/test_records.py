"""Records are whole or not there, whatever happens; what can't be read stops nothing."""

import random
import signal
import subprocess
import sys

import numpy as np
import pytest
from labml_db import Key

from memformers.dashboard.records import JsonRecords, Records

WRITER = """
import sys
from pathlib import Path
import numpy as np
from labml_db import Index, Model
from memformers.dashboard.records import Records

class Curve(Model["Curve"]):
    values: np.ndarray
    number: int

class CurveIndex(Index["Curve"]):
    pass

records = Records(Path(sys.argv[1]), print)
records.install([Curve], [CurveIndex])
for i in range(200):
    curve = Curve(key=f"Curve:{i % 7}", values=np.full(20_000, float(i)), number=i)
    curve.save()
    CurveIndex.set(str(i), curve.key)
    print(i, flush=True)
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_a_kill_in_the_middle_of_200_writes_leaves_every_record_readable(seed, tmp_path):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    for _ in range(random.Random(seed).randrange(20, 150)):
        last = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    assert last < 199
    numbers = []
    for path in (tmp_path / "Curve").glob("[!.]*"):
        record = JsonRecords().from_string(path.read_text())
        assert (record["values"] == record["number"]).all()
        numbers.append(record["number"])
    assert len(numbers) == 7
    assert max(numbers) >= last
    index = JsonRecords().from_string((tmp_path / "indexes" / "CurveIndex.json").read_text())
    assert len(index) >= last


def test_what_labml_keeps_in_a_record_comes_back():
    record = {
        "key": Key("Run:1"), "keys": {"a": Key("Run:2")}, "names": {"x", "y"}, "forever": float("inf"),
        "steps": np.array([1.0, 2.5]), "one": np.float64(0.1), "list": [1, None, "é"],
    }  # fmt: skip
    back = JsonRecords().from_string(JsonRecords().to_string(record))
    assert (back.pop("steps") == record.pop("steps")).all()
    assert back == record


def test_what_a_run_sends_may_look_like_a_record_of_ours():
    odd = {"a": {"$array": "x"}, "$set": [[1]], "b": [{"$key": 1, "other": 2}], "$dict": {}}
    assert JsonRecords().from_string(JsonRecords().to_string({"config": odd})) == {"config": odd}


@pytest.mark.parametrize("text", ["", '{"half": ', "[1]", "\x00\x01", '{"$array": "!"}'])
def test_what_is_no_record_is_said(text, tmp_path):
    said = []
    records = Records(tmp_path, said.append)
    path = tmp_path / "Run:1.json"
    path.write_text(text)
    assert records.read(path) is None
    assert records.is_damaged
    assert "Run:1.json" in said[0]
