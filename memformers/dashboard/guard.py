"""Checks every request first, and accepts only those of the dashboard's own page and of programs.

The dashboard has no login, so other web pages must not be able to reach it through the user's browser:
neither as another origin, nor by a name of theirs that points to this machine (DNS rebinding). Requests that
are too large or malformed don't reach labml's handlers either.
"""

import ipaddress
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOG = logging.getLogger("memformers.dashboard")
MOST_BYTES = 1_000_000
"""The longest body of a request."""
Check = Callable[[str, Any], tuple[int, str] | None]
"""A function of a path and of the JSON that is sent to it: the status and the message of a refusal, or
None."""
SAFE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
]


class Guard:
    """An ASGI application around ``app`` that refuses requests of other pages, and does not show the details
    of errors. ``names`` are those of this machine, in addition to its addresses; ``check`` is called with
    every request before ``app``; ``after`` is called when a request was served."""

    def __init__(self, app: App, names: frozenset[str], check: Check, after: Callable[[], None]):
        self.app = app
        self.names = names
        self.check = check
        self.after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if refusal := refuse(headers, self.names):
            await answer(send, 403, refusal)
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
        if refused := self.check(scope["path"], question):
            await answer(send, *refused)
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
