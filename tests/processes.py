"""Programs that tests start beside themselves."""

import signal
import subprocess
from typing import Any


def start(command: list[str], **options: Any) -> "subprocess.Popen[str]":
    """Start a program that hears Ctrl-C: a suite that runs in the background was started with it ignored, and
    so would this be."""
    return subprocess.Popen(
        command,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )
