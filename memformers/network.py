"""One HTTP request that can't take longer than it may."""

import http.client
import threading
import urllib.error
import urllib.request


def get(url: str, seconds: float) -> tuple[int, bytes]:
    """The status and body of ``url``; OSError, with the reason, unless both are here in time.

    In a thread, because a socket's own limit bounds neither looking up a name, nor trying several
    addresses, nor a trickle of bytes.
    """
    outcome: list[tuple[int, bytes] | Exception] = []

    def fetch() -> None:
        try:
            with urllib.request.urlopen(url, timeout=seconds) as response:
                outcome.append((response.status, response.read()))
        except urllib.error.HTTPError as error:
            outcome.append((error.code, b""))
        except (OSError, ValueError, http.client.HTTPException) as error:
            outcome.append(error)

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise OSError(f"no answer within {seconds:g} s")
    if isinstance(outcome[0], Exception):
        raise OSError(str(getattr(outcome[0], "reason", "") or repr(outcome[0]))) from outcome[0]
    return outcome[0]
