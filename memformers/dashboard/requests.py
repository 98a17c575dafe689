"""Checks the requests to labml's handlers and the packets of runs, since the handlers accept anything."""

import re
from collections.abc import Callable
from typing import Any

RUN_ID = re.compile(r"[0-9A-Za-z-]{10,64}(_[0-9]{1,4})?")
"""A run's id as labml's clients make it, followed by the rank of a process after the first."""
OF_RUN = re.compile(
    r"/api/v1/(?:run/status|run|metrics/preferences|metrics|compare/metrics|compare/preferences"
    r"|custom_metrics|logs/(?:stdout|stderr|std_logger))/(?P<run>[^/]+)(?:/\w+)?/?"
)
"""The paths that ask about a run."""
TRACK = re.compile(r"/api/v1/[^/]+/track")

STATUS = {"status": "", "details": None, "time": 0.0}
"""The fields that every status has."""


def check_request(path: str, question: Any, is_known: Callable[[str], bool]) -> tuple[int, str] | None:
    """The status and the message of a refusal, or None. Refused are a ``question`` that is not a JSON object,
    and one about a run that doesn't exist, for which labml would make records."""
    if question is not None and not isinstance(question, dict) and not TRACK.fullmatch(path):
        return 400, "A JSON object is expected."
    asked = OF_RUN.fullmatch(path)
    if asked is None:
        return None
    run = asked["run"]
    if not RUN_ID.fullmatch(run):
        return 400, "That is no run's id."
    if not is_known(run.partition("_")[0]):
        return 404, "There is no such run."
    return None


def is_packet(packet: Any) -> bool:
    """Whether a run's packet has the structure that labml's client gives it."""
    if not isinstance(packet, dict):
        return False
    settings, series, status = (
        packet.get("configs", {}),
        packet.get("track", {}),
        packet.get("status", STATUS),
    )
    return (
        isinstance(settings, dict)
        and all(isinstance(one, dict) and {"name", "computed"} <= one.keys() for one in settings.values())
        and isinstance(series, dict)
        and all(map(is_series, series.values()))
        and isinstance(status, dict)
        and status.keys() >= STATUS.keys()
    )


def is_series(series: Any) -> bool:
    """Whether this has a list of steps and a list of values of the same length."""
    if not isinstance(series, dict):
        return False
    lists = [series.get("step"), series.get("value")]
    return all(isinstance(one, list) and all(map(is_number, one)) for one in lists) and len(
        series["step"]
    ) == len(series["value"])


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
