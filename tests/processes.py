"""The command, in this process or beside it, programs that tests start, and servers that they ask."""

import contextlib
import io
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest

from memformers import cli
from memformers.common.processes import run_modules
from memformers.comparison.recall.task import RECALL
from memformers.comparison.text import TEXT

T = TypeVar("T")


def program(*arguments: Any) -> list[str]:
    """The command line of the command in a separate process."""
    return [sys.executable, "-m", "memformers", *map(str, arguments)]


def start(command: list[str], **options: Any) -> "subprocess.Popen[str]":
    """Start a program that hears Ctrl-C: a suite that runs in the background was started with it ignored, and
    so would this be."""
    return subprocess.Popen(
        command,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )


def finish(command: list[Any], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end, whatever that is."""
    options = {"capture_output": True, "text": True, "check": False, "timeout": 300} | options
    return subprocess.run(list(map(str, command)), **options)


def wait_for(condition: Callable[[], T], seconds: float = 120.0) -> T:
    """What ``condition`` gives once it gives something."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.02)
    return result


def is_running(process: int) -> bool:
    """Whether a process runs; a zombie, that nobody has waited for, doesn't."""
    return finish(["ps", "-p", process, "-o", "state="]).stdout.strip() not in ("", "Z")


@dataclass(frozen=True)
class Ended:
    """How the command ended, and what it said."""

    code: int
    out: str
    err: str

    def says(self, message: str) -> bool:
        """Whether it refused with ``message``; lines of a box around it are taken as one."""
        return self.code == 2 and message in " ".join(self.err.split())


def check_plain(ended: Ended) -> None:
    """It went well, or it said in one line (or, where tyro did, in a few that name --help) what was wrong."""
    assert "Traceback" not in ended.err, ended.err
    assert ended.code in (0, 2), ended.err
    if ended.code:
        ours = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        assert len(ours) == 1 or (not ours and ("--help" in ended.err or "usage: " in ended.err)), ended.err


def run(*arguments: Any, input: str | bytes = "") -> Ended:
    """The command, in this process; whatever isn't SystemExit goes through, and fails the test."""
    return ended(lambda: cli.main([*map(str, arguments)]), input)


def run_module(module: str, *arguments: Any) -> Ended:
    """``python -m module``, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *map(str, arguments)])
        return ended(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


def ended(do: Callable[[], object], input: str | bytes = "") -> Ended:
    """How ``do`` ends a program that is given ``input``; it writes UTF-8, as to a pipe."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code = 0
    input_stream = io.TextIOWrapper(io.BytesIO(input if isinstance(input, bytes) else input.encode()))
    with pytest.MonkeyPatch.context() as patch:
        for name, stream in (("stdout", out), ("stderr", err), ("stdin", input_stream)):
            patch.setattr(sys, name, stream)
        try:
            do()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return Ended(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))


# Those of experiments outside of the package, which their tests add.
OTHER_TASKS: list[Any] = []


def train_here(
    commands: Sequence[Sequence[str]], jobs: int, *, environment: Any, begin: Callable[[int], None]
) -> Iterator[tuple[int, int]]:
    """Takes the place of ``run_modules`` in an experiment: trains in this process, which takes a second where
    another one would first have to import everything."""
    for number, (module, folder, *_) in enumerate(commands):
        begin(number)
        task = next(task for task in (RECALL, TEXT, *OTHER_TASKS) if task.module == module)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            task.train(Path(folder))
        yield number, 0


def train_first_beside(
    commands: Sequence[Sequence[str]], jobs: int, *, environment: Any, begin: Callable[[int], None]
) -> Iterator[tuple[int, int]]:
    """Takes the place of ``run_modules`` too, but for the first training, which is a separate process."""
    yield from run_modules(commands[:1], jobs, environment=environment, begin=begin)
    here = train_here(commands[1:], jobs, environment=environment, begin=lambda number: begin(number + 1))
    yield from ((number + 1, code) for number, code in here)


class Server:
    """A server, as a context, that answers each request with ``respond(handler, body)``: a status and the
    answer's body, whose length it states, rightly or as ``length``. It keeps the headers and the bodies of
    what it was asked."""

    def __init__(
        self,
        respond: Callable[[BaseHTTPRequestHandler, bytes], tuple[int, bytes]],
        length: int | None = None,
    ):
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler):
                body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
                self.headers.append(dict(handler.headers))
                self.bodies.append(body)
                status, answer = respond(handler, body)
                handler.send_response(status)
                handler.send_header("Content-Length", str(len(answer) if length is None else length))
                handler.end_headers()
                handler.wfile.write(answer)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> "Server":
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()
