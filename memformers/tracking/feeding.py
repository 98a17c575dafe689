"""Sending a run to a dashboard, in labml's own protocol, from the run's ``metrics.jsonl``.

This file is the queue: a dashboard that doesn't have the run, or has lost a part of it, gets all of it again.
Our dashboard ignores records that it has already.
"""

import contextlib
import math
import platform
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from memformers.common.network import ask_json
from memformers.runs.folder import METRICS, TOKENS, Card, Metrics, read_card, short_names
from memformers.tracking.discovery import answers, run_address

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


def feed(folder: Path, find: Callable[[], str], ended: threading.Event) -> bool:
    """Send the run in ``folder`` to the dashboard that ``find`` gives the address of, as the run grows
    and until it has ended; whether that dashboard, if there ever was one, got everything."""
    said, was_there, is_over = "", False, False
    while not is_over:
        is_over = ended.is_set()
        if api := find():
            was_there = True
            try:
                send_all(folder, api.rstrip("/"), ended)
                return True
            except OSError as error:
                if str(error) != said:
                    said = str(error)
                    print(f"dashboard: {said}", flush=True)
        if not is_over:
            ended.wait(RETRY_SECONDS)
    return not was_there


def send_all(folder: Path, api: str, ended: threading.Event) -> None:
    """Send a run to one dashboard until it has ended; OSError if something else answers there, or nothing."""
    card, metrics, is_over = read_card(folder), Metrics(folder / METRICS), False
    sent: set[str] = (
        set()
    )  # what the dashboard should know; ours refuses what comes after something it has not
    post(api, card.run, introduction(card), POST_SECONDS)
    if card.compare_with and answers(run_address(api, card.compare_with), POST_SECONDS):
        with contextlib.suppress(OSError):
            for one, other in ((card.run, card.compare_with), (card.compare_with, card.run)):
                address = f"{api.rpartition('/')[0]}/compare/preferences/{one}"
                chosen = ask_json(address, POST_SECONDS)
                if not chosen["base_experiment"]:
                    ask_json(address, POST_SECONDS, {**chosen, "base_experiment": other})
    while not is_over:
        is_over, begun, there = ended.is_set(), time.thread_time(), 0.0
        posts = in_posts(list(metrics.read()))
        metrics.check()
        if is_over:
            posts = posts or [{"track": {}}]
            posts[-1] |= conclusion(read_card(folder))
        for packet in posts:
            answer = post(api, card.run, {**packet, "series": len(sent)}, POST_SECONDS)
            sent |= packet["track"].keys()
            there += float(answer.get("seconds", 0.0))
        if not is_over:
            cost = time.thread_time() - begun + there if posts else 0.0
            ended.wait(max(SEND_SECONDS, cost / SHARE))


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


def conclusion(card: Card) -> dict[str, Any]:
    """The last message to labml's server; empty if it is not known how the run ended."""
    if not card.status:
        return {}
    kind = {"completed": "completed", "crashed: KeyboardInterrupt": "interrupted"}
    status = kind.get(card.status.strip(), "crashed")
    return {"status": {"rank": 0, "status": status, "details": card.status, "time": card.ended}}


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


def in_posts(records: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Records, thinned, as labml's series in pieces that each fit into a post; a record's step is its
    tokens."""
    most = POINTS_A_POST // max(map(len, records), default=1) or 1
    kept, posts = thin(records, max(RECORDS_A_POLL, most)), []
    for start in range(0, len(kept), most):
        track: dict[str, dict[str, list[float]]] = {}
        for record in kept[start : start + most]:
            for name, value in record.items():
                if name != TOKENS and math.isfinite(value):
                    one = track.setdefault(name, {"step": [], "value": []})
                    one["step"].append(record[TOKENS])
                    one["value"].append(value)
        posts.append({"track": track})
    return posts


def thin(records: Sequence[Mapping[str, float]], most: int = RECORDS_A_POLL) -> list[Mapping[str, float]]:
    """At most this number of the training's records, evenly spread, and all evaluations."""
    stride = -(-len(records) // most) or 1
    return [r for i, r in enumerate(records) if i % stride == 0 or "loss.valid" in r]
