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
from memformers.common.console import counted
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
POSITIONS, STREAMS, ROWS = 1024, 32, 8
"""How many positions have questions, in how many streams, of which the first is shown; and the rows of the
table of shares."""

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
    arms = [arm for arm in arms_of(read_runs(folder, "recall")) if (arm.first.folder / MODEL).is_dir()]
    arms = sorted((arm for arm in arms if arm.name in SHOWN), key=lambda a: SHOWN.index(a.name)) or arms[:3]
    if not arms:
        again = command_here(shlex.join(["recall", "--resume", "--out", str(folder)]))
        raise UserError(f"{folder} has no trained model to show; finish its training: {again}")
    run = RECALL.read_config(arms[0].first.config, str(arms[0].first.folder))
    stream, S = run.recall.stream, run.model.segment_len
    warm_up = -(-run.recall.reach // S)
    drawn = recall_segments(stream, STREAMS, S, CLAIMING_SEED + run.seed)
    pairs = list(islice(drawn, warm_up + -(-POSITIONS // S)))
    segments, distances = [segment for segment, _ in pairs], torch.cat([ago for _, ago in pairs[warm_up:]])
    sets, asks = questions([(s.inputs[:, 0], s.targets[:, 0], ago[:, 0], s.end) for s, ago in pairs], stream)
    asks = [ask for ask in asks if ask["start"] >= warm_up * S]
    answered = []
    for arm in arms:
        model = MemoryLM.from_pretrained(arm.first.folder / MODEL)
        with eval_mode(model):
            read = [(memory, scores[UNTOUCHED]) for _, memory, _, scores in read_segments(model, segments)]
        losses, right = (torch.cat(of) for of in zip(*(scores for _, scores in read), strict=True))  # [T, B]
        answered.append(right[warm_up * S :])
        for ask in asks:
            at, memory = ask["at"], read[ask["start"] // S][0]
            kept = memory.mem_len, memory.n_positions(model.config.memory_sizes)
            ask["of"].append([bool(right[at, 0]), losses[at, 0].neg().exp().item(), *kept])
    targets = torch.cat([segment.targets for segment in segments[warm_up:]])
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
    sets, asks = [], []
    for inputs, targets, distances, end in columns:
        start = end - len(inputs)
        rows = zip(inputs.tolist(), targets.tolist(), distances.tolist(), strict=True)
        for at, (token, value, distance) in enumerate(rows, start):
            if distance == NO_QUESTION:
                sets.append((at, *divmod(token - stream.values, stream.values)))
            else:
                key = token - stream.values * (stream.keys + 1)
                ask = {"at": at, "start": start, "key": key, "value": value, "distance": distance, "of": []}
                asks.append(ask)
    return sets, asks


def share_rows(distances: Tensor, values: Tensor, correct: Sequence[Tensor], n: int) -> list[dict[str, Any]]:
    """The rows of the table; tensors are ``[T, B]``. The mean over the ``n`` values makes a constant
    answer right in 1 / n of the cases, however often each value is asked for."""
    asked = distances != NO_QUESTION
    order, rows = distances[asked].argsort(stable=True), []
    for part in order.split(-(-len(order) // ROWS)):
        ago, value = distances[asked][part], values[asked][part]
        counts = value.bincount(minlength=n).double()
        of_values = [value.bincount(right[asked][part].double(), n) / counts for right in correct]
        means = [share[counts > 0].mean().item() for share in of_values]
        rows.append({"from": int(ago[0]), "to": int(ago[-1]), "questions": len(part), "correct": means})
    return rows


def place_of(position: int, ask: Mapping[str, Any], model: int) -> str:
    """Where a model has ``position`` when it is asked."""
    *_, held, reach = ask["of"][model]
    before = ask["start"] - position
    limits = (0, held, reach)
    return next((place for place, limit in zip(PLACES, limits, strict=False) if before <= limit), PLACES[-1])


def terminal_text(shown: Stream, *, colours: bool, width: int = 80) -> str:
    """A question, if possible one whose value is in a slot, what each model has of the stream, and what it
    answers; then the share of correct answers from near to far."""
    asks, models, chance = shown["asks"], shown["models"], f"{shown['chance']:.0%}"
    farthest = len(models) - 1
    far = [ask for ask in asks if place_of(ask["at"] - ask["distance"], ask, farthest) == "slots"] or asks
    ask = far[len(far) // 2]
    set_at, first = ask["at"] - ask["distance"], ask["at"] - 2 * max(reach for *_, reach in ask["of"])
    key, value = name(ask["key"]), ask["value"]
    ago = counted(ask["distance"], "token")
    lines = wrap(f"The stream asks {key}?, where {key}={value} was set {ago} ago. What each has:", width)
    for number, model in enumerate(models):
        correct, probability, *_ = ask["of"][number]
        answer = f"{model}: {answer_word(correct, probability)}, {probability:.0%} for {value}"
        lines += ["", *wrap(answer, width)]
        parts: dict[str, list[str]] = {place: [] for place in reversed(PLACES)}
        for position, set_key, set_value in shown["sets"]:
            if first <= position < ask["at"]:
                token = f"{name(set_key)}={set_value}"
                token = f"[{token}]" if position == set_at else token
                parts[place_of(position, ask, number)].append(token)
        for place, tokens in parts.items():
            shown_tokens = wrap(
                " ".join(tokens), width, initial_indent=f"  {place:10}", subsequent_indent=" " * 12
            )
            before, after = (f"\033[38;5;{COLOURS[place]}m", "\033[0m") if colours else ("", "")
            lines += [f"{before}{line}{after}" for line in shown_tokens]
    rows = [["tokens ago", "questions", *models]]
    for row in shown["shares"]:
        span = f"{row['from']} {DASH} {row['to']}"
        rows.append([span, f"{row['questions']:,}", *(f"{share:.0%}" for share in row["correct"])])
    about = f"Correct answers in {STREAMS} streams, the mean over values; of guesses, {chance} are correct:"
    return "\n".join([*lines, "", fill(about, width), "", text_table(rows, width)])


def name(key: int) -> str:
    """A letter for a key; a number if there are more keys than letters."""
    return chr(ord("a") + key) if key < 26 else f"k{key}"


def answer_word(correct: bool, probability: float) -> str:
    """The word for an answer; the right value has this ``probability``."""
    return "wrong" if not correct else "right" if probability >= 0.5 else "a guess"


def write_stream_page(shown: Stream, folder: Path) -> Path:
    """Write the page of the stream, which needs no other file; returns its path."""
    page = HTML.get_template("recall_shown.html.j2").render(data={**shown, "places": PLACES})
    write_text(folder / PAGE, page)
    return folder / PAGE
