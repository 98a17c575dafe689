"""Records are whole or not there, whatever happens; what can't be read stops nothing."""

import random
import signal
import subprocess
import sys

import numpy as np
import pytest
from labml_db import Key

from memformers.dashboard.labml import from_text, to_text

WRITER = """
import sys
from pathlib import Path
import numpy as np
from labml_db import Index, Model
from memformers.dashboard.labml import Records

class Curve(Model["Curve"]):
    values: np.ndarray
    number: int

class CurveIndex(Index["Curve"]):
    pass

Records(Path(sys.argv[1]), print, [Curve], [CurveIndex])
for i in range(200):
    curve = Curve(key=f"Curve:{i % 7}", values=np.full(20_000, float(i)), number=i)
    curve.save()
    CurveIndex.set(str(i), curve.key)
    print(i, flush=True)
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_a_kill_in_the_middle_of_200_writes_leaves_every_record_readable(seed, tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        for _ in range(random.Random(seed).randrange(20, 150)):
            last = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
    assert last < 199
    numbers = []
    for path in (tmp_path / "Curve").glob("[!.]*"):
        record = from_text(path.read_text())
        assert (record["values"] == record["number"]).all()
        numbers.append(record["number"])
    assert len(numbers) == 7
    assert max(numbers) >= last
    assert len(from_text((tmp_path / "indexes" / "CurveIndex.json").read_text())) >= last


def test_what_labml_keeps_in_a_record_comes_back_whatever_a_run_sends():
    record = {
        "key": Key("Run:1"), "keys": {"a": Key("Run:2")}, "names": {"x", "y"}, "forever": float("inf"),
        "one": np.float64(0.1), "list": [1, None, "é"],
        "sent": {"a": {"$array": "x"}, "$set": [[1]], "b": [{"$key": 1, "other": 2}], "$dict": {}},
    }  # fmt: skip
    back = from_text(to_text(record | {"steps": np.array([1.0, 2.5])}))
    assert back.pop("steps").tolist() == [1.0, 2.5]
    assert back == record
