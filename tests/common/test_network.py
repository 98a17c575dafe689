"""Requests to servers that are good, slow, or not there."""

import base64

import pytest

from memformers.common.network import get
from tests.processes import Server


def test_a_name_and_a_password_in_the_address_are_sent_as_the_web_does():
    with Server(lambda handler, body: (200, b"{}")) as server:
        assert get(f"http://ada:se%3Acret@{server.host}/api", 5.0) == (200, b"{}")
        get(f"http://{server.host}/api", 5.0)
    assert server.headers[0]["Authorization"] == "Basic " + base64.b64encode(b"ada:se:cret").decode()
    assert "Authorization" not in server.headers[1]


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:nowhere", "no.such.host.invalid", "[::1"])
def test_no_error_shows_the_password(address):
    with pytest.raises(OSError, match=r"^(?!.*secret)"):
        get(f"http://ada:secret@{address}/api", 5.0)
