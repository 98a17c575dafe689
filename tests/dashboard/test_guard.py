"""Nobody but the user's own page and programs gets through, and no file but the page's gets out."""

import socket

import pytest

from memformers.dashboard.pages import MAX_BYTES
from tests.dashboard.conftest import DashboardHere

LINK = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")
TRACK = "/api/v1/default/track?labml_version=0.5.3&run_uuid="
RUN = "0123456789abcdef"


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory):
    with DashboardHere(tmp_path_factory.mktemp("guarded")) as dashboard:
        yield dashboard


def send(dashboard, path, *headers, method="GET", body=b"", host="localhost", length=True):
    """One request, byte for byte; the status and all that is answered."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
    lines += [f"Content-Length: {len(body)}"] if length else []
    with socket.create_connection(("127.0.0.1", dashboard.port), timeout=10) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(answer.split()[1]), answer.decode(errors="replace")


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "//etc/passwd", "/js/../../settings.py", "/..%5csettings.py", "/%00",
     "/..%2f..%2fetc%2fpasswd", "/%252e%252e/settings.py", "/js/%2e%2e/%2e%2e/settings.py"],
)  # fmt: skip
def test_no_path_leads_out_of_the_page_s_files(dashboard, path):
    status, answer = send(dashboard, path)
    assert not [inside for inside in ("root:", "import ", '"url"') if inside in answer]
    assert status in (400, 404)


def test_the_page_and_its_files_are_served(dashboard):
    assert "location: /comparisons" in send(dashboard, "/")[1]
    for path in ("/runs", "/run/0123456789/compare"):
        assert "bundle.min.js" in send(dashboard, path)[1]
    status, answer = send(dashboard, "/js/bundle.min.js")
    assert status == 200
    assert "nosniff" in answer
    assert "swagger" not in send(dashboard, "/docs")[1]


@pytest.mark.parametrize(
    ("host", "here"),
    [("127.0.0.1:5005", True), ("LOCALHOST:1", True), ("[::1]:5005", True), ("192.168.0.7", True),
     ("workstation:5005", True), ("", False), ("evil.example:5005", False),
     ("127.0.0.1.evil.example", False), ("a:b:c", False), ("[evil]", False)],
)  # fmt: skip
def test_addresses_are_accepted_and_foreign_host_names_refused(dashboard, host, here):
    status = send(dashboard, "/api/v1/runs/null", host=host)[0]
    assert status == 200 if here else status in (400, 403)


@pytest.mark.parametrize(
    ("headers", "good"),
    [(["Origin: http://evil.example"], False), (["Origin: null"], False),
     (["Origin: http://localhost:8888"], False), (["Origin: http://localhost"], True),
     (["Sec-Fetch-Site: same-site"], False), (["Sec-Fetch-Site: cross-site"], False),
     ([*LINK, "Sec-Fetch-Dest: document"], True), ([*LINK, "Sec-Fetch-Dest: iframe"], False),
     ([*LINK, "Sec-Fetch-Dest: document", "Origin: http://evil.example"], False)],
)  # fmt: skip
def test_other_origins_are_refused_and_a_link_may_open_the_page(dashboard, headers, good):
    for path, method in (("/comparisons", "GET"), ("/api/v1/auth/user", "POST"), ("/", "OPTIONS")):
        status, answer = send(dashboard, path, *headers, method=method, body=b"{}")
        assert (status != 403) == good
        assert "access-control-allow" not in answer.lower()


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [(TRACK + RUN, b"{not json", 400), (TRACK + RUN, b"\xff", 400), (TRACK + RUN, b"[" * 100_000, 400),
     (TRACK + RUN, b"[1, 2]", 400), (TRACK + RUN, b'[{"track": []}]', 400),
     (TRACK + RUN, b'[{"configs": {"a": {}}}]', 400),
     (TRACK + RUN, b'[{"track": {"a": {"step": [1, 2], "value": [1]}}}]', 400),
     (TRACK + RUN, b'[{"track": {"a": {"step": [1], "value": ["<b>"]}}}]', 400),
     *((TRACK + run, b"[]", 400) for run in (f"{RUN}&rank=x", "../../x", "a" * 100)),
     ("/api/v1/compare/metrics/unknown", b"{}", 400), ("/api/v1/run/no_id", b"", 400),
     (f"/api/v1/metrics/{RUN}", b'{"get_all": true}', 404), (f"/api/v1/custom_metrics/{RUN}", b"{}", 404),
     (f"/api/v1/compare/preferences/{RUN}", b"", 404),
     ("/api/v1/runs/archive", b"[1]", 400), ("/api/v1/runs/archive", b"{}", 400),
     *((f"/comparisons/{path}", b"", 400) for path in (f"{RUN}/data?over=x", "x/data")),
     *((f"/comparisons/{path}", b"", 404)
       for path in ("../../etc", RUN, f"{RUN}/data", f"{RUN}/report", "files/..%2fguard.py"))],
)  # fmt: skip
def test_malformed_requests_leave_no_trace(dashboard, path, body, wanted, caplog):
    status, answer = send(dashboard, path, method="POST" if body else "GET", body=body)
    assert status == wanted
    assert not [inside for inside in ("Traceback", "trace", ".py", "File", "Error:") if inside in answer]
    assert dashboard.runs() == []
    assert not [record for record in caplog.records if record.exc_info]


def test_a_body_has_at_most_a_megabyte_stated_or_not(dashboard):
    large = b'[{"name": "' + b"x" * MAX_BYTES + b'"}]'
    assert send(dashboard, TRACK + RUN, method="POST", body=large)[0] == 413
    chunks = b"".join(b"10000\r\n" + b" " * 0x10000 + b"\r\n" for _ in range(16)) + b"0\r\n\r\n"
    header = "Transfer-Encoding: chunked"
    assert send(dashboard, TRACK + RUN, header, method="POST", body=chunks, length=False)[0] == 413
    assert dashboard.runs() == []
