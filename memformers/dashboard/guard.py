"""What every request meets first: only those of the dashboard's own page, and of programs, come through.

The dashboard has no login, so a web page of anybody's must not be able to reach it through the user's
browser: neither as another origin, nor by a name of its own that it lets point here (DNS rebinding). Nor does
a request that is too large, or malformed, come to labml's handlers.
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
"""Says of a path, and of the JSON that is sent to it, with which status and words it is refused, if it is."""
SAFE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
]


class Guard:
    """An ASGI application around ``app`` that refuses what isn't the page's own, and lets no error's
    inner workings out. ``names`` are those of this machine, beside its addresses; ``check`` sees every
    request before ``app``; ``after`` is called when a request was served."""

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
        except Exception:  # whatever a handler of labml's raises, its trace is for the log alone
            LOG.exception("%s %s", scope["method"], scope["path"])
            if not started:
                await answer(send, 500, "The dashboard failed at this request; its log says why.")
        finally:
            self.after()


async def read_body(receive: Receive) -> bytes | None:
    """The whole body of a request; None for one that is too long, of which nothing is kept. It is taken to
    its end, since a browser or program that is still sending would not hear the answer."""
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
    """Why a request isn't served, or an empty string."""
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
    """Whether a Host header is an address, or one of our ``names``: no foreign name leads here."""
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
    """A whole answer in plain text."""
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *SAFE_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
