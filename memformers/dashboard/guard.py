"""Middleware that lets only the dashboard's own pages and programs in, with requests that labml can handle.

There is no login, so no other web page may reach the dashboard through the user's browser: neither as another
origin, nor by a name of its own that points to this machine. Starlette's check of hosts takes names alone;
here every address is good, since no name leads to it. labml's handlers accept anything.
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
"""The paths that ask about a run; of one that doesn't exist, labml would make records."""
TRACK = re.compile(r"/api/v1/[^/]+/track")
SETTING, SERIES = {"name": Any, "computed": Any}, {"step": list[float], "value": list[float]}
STATUS = {"status": Any, "details": Any, "time": Any}
PACKET_HAS = {"configs": dict[str, SETTING], "track": dict[str, SERIES], "status": STATUS}  # type: ignore[valid-type]
"""What a packet of a run may have, by the kind of each."""
SAFE_HEADERS = {"x-content-type-options": "nosniff", "x-frame-options": "DENY",
                "referrer-policy": "same-origin"}  # fmt: skip


def add_guard(app: FastAPI, names: frozenset[str], knows: Callable[[str], bool]) -> None:
    """Refuse what no page or program of the user's asks ``app``. ``names`` are those of this machine, beside
    its addresses; ``knows`` says whether there is a run."""

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        status, why = 403, refuse(request.headers, names)
        if not why:
            status, why = await check_body(request)
        if not why and (asked := OF_RUN.fullmatch(request.url.path)):
            if not RUN_ID.fullmatch(asked["run"]):
                status, why = 400, "That is no run's id."
            elif not knows(asked["run"].partition("_")[0]):
                status, why = 404, "There is no such run."
        response = PlainTextResponse(why, status) if why else await answer(request)
        response.headers.update(SAFE_HEADERS)
        return response

    def say_failed(request: Request, error: Exception) -> Response:
        """labml's handlers find out by KeyError and ValueError that a request lacks something."""
        LOG.warning("%s %s: %r", request.method, request.url.path, error)
        status = 400 if isinstance(error, KeyError | ValueError) else 500
        said = "The dashboard can't answer this request; its log says why."
        return PlainTextResponse(said, status, SAFE_HEADERS)

    for kind in (KeyError, ValueError, Exception):
        app.add_exception_handler(kind, say_failed)


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
    name = re.sub(r":\d+$", "", host.lower())
    if name == "localhost" or name in names:
        return bool(name)
    try:
        return bool(ipaddress.ip_address(re.sub(r"^\[(.*)\]$", r"\1", name)))
    except ValueError:
        return False


async def check_body(request: Request) -> tuple[int, str]:
    """The status and the message of a refusal of a request's body, empty if it is good. One that is too long
    is read to its end, since a program that is still sending would not read the answer."""
    length = request.headers.get("content-length", "0")
    if "transfer-encoding" in request.headers or not length.isdigit() or int(length) > MOST_BYTES:
        async for _ in request.stream():
            pass
        return 413, f"A request says its length, which is at most {MOST_BYTES:,} bytes."
    try:
        question = json.loads(await request.body() or b"{}")
    except (ValueError, RecursionError):
        return 400, "A request's body is JSON, and this one is not."
    if not isinstance(question, dict) and not TRACK.fullmatch(request.url.path):
        return 400, "A JSON object is expected."
    return 200, ""


def is_packet(packet: Any) -> bool:
    """Whether a run's packet has the structure that labml's client gives it."""
    return (
        isinstance(packet, dict)
        and all(fits(packet[name], kind) for name, kind in PACKET_HAS.items() if name in packet)
        and all(len(one["step"]) == len(one["value"]) for one in packet.get("track", {}).values())
    )
