"""The programs of a soak: a training run on two processes, and a dashboard that shows it."""

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from memformers.common.processes import module_command, module_environment
from memformers.runs.folder import read_metrics

RANKS, BATCH, SEGMENT, LOG_EVERY = 2, 8, 32, 5
TOKENS_A_STEP = BATCH * SEGMENT
MODEL = [
    "--model", "compressive", "--d-model", "64", "--heads", "4", "--d-ff", "128", "--n-layers", "2",
    "--segment-len", str(SEGMENT), "--mem-len", "32", "--c-mem-len", "16", "--dropout", "0.1",
]  # fmt: skip
PATIENCE_SECONDS = 180.0
REASONS = (
    r"stopped by SIG\w+ at token [\d,]+",
    r"Signal 9 \(SIGKILL\)",
    r"can't be written: .+?\.",
    r"error: .+",
)
"""Messages of a training run, the most informative first."""


class Training:
    """The training of ``folder`` as torchrun's processes, begun or resumed, shown at ``dashboard``."""

    def __init__(self, steps: int, folder: Path, dashboard: str):
        tokens = steps * TOKENS_A_STEP
        self.folder = folder
        command = [
            *module_command("torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
            "-m", "memformers", "train", "--resume", "--out", str(folder), "--data", "builtin", *MODEL,
            "--parallel", "ddp", "--batch-size", str(BATCH), "--tokens", str(tokens), "--evaluations", "4",
            "--log-every", str(LOG_EVERY), "--checkpoint-every", str(tokens // 100), "--dashboard", dashboard,
        ]  # fmt: skip
        # Through a pipe, since a file could not be written when the disk is full.
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=module_environment() | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.said = ""
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.said += line

    @property
    def step(self) -> int:
        """The last step that is recorded."""
        records = read_metrics(self.folder)
        return int(records[-1]["tokens"]) // TOKENS_A_STEP if records else 0

    def reach(self, step: int) -> None:
        """Wait for ``step``; RuntimeError if the training ends before."""
        until(lambda: self.step >= step or self.process.poll() is not None)
        if self.step < step:
            raise RuntimeError(f"the training ended before step {step}:\n{self.said}")

    def rank(self, number: int) -> int:
        """The process of a rank."""
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                if f"RANK={number}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
        raise RuntimeError(f"rank {number} is not running:\n{self.said}")

    def end(self) -> None:
        """Stop it, if it still runs."""
        self.process.terminate()
        self.process.wait()

    def wait(self) -> str:
        """How it ended: torchrun's exit code, and the reason that a rank or torchrun gave."""
        code = self.process.wait(PATIENCE_SECONDS)
        self.listener.join()
        reasons = [said for reason in REASONS for said in re.findall(reason, self.said)]
        return f"exit code {code}: {reasons[0] if reasons else 'no reason given'}" if code else "finished"


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; RuntimeError if it never comes."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing happened for {PATIENCE_SECONDS:.0f} seconds")
        time.sleep(0.02)


class Dashboard:
    """labml's dashboard, which can be killed and started again at the same address."""

    def __init__(self, folder: Path):
        self.folder, self.port = folder, "0"
        self.start()

    def start(self) -> None:
        """Start it, at the port it had before."""
        command = module_command("memformers", "dashboard", "--folder", str(self.folder), "--port", self.port)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=module_environment(), text=True)
        assert self.process.stdout
        said = self.process.stdout.readline()
        if not (address := re.search(r"http://\S+:(\d+)", said)):
            raise RuntimeError(f"the dashboard didn't start: {said or 'it said nothing'}")
        self.address, self.port = address[0], address[1]

    def end(self) -> None:
        """End it, with SIGKILL."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


Program = TypeVar("Program", Training, Dashboard)


@contextmanager
def running(program: Program) -> Iterator[Program]:
    """A block after which ``program`` is ended, if it still runs."""
    try:
        yield program
    finally:
        program.end()
