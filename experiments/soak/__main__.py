"""A training on two processes with a fault at regular intervals: it must end as the undisturbed one.

Run it with ``python -m experiments.soak``, on Linux; it writes docs/soak.md. It trains the Compressive
Transformer with dropout, first undisturbed, then with faults at random moments: SIGKILL and SIGTERM to a
random rank, a disk that is full, a dashboard that is killed. A training that a fault ended is resumed. In the
end the weights, the optimizer's state, the memories and the records of both must be the same bits; else the
exit code is 1.
"""

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from experiments.soak.faults import Outcome, Soak, disturbed
from experiments.soak.page import cells, page, row
from experiments.soak.programs import Dashboard, Training, running
from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.processes import sigterm_as_exit
from memformers.runs.atomic_dir import numbered
from memformers.runs.folder import read_metrics

SAME = ("model.safetensors", "optimizer.safetensors", "memory.safetensors", "random.json")


def main(soak: Soak) -> None:
    """Train twice, and write the page if both results are equal; otherwise print the differences."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    folders = (folder / "disturbed", folder / "undisturbed")
    try:
        with sigterm_as_exit(), ExitStack() as stack:
            dashboard = stack.enter_context(running(Dashboard(folder / "dashboard")))
            training = stack.enter_context(running(Training(soak.steps, folders[1], "off")))
            if (ended := training.wait()) != "finished":
                raise RuntimeError(f"the undisturbed training ended with {ended}:\n{training.said}")
            begun = time.monotonic()
            outcomes, starts = disturbed(soak, folders[0], dashboard, stack, say)
            seconds = time.monotonic() - begun
    except RuntimeError as error:
        sys.exit(f"{error}\nall is kept in {folder}")
    if different := differences(*folders):
        sys.exit(f"{', '.join(different)} differ from the undisturbed training's; see {folder}")
    text = page(soak, outcomes, starts, seconds, folders)
    soak.out.write_text(text, encoding="utf-8")
    print(f"{text}\nwritten: {soak.out}")


def say(outcomes: list[Outcome]) -> None:
    """Print the newest line of the table."""
    print(row(*cells(len(outcomes), outcomes[-1])), flush=True)


def differences(folder: Path, undisturbed: Path) -> list[str]:
    """The differences between two finished runs, in words."""
    ends = [numbered(run / "checkpoints")[0] for run in (folder, undisturbed)]
    names = [name for name in SAME if len({(end / name).read_bytes() for end in ends}) > 1]
    records = [[without_times(r) for r in read_metrics(run)] for run in (folder, undisturbed)]
    return names + (["the records"] if records[0] != records[1] else [])


TIMES = {"seconds", "evaluation_seconds", "tokens_per_second"}


def without_times(record: dict[str, float]) -> dict[str, float]:
    """A record's values without those of the clock."""
    return {name: value for name, value in record.items() if name not in TIMES}


if __name__ == "__main__":
    with plain_errors():
        main(parse_arguments(Soak))
