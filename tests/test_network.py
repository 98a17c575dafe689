"""Requests to servers that are good, slow, or not there."""

import base64
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from memformers.network import get


@pytest.fixture
def server():
    """A server that keeps the headers of what it is asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(dict(self.headers))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield http.server_port, asked
    http.shutdown()


def test_a_name_and_a_password_in_the_address_are_sent_as_the_web_does(server):
    port, asked = server
    assert get(f"http://ada:se%3Acret@127.0.0.1:{port}/api", 5.0) == (200, b"{}")
    assert asked[0]["Authorization"] == "Basic " + base64.b64encode(b"ada:se:cret").decode()
    get(f"http://127.0.0.1:{port}/api", 5.0)
    assert "Authorization" not in asked[1]


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:nowhere", "no.such.host.invalid", "[::1"])
def test_no_error_shows_the_password(address):
    with pytest.raises(OSError) as error:  # noqa: PT011
        get(f"http://ada:secret@{address}/api", 5.0)
    assert "secret" not in str(error.value)
