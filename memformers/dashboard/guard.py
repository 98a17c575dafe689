"""Middleware that lets only the dashboard's own pages and programs in, with requests that labml can handle.

The dashboard has no login, so other web pages must not be able to reach it through the user's browser:
neither as another origin, nor by a name of theirs that points to this machine (DNS rebinding). A request that
is too large or malformed doesn't reach labml's handlers either, since these accept anything.

Starlette's own check of hosts takes names alone; here every address is good, since no name leads to it.
"""

import ipaddress
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from memformers.common.fields import fits

LOG = logging.getLogger("memformers.dashboard")
MOST_BYTES = 1_000_000
"""The longest body of a request."""
RUN_ID = re.compile(r"[0-9A-Za-z-]{10,64}(_[0-9]{1,4})?")
"""A run's id as labml's clients make it, followed by the rank of a process after the first."""
OF_RUN = re.compile(
    r"/api/v1/(?:run/status|run|metrics/preferences|metrics|compare/metrics|compare/preferences"
    r"|custom_metrics|logs/(?:stdout|stderr|std_logger))/(?P<run>[^/]+)(?:/\w+)?/?"
)
"""The paths that ask about a run."""
TRACK = re.compile(r"/api/v1/[^/]+/track")
SETTING, SERIES = {"name": Any, "computed": Any}, {"step": list[float], "value": list[float]}
STATUS = {"status": Any, "details": Any, "time": Any}
PACKET_HAS = {"configs": dict[str, SETTING], "track": dict[str, SERIES], "status": STATUS}  # type: ignore[valid-type]
"""What a packet of a run may have, by the kind of each."""
SAFE_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
}


def add_guard(app: FastAPI, names: frozenset[str], knows: Callable[[str], bool]) -> None:
    """Refuse what no page or program of the user's asks ``app``. ``names`` are those of this machine, beside
    its addresses; ``knows`` says whether there is a run."""

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if reason := refuse(request.headers, names):
            return PlainTextResponse(reason, 403, SAFE_HEADERS)
        refusal = await check_body(request)
        if refusal or (refusal := check_run(request.url.path, knows)):
            return PlainTextResponse(refusal[1], refusal[0], SAFE_HEADERS)
        response = await answer(request)
        response.headers.update(SAFE_HEADERS)
        return response

    @app.exception_handler(KeyError)
    @app.exception_handler(ValueError)
    def say_malformed(request: Request, error: Exception) -> Response:
        """A request lacks something, as labml's handlers find out."""
        LOG.warning("%s %s: %r", request.method, request.url.path, error)
        return PlainTextResponse("The dashboard can't read this request; its log says why.", 400)

    @app.exception_handler(Exception)
    def say_failed(request: Request, error: Exception) -> Response:
        return PlainTextResponse("The dashboard failed at this request; its log says why.", 500, SAFE_HEADERS)


def refuse(headers: Mapping[str, str], names: frozenset[str]) -> str:
    """The reason why a request is refused, or an empty string."""
    host = headers.get("host", "")
    if not is_here(host, names):
        return f"This dashboard is not called {host!r}; start it with --host to give it that name."
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host.lower()}":
        return "Requests of other origins are refused."
    is_opened = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not is_opened:
        return "Requests of other sites are refused, but for links to the page."
    return ""


def is_here(host: str, names: frozenset[str]) -> bool:
    """Whether a Host header is an address or one of our ``names``; other names are refused."""
    found = re.fullmatch(r"\[([^\]]*)\](?::\d+)?|([^:]*)(?::\d+)?", host.lower())
    name = (found[1] or found[2] or "") if found else ""
    if name == "localhost" or name in names:
        return bool(name)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def check_body(request: Request) -> tuple[int, str] | None:
    """The status and the message of a refusal of a request's body, or None. One that is too long is read to
    its end, since a program that is still sending would not read the answer."""
    length = request.headers.get("content-length", "0")
    if "transfer-encoding" in request.headers or not length.isdigit() or int(length) > MOST_BYTES:
        async for _ in request.stream():
            pass
        return 413, f"A request says its length, which is at most {MOST_BYTES:,} bytes."
    try:
        body = await request.body()
        question = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        return 400, "A request's body is JSON, and this one is not."
    if not isinstance(question, dict) and not TRACK.fullmatch(request.url.path):
        return 400, "A JSON object is expected."
    return None


def check_run(path: str, knows: Callable[[str], bool]) -> tuple[int, str] | None:
    """The status and the message of a refusal of a request about a run that doesn't exist, for which labml
    would make records; else None."""
    if (asked := OF_RUN.fullmatch(path)) is None:
        return None
    if not RUN_ID.fullmatch(asked["run"]):
        return 400, "That is no run's id."
    return None if knows(asked["run"].partition("_")[0]) else (404, "There is no such run.")


def is_packet(packet: Any) -> bool:
    """Whether a run's packet has the structure that labml's client gives it."""
    return (
        isinstance(packet, dict)
        and all(fits(packet[name], kind) for name, kind in PACKET_HAS.items() if name in packet)
        and all(len(one["step"]) == len(one["value"]) for one in packet.get("track", {}).values())
    )
