"""The results of a soak as a page of the documentation."""

from pathlib import Path
from textwrap import fill

import torch

from experiments.soak.faults import Outcome, Soak
from experiments.soak.programs import RANKS, TOKENS_A_STEP
from memformers.common.machine import describe_environment
from memformers.runs.folder import read_metrics


def page(soak: Soak, outcomes: list[Outcome], starts: int, seconds: float, folders: tuple[Path, Path]) -> str:
    """The page: the setting, and a line for each fault."""
    again = sum(max(outcome.struck - outcome.went_on, 0) for outcome in outcomes)
    folder, undisturbed = folders
    last = [[r["loss.valid"] for r in read_metrics(f) if "loss.valid" in r][-1] for f in folders]
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
        f"states and all {len(read_metrics(folder)):,} records. Validation loss at the end: {last[0]:.6f} "
        f"nats, undisturbed {last[1]:.6f}."
    )
    table = [
        row("fault", "after step", "what", "the training", "went on from step", "next loss", "undisturbed"),
        row(*["---"] * 7),
        *(
            row(*cells(i, o), *(f"{loss_after(f, o.struck):.6f}" for f in (folder, undisturbed)))
            for i, o in enumerate(outcomes, 1)
        ),
    ]
    return "\n\n".join(["# Soak", fill(said, 115), "\n".join(table), fill(end, 115)]) + "\n"


def cells(number: int, outcome: Outcome) -> list[object]:
    """The columns of the table that are known when a fault has happened."""
    fault = outcome.fault
    to = "the dashboard" if fault.kind == "dashboard down" else f"rank {fault.rank}"
    return [number, outcome.struck, f"{fault.kind}, {to}", outcome.ended, outcome.went_on]


def loss_after(folder: Path, step: int) -> float:
    """The training loss of the next record after ``step``."""
    losses = (r["loss.train"] for r in read_metrics(folder)
              if "loss.train" in r and r["tokens"] > step * TOKENS_A_STEP)  # fmt: skip
    return next(losses)


def row(*entries: object) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(str, entries)) + " |"
