"""What every request meets first: only those of the dashboard's own page, and of programs, come through.

The dashboard has no login, so a web page of anybody's must not be able to reach it through the user's
browser: neither as another origin, nor by a name of its own that it lets point here (DNS rebinding).
"""

import ipaddress
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOG = logging.getLogger("memformers.dashboard")
SAFE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
]


class Guard:
    """An ASGI application around ``app`` that refuses what isn't the page's own, and lets no error's
    inner workings out. ``names`` are those of this machine, beside its addresses; ``after`` is called
    when a request was served."""

    def __init__(self, app: App, names: frozenset[str], after: Callable[[], None]):
        self.app = app
        self.names = names
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
        started = False

        async def send_safely(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), *SAFE_HEADERS]
            await send(message)

        try:
            await self.app(scope, receive, send_safely)
        except Exception:  # whatever a handler of labml's raises, its trace is for the log alone
            LOG.exception("%s %s", scope["method"], scope["path"])
            if not started:
                await answer(send, 500, "The dashboard failed at this request; its log says why.")
        finally:
            self.after()


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
