"""Sending a run to a dashboard, in labml's own protocol, from the run's ``metrics.jsonl``.

This file is the queue: a dashboard is asked for its last step, and gets the records after it. Our dashboard
ignores records that it has already; labml's own server, which merges points, may draw the last of them twice.
"""

import base64
import contextlib
import math
import platform
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode

from memformers.common.network import ask_json, get
from memformers.runs.folder import METRICS, Card, read_card, record_of, short_names
from memformers.tracking.discovery import has_run

SEND_SECONDS, RETRY_SECONDS = 2.0, 3.0
"""The seconds between two uploads, and between two tries to reach a dashboard."""
POST_SECONDS = 30.0
SHARE = 0.005
"""The fraction of one core's time: after each upload, the sender sleeps 200 times the upload's duration (here
and in the dashboard)."""
POINTS_A_POST = 20_000
"""Points in one upload. A point is about 40 bytes, and our dashboard accepts at most a megabyte at once."""
RECORDS_A_POLL = 100
"""If there are more records at once, this number is sent, evenly spread; evaluations are always sent."""
LAST = "<f"
"""labml's server answers with steps as little-endian 32-bit numbers."""


def feed(folder: Path, find: Callable[[], str], ended: threading.Event) -> bool:
    """Send the run in ``folder`` to the dashboard that ``find`` gives the address of, as the run grows
    and until it has ``ended``; whether that dashboard, if there ever was one, got everything."""
    was_there, said = False, ""
    while True:
        last_try = ended.is_set()
        if api := find():
            was_there = True
            try:
                with Feed(folder, api) as dashboard:
                    while True:
                        is_over = ended.is_set()
                        cost = dashboard.send(is_over)
                        if is_over:
                            return True
                        ended.wait(max(SEND_SECONDS, cost / SHARE))
            except OSError as error:
                if str(error) != said:
                    said = str(error)
                    print(f"dashboard: {said}", flush=True)
        if last_try:
            return not was_there
        ended.wait(RETRY_SECONDS)


class Feed:
    """One run on its way to one dashboard, as a context; OSError if something else answers, or nothing."""

    def __init__(self, folder: Path, api: str):
        self.folder = folder
        self.card = read_card(folder)
        self.api = api.rstrip("/")
        self.root = self.api.rpartition("/")[0]

    def __enter__(self) -> "Feed":
        self.known = self._last_steps()
        self.series = set(self.known)
        """What the dashboard should know by now; ours refuses what comes after something that it has not."""
        self._post(introduction(self.card))
        other = self.card.compare_with
        if other and has_run(self.api, other, POST_SECONDS):
            with contextlib.suppress(OSError):
                self._set_against(self.card.run, other)
                self._set_against(other, self.card.run)  # which was sent before this one was there
        self.file = open(self.folder / METRICS, encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def send(self, is_over: bool) -> float:
        """Send what is new, and how the run ended if it ``is_over``; the seconds of work, here and there."""
        begun = time.thread_time()
        records = new_records(self.file)
        most = max(RECORDS_A_POLL, POINTS_A_POST // max(map(len, records), default=1))
        *posts, last = in_posts(tracks(thin(records, most), self.known))
        end = conclusion(read_card(self.folder)) if is_over else {}
        if not (last or is_over):
            return 0.0
        there = 0.0
        for track, more in [*((post, {}) for post in posts), (last, end)]:
            answer = self._post({"track": track, "series": len(self.series), **more})
            self.series |= track.keys()
            there += float(answer.get("seconds", 0.0))
        return time.thread_time() - begun + there

    def _post(self, packet: Mapping[str, Any]) -> dict[str, Any]:
        return post(self.api, self.card.run, packet, POST_SECONDS)

    def _last_steps(self) -> dict[str, float]:
        """The last step of each metric that the dashboard has already."""
        status, _ = get(f"{self.root}/run/{self.card.run}", POST_SECONDS)
        if status == 404:
            return {}
        answer = ask_json(f"{self.root}/metrics/{self.card.run}", POST_SECONDS, {"get_all": True})
        try:
            return {series["name"]: last_number(series["last_step"]) for series in answer["series"]}
        except (KeyError, TypeError, ValueError, struct.error):
            raise OSError("its answer is not one of labml's server") from None

    def _set_against(self, run: str, other: str) -> None:
        """Let labml's comparison of a run be with the ``other``, unless one was chosen."""
        address = f"{self.root}/compare/preferences/{run}"
        chosen = ask_json(address, POST_SECONDS)
        if not chosen["base_experiment"]:
            ask_json(address, POST_SECONDS, {**chosen, "base_experiment": other})


def introduction(card: Card) -> dict[str, Any]:
    """The first message about a run to labml's server."""
    names = short_names(card.config)
    configs = {
        names[name]: {"name": names[name], "type": type(value).__name__, "value": value, "order": i,
                      "options": [], "computed": str(value), "is_hyperparam": None, "is_meta": None,
                      "is_explicitly_specified": name in card.given}
        for i, (name, value) in enumerate(card.config.items())
    }  # fmt: skip
    return {
        "name": card.name,
        "comment": card.comment,
        "tags": [card.name],
        "computer": uuid.uuid5(uuid.NAMESPACE_DNS, platform.node() or "computer").hex,
        "start_step": 0,
        "started": card.started,
        "configs": configs,
        # labml's page shows the settings that are selected, and does not get to those that are specified.
        "selected_configs": [names[name] for name in card.given if name in names],
        "status": {"rank": 0, "status": "in progress", "details": None, "time": card.started},
    }


def post(api: str, run: str, packet: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The answer of the labml server at ``api`` to a ``packet`` of a run; OSError if it refuses the packet,
    or doesn't answer within ``seconds``."""
    query = {"run_uuid": run, "labml_version": version("labml"), "rank": 0, "world_size": 0}
    packets = [{"time": time.time(), "once": True, **packet}]
    answer = ask_json(f"{api}/track?{urlencode(query)}", seconds, packets)
    if not isinstance(answer, dict):
        raise OSError("its answer is not one of labml's server")
    if errors := [error for error in answer.get("errors", []) if "warning" not in error]:
        raise OSError(f"it refuses the run: {errors[0].get('message', errors[0])}")
    return answer


def conclusion(card: Card) -> dict[str, Any]:
    """The last message to labml's server; empty if it is not known how the run ended."""
    if not card.status:
        return {}
    kind = {"completed": "completed", "crashed: KeyboardInterrupt": "interrupted"}
    status = kind.get(card.status.strip(), "crashed")
    return {"status": {"rank": 0, "status": status, "details": card.status, "time": card.ended}}


def tracks(records: list[dict[str, float]], known: Mapping[str, float]) -> dict[str, dict[str, list[float]]]:
    """Records as labml's series, without the steps that are ``known``; a record's step is its tokens."""
    series: dict[str, dict[str, list[float]]] = {}
    for record in records:
        step = record["tokens"]
        for name, value in record.items():
            if name != "tokens" and math.isfinite(value) and rounded(step) > known.get(name, -math.inf):
                one = series.setdefault(name, {"step": [], "value": []})
                one["step"].append(step)
                one["value"].append(value)
    return series


def in_posts(series: Mapping[str, dict[str, list[float]]]) -> Iterator[dict[str, dict[str, list[float]]]]:
    """The series in pieces that each fit into a post; at least one piece, which may be empty."""
    piece: dict[str, dict[str, list[float]]] = {}
    room = POINTS_A_POST
    for name, one in series.items():
        sent = 0
        while sent < len(one["step"]):
            if not room:
                yield piece
                piece, room = {}, POINTS_A_POST
            piece[name] = {key: numbers[sent : sent + room] for key, numbers in one.items()}
            added = len(piece[name]["step"])
            sent, room = sent + added, room - added
    yield piece


def rounded(step: float) -> float:
    """A step as labml's server will return it."""
    return float(struct.unpack(LAST, struct.pack(LAST, step))[0])


def last_number(binary: str) -> float:
    """The last of the numbers that labml's server returns in base 64."""
    data = base64.b64decode(binary)
    return float(struct.unpack_from(LAST, data, len(data) - 4)[0]) if data else -math.inf


def new_records(file: IO[str]) -> list[dict[str, float]]:
    """The complete records that were appended since the last call; UserError for a broken one."""
    records: list[dict[str, float]] = []
    while True:
        start = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(start)
            return records
        records.append(record_of(line, f"{file.name}, byte {start:,}"))


def thin(records: list[dict[str, float]], most: int = RECORDS_A_POLL) -> list[dict[str, float]]:
    """At most this number of the training's records, evenly spread, and all evaluations."""
    stride = -(-len(records) // most) or 1
    return [r for i, r in enumerate(records) if i % stride == 0 or "loss.valid" in r]
