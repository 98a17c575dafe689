"""One stream of a recall experiment, as its trained models see it: where each value is when a question asks
for it, and what they answer."""

import shlex
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

import torch
from torch import Tensor

from memformers.common.command_line import command_here
from memformers.common.console import counted, printable
from memformers.common.errors import UserError
from memformers.common.files import write_text
from memformers.comparison.recall.task import CLAIMING_SEED, MODEL, RECALL
from memformers.data.recall_stream import NO_QUESTION, RecallStream, recall_segments
from memformers.evaluation.evaluate import read_segments
from memformers.models.language_model import MemoryLM
from memformers.models.stack import eval_mode
from memformers.report.arms import arms_of
from memformers.report.numbers import DASH
from memformers.report.rendering import HTML, text_table
from memformers.runs.folder import PLACES, UNTOUCHED
from memformers.runs.reader import read_runs

SHOWN = ("no-memory", "transformer-xl", "compressive")
"""The arms that are shown if an experiment has them, otherwise its first ones."""
COLOURS = dict(zip(PLACES, (32, 166, 36, 244), strict=True))
"""Of a terminal with 256 colours: those of segment, memory and slots in every picture."""
PAGE = "recall.html"
POSITIONS = 1024
"""How many positions have questions."""
STREAMS = 32
"""How many streams are read, of which the first is shown."""
ROWS = 8
"""The rows of the table of shares."""

Stream = dict[str, Any]
"""``models``: their labels. ``chance``: the share of guesses that are right. ``sets``: position, key and
value of each token of the stream that sets one. ``asks``, from near to far: the positions of a question
(``at``) and of its segment's ``start``, its ``key`` and ``value``, the ``distance`` to where this was set,
and for each model in ``of`` ``[correct, probability of the value, held, reach]``: how many positions before
the segment it held exactly, and how many in all. ``shares``, from near to far and of all streams: the
distances ``from`` and ``to``, the number of ``questions``, and for each model the share of correct answers,
the mean over values."""


def read_stream(folder: Path) -> Stream:
    """Held-out streams, read by the first model of each shown arm; UserError without a trained model."""
    # The models.
    arms = [arm for arm in arms_of(read_runs(folder, "recall")) if (arm.first.folder / MODEL).is_dir()]
    if not arms:
        resume = command_here(shlex.join(["recall", "--resume", "--out", str(folder)]))
        raise UserError(f"{folder} has no trained model to show; finish its training: {resume}")
    usual = [arm for arm in arms if arm.name in SHOWN]
    arms = sorted(usual, key=lambda arm: SHOWN.index(arm.name)) or arms[:3]

    # The streams, whose first segments fill the memories.
    run = RECALL.read_config(arms[0].first.config, str(arms[0].first.folder))
    stream = run.recall.stream
    S = run.model.segment_len
    n_warm_up = -(-run.recall.reach // S)
    drawn = recall_segments(stream, STREAMS, S, CLAIMING_SEED + run.seed)
    pairs = list(islice(drawn, n_warm_up + -(-POSITIONS // S)))
    segments = [segment for segment, _ in pairs]
    first_columns = [(s.inputs[:, 0], s.targets[:, 0], ago[:, 0], s.end) for s, ago in pairs]
    sets, asks = questions(first_columns, stream)
    asks = [ask for ask in asks if ask["start"] >= n_warm_up * S]

    # What each model answers.
    answered = []
    for arm in arms:
        model = MemoryLM.from_pretrained(arm.first.folder / MODEL)
        memories = []
        losses = []
        is_right = []
        with eval_mode(model):
            for _, memory, _, scores in read_segments(model, segments):
                memories.append(memory)
                losses.append(scores[UNTOUCHED][0])
                is_right.append(scores[UNTOUCHED][1])
        all_losses = torch.cat(losses)  # [T, B]
        right_answers = torch.cat(is_right)  # [T, B]
        answered.append(right_answers[n_warm_up * S :])
        for ask in asks:
            position = ask["at"]
            memory = memories[ask["start"] // S]
            n_remembered = memory.n_positions(model.config.memory_sizes)
            probability = all_losses[position, 0].neg().exp().item()
            answer = (bool(right_answers[position, 0]), probability)
            ask["of"].append([*answer, memory.mem_len, n_remembered])
    targets = torch.cat([segment.targets for segment in segments[n_warm_up:]])
    distances = torch.cat([distance for _, distance in pairs[n_warm_up:]])
    return {
        "models": [arm.label for arm in arms],
        "chance": stream.chance,
        "sets": sets,
        "asks": sorted(asks, key=lambda ask: ask["distance"]),
        "shares": share_rows(distances, targets, answered, stream.values),
    }


def questions(
    columns: Sequence[tuple[Tensor, Tensor, Tensor, int]], stream: RecallStream
) -> tuple[list[tuple[int, int, int]], list[dict[str, Any]]]:
    """From the inputs, targets and distances ``[S]`` of a stream's segments, and where each ends."""
    sets = []
    asks = []
    for inputs, targets, distances, end in columns:
        start = end - len(inputs)
        rows = zip(inputs.tolist(), targets.tolist(), distances.tolist(), strict=True)
        for position, (token, value, distance) in enumerate(rows, start):
            if distance == NO_QUESTION:
                key, set_value = divmod(token - stream.values, stream.values)
                sets.append((position, key, set_value))
            else:
                key = token - stream.values * (stream.keys + 1)
                about = {"key": key, "value": value, "distance": distance, "of": []}
                asks.append({"at": position, "start": start, **about})
    return sets, asks


def share_rows(
    distances: Tensor, values: Tensor, correct: Sequence[Tensor], n_values: int
) -> list[dict[str, Any]]:
    """The rows of the table; tensors are ``[T, B]``. The mean over the values makes a constant answer right
    in 1 / ``n_values`` of the cases, however often each value is asked for."""
    is_asked = distances != NO_QUESTION
    distances = distances[is_asked]
    values = values[is_asked]
    rows = []
    order = distances.argsort(stable=True)
    for part in order.split(-(-len(order) // ROWS)):
        counts = values[part].bincount(minlength=n_values).double()
        means = []
        for is_right in correct:
            n_right = values[part].bincount(is_right[is_asked][part].double(), n_values)
            means.append((n_right / counts)[counts > 0].mean().item())
        span = {"from": int(distances[part[0]]), "to": int(distances[part[-1]])}
        rows.append({**span, "questions": len(part), "correct": means})
    return rows


def place_of(position: int, ask: Mapping[str, Any], model: int) -> str:
    """Where a model has ``position`` when it is asked: one of ``PLACES``."""
    *_, mem_len, reach = ask["of"][model]
    age = ask["start"] - position  # 0 or less in the segment
    for name_of_place, limit in zip(PLACES, (0, mem_len, reach), strict=False):
        if age <= limit:
            return name_of_place
    return PLACES[-1]


def terminal_text(shown: Stream, *, colours: bool, width: int = 80) -> str:
    """A question, if possible one whose value is in a slot, what each model has of the stream, and what it
    answers; then the share of correct answers from near to far."""
    # The question.
    models = list(map(printable, shown["models"]))
    asks = shown["asks"]
    in_slots = []
    for ask in asks:
        if place_of(ask["at"] - ask["distance"], ask, len(models) - 1) == "slots":
            in_slots.append(ask)
    asks = in_slots or asks
    ask = asks[len(asks) // 2]
    key = name(ask["key"])
    value = ask["value"]
    age = counted(ask["distance"], "token")
    lines = wrap(f"The stream asks {key}?, where {key}={value} was set {age} ago. What each has:", width)

    # What each model has of the stream, and its answer.
    for number, model in enumerate(models):
        correct, probability, *_ = ask["of"][number]
        answer = f"{model}: {answer_word(correct, probability)}, {probability:.0%} for {value}"
        lines += ["", *wrap(answer, width)]
        for name_of_place, tokens in remembered_tokens(shown["sets"], ask, number).items():
            part = wrap(
                " ".join(tokens), width, initial_indent=f"  {name_of_place:10}", subsequent_indent=" " * 12
            )
            if colours:
                part = [f"\033[38;5;{COLOURS[name_of_place]}m{line}\033[0m" for line in part]
            lines += part

    # The shares.
    rows = [["tokens ago", "questions", *models]]
    for row in shown["shares"]:
        shares = [f"{share:.0%}" for share in row["correct"]]
        rows.append([f"{row['from']} {DASH} {row['to']}", f"{row['questions']:,}", *shares])
    about = (
        f"Correct answers in {STREAMS} streams, the mean over values; of guesses, {shown['chance']:.0%} are "
        f"correct:"
    )
    return "\n".join([*lines, "", fill(about, width), "", text_table(rows, width)])


def remembered_tokens(
    sets: Sequence[tuple[int, int, int]], ask: Mapping[str, Any], model: int
) -> dict[str, list[str]]:
    """The tokens of the stream that a ``model`` has when it is asked, and the same number before them, by
    where it has them, from far to near; the one that is asked for is in brackets."""
    set_position = ask["at"] - ask["distance"]
    first = ask["at"] - 2 * max(reach for *_, reach in ask["of"])
    parts: dict[str, list[str]] = {name_of_place: [] for name_of_place in reversed(PLACES)}
    for position, key, value in sets:
        if first <= position < ask["at"]:
            token = f"{name(key)}={value}"
            if position == set_position:
                token = f"[{token}]"
            parts[place_of(position, ask, model)].append(token)
    return parts


def name(key: int) -> str:
    """A letter for a key; a number if there are more keys than letters."""
    return chr(ord("a") + key) if key < 26 else f"k{key}"


def answer_word(correct: bool, probability: float) -> str:
    """The word for an answer; the right value has this ``probability``."""
    if not correct:
        return "wrong"
    return "right" if probability >= 0.5 else "a guess"


def write_stream_page(shown: Stream, folder: Path) -> Path:
    """Write the page of the stream, which needs no other file; returns its path."""
    page = HTML.get_template("recall_shown.html.j2").render(data={**shown, "places": PLACES})
    write_text(folder / PAGE, page)
    return folder / PAGE
