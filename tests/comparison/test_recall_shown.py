import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
import torch

from memformers.commands.recall import Recall
from memformers.common.errors import UserError
from memformers.common.files import read_json
from memformers.comparison.recall.measurement import recall_by_distance
from memformers.comparison.recall.shown import (
    STREAMS,
    answer_word,
    place_of,
    read_stream,
    share_rows,
    terminal_text,
    write_stream_page,
)
from memformers.comparison.recall.task import CLAIMING_SEED, RECALL
from memformers.data.recall_stream import recall_segments
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import PLACES

COLOUR = re.compile(r"\033\[[\d;]*m")


@pytest.fixture(scope="module")
def shown(done):
    return read_stream(done)


def test_a_shown_question_asks_for_the_newest_value_of_its_key(shown):
    assert [model[:9] for model in shown["models"]] == ["No memory", "Transform", "Compressi"]
    assert len(shown["asks"]) > 500
    for ask in shown["asks"]:
        earlier = [(position, key, value) for position, key, value in shown["sets"] if position < ask["at"]]
        of_this_key = [row for row in earlier if row[1] == ask["key"]]
        assert of_this_key[-1] == (ask["at"] - ask["distance"], ask["key"], ask["value"])


@pytest.mark.parametrize(("number", "arm"), [(1, "transformer-xl"), (2, "compressive")])
def test_shown_answers_are_those_that_are_measured(number, arm, shown, done):
    run = RECALL.read_config(read_json(done / arm / "config.json"), arm)
    S = run.model.segment_len
    model = MemoryLM.from_pretrained(done / arm / "model")
    warm_up = -(-run.recall.reach // S)
    drawn = recall_segments(run.recall.stream, STREAMS, S, CLAIMING_SEED)
    first = [
        (replace(segment, inputs=segment.inputs[:, :1], targets=segment.targets[:, :1]), distances[:, :1])
        for segment, distances in islice(drawn, warm_up + 1024 // S)
    ]
    [measured] = recall_by_distance(model, first, (0, 9999), warm_up=warm_up * S).values()
    n_asks = Counter()
    n_correct = Counter()
    for ask in shown["asks"]:
        part = place_of(ask["at"] - ask["distance"], ask, number)
        n_asks[part] += 1
        n_correct[part] += ask["of"][number][0]
    for part in PLACES:
        assert measured.asks_by_place[part] == n_asks[part]
        if n_asks[part]:
            assert measured.by_place[part] == n_correct[part] / n_asks[part]
    assert (n_asks["slots"] > 50) == (arm == "compressive")


def test_a_constant_answer_is_right_by_chance(shown):
    distances = torch.arange(1, 81)[:, None]
    values = torch.tensor([0] * 5 + [1, 2, 3] + [0] * 72)[:, None]
    constant = values == 0
    knows = torch.ones_like(values, dtype=torch.bool)
    rows = share_rows(distances, values, [constant, knows], 4)
    assert rows[0] == {"from": 1, "to": 10, "questions": 10, "correct": [0.25, 1.0]}
    for row in shown["shares"]:
        assert row["questions"] > 1000
        assert row["correct"][0] < 0.4, "no memory, at any distance"


def test_a_terminal_without_colours_reads_the_same_in_80_columns(shown):
    plain, coloured = (terminal_text(shown, colours=colours) for colours in (False, True))
    assert plain == COLOUR.sub("", coloured) != coloured
    assert max(map(len, plain.splitlines())) <= 80
    [asked] = re.findall(r"(\w=\d) was set", plain)
    assert plain.count(f"[{asked}]") == 3
    assert "of guesses, 25% are correct" in " ".join(plain.split())
    rows = re.findall(r"^(\d+) – (\d+) +([\d,]+) .*%$", plain, re.MULTILINE)
    assert [int(n.replace(",", "")) for _, _, n in rows] == [row["questions"] for row in shown["shares"]]
    assert int(rows[0][0]) < int(rows[-1][1])


@pytest.mark.parametrize(
    ("correct", "probability", "word"), [(True, 0.9, "right"), (True, 0.3, "a guess"), (False, 0.2, "wrong")]
)
def test_an_answer_that_is_a_guess_is_not_called_right(correct, probability, word):
    assert answer_word(correct, probability) == word


def test_the_page_of_a_stream_needs_nothing_else(shown, tmp_path):
    html = write_stream_page(shown, tmp_path).read_text("utf-8")
    assert not re.search(r"https?:|src=|url\(|import ", html)
    [data] = re.findall(r"^const data = (.*);$", html, re.MULTILINE)
    assert json.loads(data) == json.loads(json.dumps({**shown, "places": PLACES}))


def test_the_command_shows_no_colours_where_none_can_be(done, tmp_path, capsys):
    shutil.copytree(done, tmp_path / "here", ignore=shutil.ignore_patterns("figures", "*-seed1"))
    Recall(show=tmp_path / "here").run()
    shown = capsys.readouterr().out
    assert "\033" not in shown
    assert str(tmp_path / "here/recall.html") in shown
    for model in (tmp_path / "here").glob("*/model"):
        shutil.rmtree(model)
    with pytest.raises(UserError, match="no trained model"):
        Recall(show=tmp_path / "here").run()
