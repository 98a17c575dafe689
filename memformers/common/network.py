"""HTTP requests, with a name and a password if the address has them."""

import base64
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def split_login(url: str) -> tuple[str, urllib.request.OpenerDirector]:
    """``url`` without a name and a password, so that no error shows them, and an opener that sends them, to
    this machine without a proxy."""
    parts = urllib.parse.urlsplit(url)
    login, separator, host = parts.netloc.rpartition("@")
    handlers = [urllib.request.ProxyHandler({})] if parts.hostname in LOOPBACK else []
    opener = urllib.request.build_opener(*handlers)
    if separator:  # before it are a name and a password
        code = base64.b64encode(urllib.parse.unquote(login).encode()).decode()
        opener.addheaders.append(("Authorization", f"Basic {code}"))
    return parts._replace(netloc=host).geturl(), opener


def get(url: str, seconds: float) -> tuple[int, bytes]:
    """The status and body that ``url`` returns; OSError, with the reason, if there is no answer within
    ``seconds``."""
    try:
        address, opener = split_login(url)
        with opener.open(address, timeout=seconds) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, b""
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise OSError(str(getattr(error, "reason", "") or repr(error))) from error


def ask_json(url: str, seconds: float) -> Any:
    """The JSON that ``url`` returns; OSError for anything else."""
    status, answer = get(url, seconds)
    if status != 200:
        raise OSError(f"it answers with an error, {status}")
    try:
        return json.loads(answer)
    except ValueError:
        raise OSError("it answers with something that is not JSON") from None
