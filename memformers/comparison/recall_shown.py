"""One stream of a recall experiment, as its trained models see it: where each value lies when it is asked
for, and who answers correctly."""

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from textwrap import fill
from typing import Any

from memformers.common.errors import UserError
from memformers.common.files import write_text
from memformers.comparison.recall_training import CLAIMING_SEED, MODEL, RECALL
from memformers.data.recall_stream import NOTHING, recall_segments
from memformers.evaluation.evaluate import BASELINE, read_segments
from memformers.models.base import eval_mode
from memformers.models.language_model import MemoryLM
from memformers.report.arms import arms_of
from memformers.report.markdown import TEMPLATES, text_table
from memformers.runs.reader import read_runs

SHOWN = ("no-memory", "transformer-xl", "compressive")
"""The arms that are shown if an experiment has them, otherwise its first ones."""
PLACES = ("segment", "positions", "slots", "gone")
"""Where a value can be, as people read it."""
COLOURS = dict(zip(PLACES, (32, 166, 36, 244), strict=True))
"""Of a terminal with 256 colours: those of segment, positions and slots in every picture."""
PAGE = "recall.html"
POSITIONS, ROWS = 1024, 8
"""How many positions of the stream are asked about, and how many rows their shares have."""

Stream = dict[str, Any]
"""``models``: their names. ``sets``: position, key and value of each token that sets one. ``asks``, from near
to far: the positions of a question (``at``) and of its segment's ``start``, its ``key`` and ``value``, how
long ago this was set (``distance``), and for each model ``[right, held, reach]``: how many positions before
the segment it held exactly, and how many in all."""


def read_stream(folder: Path) -> Stream:
    """The first held-out stream of the recall experiment in ``folder``, read by the first model of each shown
    arm; UserError without a trained model."""
    arms = [arm for arm in arms_of(read_runs(folder, "recall")) if (arm.first.folder / MODEL).is_dir()]
    arms = sorted((arm for arm in arms if arm.name in SHOWN), key=lambda a: SHOWN.index(a.name)) or arms[:3]
    if not arms:
        raise UserError(f"{folder} has no trained model to show; finish its training with --resume.")
    run = RECALL.parse(arms[0].first.config, str(arms[0].first.folder))
    stream, S = run.recall.stream, run.train.model.segment_len
    warm_up = -(-run.recall.reach // S)
    drawn = recall_segments(stream, 1, S, CLAIMING_SEED + run.train.seed)
    pairs = list(islice(drawn, warm_up + -(-POSITIONS // S)))
    sets: list[tuple[int, int, int]] = []
    asks: list[dict[str, Any]] = []
    for segment, distances in pairs:
        start = segment.end - S
        columns = (x[:, 0].tolist() for x in (segment.inputs, segment.targets, distances))
        for at, (token, value, distance) in enumerate(zip(*columns, strict=True), start):
            if distance == NOTHING:
                sets.append((at, *divmod(token - stream.values, stream.values)))
            else:
                key = token - stream.values * (stream.keys + 1)
                fields = ("at", "start", "key", "value", "distance")
                ask = dict(zip(fields, (at, start, key, value, distance), strict=True))
                asks.append({**ask, "of": []})
    for arm in arms:
        model, waiting = MemoryLM.from_pretrained(arm.first.folder / MODEL), iter(asks)
        with eval_mode(model):
            read = read_segments(model, (segment for segment, _ in pairs))
            for (_, distances), (_, memory, _, scores) in zip(pairs, read, strict=True):
                kept = memory.mem_len, memory.positions(model.config.memory_sizes)
                for right in scores[BASELINE].correct.cpu()[distances != NOTHING].tolist():
                    next(waiting)["of"].append([right, *kept])
    asks = [ask for ask in asks if ask["start"] >= warm_up * S]
    asks.sort(key=lambda ask: ask["distance"])
    return {"models": [arm.label for arm in arms], "sets": sets, "asks": asks}


def place_of(position: int, ask: Mapping[str, Any], model: int) -> str:
    """Where a model has ``position`` when it is asked."""
    _, held, reach = ask["of"][model]
    before = ask["start"] - position
    limits = (0, held, reach)
    return next((place for place, limit in zip(PLACES, limits, strict=False) if before <= limit), PLACES[-1])


def in_terminal(shown: Stream, *, colours: bool, width: int = 80) -> str:
    """A question, if possible one whose value is in a slot, what each model has of the stream, and whether it
    answers correctly; then the share of correct answers from near to far. Without ``colours``, the words say
    all of it."""

    def painted(text: str, place: str) -> str:
        return f"\033[38;5;{COLOURS[place]}m{text}\033[0m" if colours else text

    asks, models = shown["asks"], shown["models"]
    farthest = len(models) - 1
    far = [ask for ask in asks if place_of(ask["at"] - ask["distance"], ask, farthest) == "slots"] or asks
    ask = far[len(far) // 2]
    set_at, first = ask["at"] - ask["distance"], ask["at"] - 2 * max(own[2] for own in ask["of"])
    lines = [f"{name(ask['key'])}? is asked. {name(ask['key'])}={ask['value']} was set {ask['distance']} "
             "positions ago; what each model has of the stream:"]  # fmt: skip
    for number, model in enumerate(models):
        lines += ["", f"{model}: {said(ask['of'][number][0])}"]
        parts: dict[str, list[str]] = {place: [] for place in reversed(PLACES)}
        for position, key, value in shown["sets"]:
            if first <= position < ask["at"]:
                token = f"{name(key)}={value}"
                token = f"[{token}]" if position == set_at else token
                parts[place_of(position, ask, number)].append(token)
        for place, tokens in parts.items():
            if tokens:
                text = fill(
                    " ".join(tokens), width, initial_indent=f"  {place:10}", subsequent_indent=" " * 12
                )
                lines += [painted(line, place) for line in text.splitlines()]
    rows, size = [["positions ago", *models]], -(-len(asks) // ROWS)
    for near in range(0, len(asks), size):
        group = asks[near : near + size]
        shares = (sum(ask["of"][number][0] for ask in group) / len(group) for number in range(len(models)))
        span = f"{group[0]['distance']} – {group[-1]['distance']}"
        rows.append([span, *(f"{share:.0%}" for share in shares)])
    lines += ["", "Correct answers to all questions here, by how long ago the value was set:", ""]
    return "\n".join([*lines, text_table(rows, width)])


def name(key: int) -> str:
    """A letter for a key; a number if there are more keys than letters."""
    return chr(ord("a") + key) if key < 26 else f"k{key}"


def said(right: bool) -> str:
    """The word for an answer."""
    return "right" if right else "wrong"


def write_page(shown: Stream, folder: Path) -> Path:
    """Write the page of the stream with a slider for how long ago, which needs no other file; returns its
    path."""
    data = json.dumps({**shown, "places": PLACES}, separators=(",", ":")).replace("<", "\\u003c")
    write_text(folder / PAGE, TEMPLATES.get_template("recall_shown.html").render(data=data))
    return folder / PAGE
