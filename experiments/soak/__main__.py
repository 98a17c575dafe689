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
from textwrap import fill

import torch

from experiments.soak.faults import Outcome, Soak, disturbed
from experiments.soak.programs import RANKS, TOKENS_A_STEP, Dashboard, Training, running
from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.machine import describe_environment
from memformers.common.processes import sigterm_as_exit
from memformers.report.markdown import table
from memformers.runs.atomic_dir import numbered
from memformers.runs.folder import read_metrics

SAME = ("model.safetensors", "optimizer.safetensors", "memory.safetensors", "random.json")
TIMES = {"seconds", "evaluation_seconds", "tokens_per_second"}
HEAD = ("fault", "after step", "what", "the training", "resumed from step", "next loss", "undisturbed")


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
            outcomes, starts = disturbed(soak, folders[0], dashboard, stack)
            seconds = time.monotonic() - begun
    except RuntimeError as error:
        sys.exit(f"{error}\nall is kept in {folder}")
    if different := differences(*folders):
        sys.exit(f"{', '.join(different)} differ from the undisturbed training's; see {folder}")
    text = page(soak, outcomes, starts, seconds, folders)
    soak.out.write_text(text, encoding="utf-8")
    print(f"{text}\nwritten: {soak.out}")


def differences(*folders: Path) -> list[str]:
    """The differences between two finished runs, in words."""
    ends = [numbered(run / "checkpoints")[0] for run in folders]
    names = [name for name in SAME if len({(end / name).read_bytes() for end in ends}) > 1]
    one, other = ([{k: r[k] for k in r.keys() - TIMES} for r in read_metrics(run)] for run in folders)
    return names + (["the records"] if one != other else [])


def page(soak: Soak, outcomes: list[Outcome], starts: int, seconds: float, folders: tuple[Path, Path]) -> str:
    """The page: the setting, and a line for each fault."""
    again = sum(max(outcome.struck - outcome.resumed, 0) for outcome in outcomes)
    records = [read_metrics(folder) for folder in folders]
    last = [[r["loss.valid"] for r in of_one if "loss.valid" in r][-1] for of_one in records]
    machine = describe_environment(torch.device("cpu"))
    said = (
        f"Written by `python -m experiments.soak` (torch {machine['packages']['torch']}, {machine['cores']} "
        f"cores). The Compressive Transformer, with dropout, trained {soak.steps:,} steps on {RANKS} "
        f"processes (`--parallel ddp`), with a random fault in every {soak.every} steps and a checkpoint in "
        f"every {soak.steps // 100}. A full disk is a limit of one byte on the files that the rank may "
        f"write. The dashboard is killed, and started again {soak.every // 4} steps later."
    )
    end = (
        f"{len(outcomes)} faults, {starts} starts, at least {again:,} steps made again, {seconds:,.0f} s. "
        f"The training ended with the same bits as the undisturbed one: weights, optimizer, memories, random "
        f"states and all {len(records[0]):,} records. Validation loss at the end: {last[0]:.6f} "
        f"nats, undisturbed {last[1]:.6f}."
    )
    rows = [
        [str(number), *outcome.cells, *(f"{loss_after(found, outcome.struck):.6f}" for found in records)]
        for number, outcome in enumerate(outcomes, 1)
    ]
    return "\n\n".join(["# Soak", fill(said, 115), table(HEAD, rows).strip(), fill(end, 115)]) + "\n"


def loss_after(records: list[dict[str, float]], step: int) -> float:
    """The training loss of the next record after ``step``."""
    return next(r["loss.train"] for r in records if "loss.train" in r and r["tokens"] > step * TOKENS_A_STEP)


if __name__ == "__main__":
    with plain_errors():
        main(parse_arguments(Soak))
