"""A hub in this process, with its files in memory: what huggingface_hub needs of Hugging Face's."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        """The files of each repository by their names."""
        self.private: set[str] = set()
        self.uploads: list[dict[str, object]] = []
        """The header of each commit."""

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    def commit_of(self, repo):
        """A name for the current files, as a hash of a commit is."""
        digest = hashlib.sha1()
        for name, content in sorted(self.files[repo].items()):
            digest.update(name.encode() + content)
        return digest.hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_):
        pass

    def answer(self, data=b"", status=200, **headers):
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, code):
        self.answer({"error": code}, 404, X_Error_Code=code)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts[1:] == ["repos", "create"]:
            request = json.loads(body)
            repo = f"{request['organization']}/{request['name']}"
            self.server.files.setdefault(repo, {})
            if "private" in (request.get("visibility"), request.get("private") and "private"):
                self.server.private.add(repo)
            self.answer({"url": f"{self.server.address}/{repo}"})
        elif parts[1] == "validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif parts[4] == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            regular = {"uploadMode": "regular", "shouldIgnore": False}
            self.answer({"files": [{"path": name, **regular} for name in names]})
        elif parts[4] == "commit":
            repo = "/".join(parts[2:4])
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "header":
                    self.server.uploads.append(value)
                else:
                    self.server.files[repo][value["path"]] = base64.b64decode(value["content"])
            commit = self.server.commit_of(repo)
            url = f"{self.server.address}/{repo}/commit/{commit}"
            self.answer({"success": True, "commitOid": commit, "commitUrl": url})

    def do_GET(self):
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if repo not in self.server.files:
            self.refuse("RepoNotFound")
            return
        files = self.server.files[repo]
        commit = self.server.commit_of(repo)
        if parts[0] == "api" and parts[4] == "revision" and parts[5] not in ("main", commit):
            self.refuse("RevisionNotFound")
        elif parts[0] == "api" and parts[4] == "revision":
            self.answer({"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]})
        elif parts[0] == "api":  # a tree
            entries = []
            for name, content in files.items():
                entry = {"type": "file", "path": name, "size": len(content), "oid": blob_of(content)}
                entries.append(entry)
            self.answer(entries)
        elif parts[4] not in files:
            self.refuse("EntryNotFound")
        else:
            content = files[parts[4]]
            self.answer(content, ETag=f'"{blob_of(content)}"', X_Repo_Commit=commit)

    do_HEAD = do_GET


def blob_of(content):
    return hashlib.sha1(content).hexdigest()


@contextmanager
def running_hub(monkeypatch, cache) -> Iterator[Hub]:
    """A hub that huggingface_hub uses instead of the real one, with an empty ``cache`` of downloads."""
    from huggingface_hub import constants

    hub = Hub()
    thread = Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    real = constants.ENDPOINT
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
        monkeypatch.setattr(constants, name, getattr(constants, name).replace(real, hub.address))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
