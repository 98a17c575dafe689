"""Checks every request first, and accepts only those of the dashboard's own page and of programs.

The dashboard has no login, so other web pages must not be able to reach it through the user's browser:
neither as another origin, nor by a name of theirs that points to this machine (DNS rebinding). Requests that
are too large or malformed don't reach labml's handlers either, since these accept anything.
"""

import ipaddress
import json
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from memformers.common.fields import fits

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOG = logging.getLogger("memformers.dashboard")
MOST_BYTES = 1_000_000
"""The longest body of a request."""
Knows = Callable[[str], bool]
"""Whether labml's pages have a run, by its id."""
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
SAFE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
]


class Guard:
    """An ASGI application around ``app`` that refuses requests of other pages, and does not show the details
    of errors. ``names`` are those of this machine, in addition to its addresses; ``knows`` says whether there
    is a run; ``after`` is called when a request was served."""

    def __init__(self, app: App, names: frozenset[str], knows: Knows, after: Callable[[], None]):
        self.app = app
        self.names = names
        self.knows = knows
        self.after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if reason := refuse(headers, self.names):
            await answer(send, 403, reason)
            return
        body = await read_body(receive)
        if body is None:
            await answer(send, 413, f"A request has at most {MOST_BYTES:,} bytes.")
            return
        try:
            question = json.loads(body) if body else None
        except (ValueError, RecursionError):
            await answer(send, 400, "A request's body is JSON, and this one is not.")
            return
        if refusal := check_request(scope["path"], question, self.knows):
            await answer(send, *refusal)
            return
        started = False

        async def receive_again() -> MutableMapping[str, Any]:
            nonlocal body
            if body is None:
                return await receive()
            message, body = {"type": "http.request", "body": body, "more_body": False}, None
            return message

        async def send_safely(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), *SAFE_HEADERS]
            await send(message)

        try:
            await self.app(scope, receive_again, send_safely)
        except Exception:  # any error of labml's handlers; its trace is only for the log
            LOG.exception("%s %s", scope["method"], scope["path"])
            if not started:
                await answer(send, 500, "The dashboard failed at this request; its log says why.")
        finally:
            self.after()


async def read_body(receive: Receive) -> bytes | None:
    """The whole body of a request; None for one that is too long, which is not kept. It is read to its end,
    since a browser or program that is still sending would not read the answer."""
    body: bytes | None = b""
    more = True
    while more:
        message = await receive()
        if body is not None:
            body += message.get("body", b"")
            if len(body) > MOST_BYTES:
                body = None
        more = message["type"] == "http.request" and message.get("more_body", False)
    return body


def refuse(headers: dict[str, str], names: frozenset[str]) -> str:
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
    name = host.lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    if name == "localhost" or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def answer(send: Send, status: int, text: str) -> None:
    """Send a whole answer in plain text."""
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *SAFE_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


def check_request(path: str, question: Any, knows: Knows) -> tuple[int, str] | None:
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
    if not knows(run.partition("_")[0]):
        return 404, "There is no such run."
    return None


def is_packet(packet: Any) -> bool:
    """Whether a run's packet has the structure that labml's client gives it."""
    return (
        isinstance(packet, dict)
        and all(fits(packet[name], kind) for name, kind in PACKET_HAS.items() if name in packet)
        and all(len(one["step"]) == len(one["value"]) for one in packet.get("track", {}).values())
    )
