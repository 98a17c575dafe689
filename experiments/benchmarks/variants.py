"""Training steps of ours beside those of ours with other settings: with starts of documents, and with each
compression.

The sides take one step each in turn, as in :mod:`experiments.benchmarks.training`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from experiments.benchmarks.cases import CASES, MODELS, Case
from experiments.benchmarks.measuring import Result, check_errors, relative_error
from experiments.benchmarks.peers import TOLERANCE
from experiments.benchmarks.training import BFLOAT16, OURS, Trainer, copy_of, random_batches, steps_in_turns
from memformers import MemoryLM
from memformers.models.config import WITHOUT_PARAMETERS, CompressionName

STARTS, STARTS_BFLOAT16 = "with starts", "with starts, bfloat16"
PLAIN_OF = {STARTS: OURS, STARTS_BFLOAT16: BFLOAT16}
"""What each side with starts is compared with."""
SEGMENTS_A_DOCUMENT = 4
"""How many segments long documents are, on average."""
ROUNDS_A_STEP = 4
"""Rounds for each of a case's steps: what differs by a few percent needs more of them than a case has."""


def measure_all(*, quick: bool = False) -> Result:
    """Starts in two cases and compressions in the first of them; of a quick run, the smallest case."""
    cases = [CASES[name] for name in (("seed",) if quick else ("compare", "mid"))]
    return {
        "starts": [measure_starts(case.of(model), quick=quick) for case in cases for model in MODELS],
        "compressions": measure_compressions(cases[0].of("compressive"), quick=quick),
    }


def measure_starts(case: Case, *, quick: bool = False) -> Result:
    """Seconds of each step with and without starts, in float32 and in bfloat16."""
    torch.manual_seed(0)
    model, batches, doc_starts = MemoryLM(case.config), random_batches(case), random_starts(case)
    error = error_without_documents(model, batches)
    sides = {}
    for plain, started, bfloat16 in ((OURS, STARTS, False), (BFLOAT16, STARTS_BFLOAT16, True)):
        sides[plain] = Trainer(copy_of(model), batches, bfloat16=bfloat16)
        sides[started] = Trainer(copy_of(model), batches, doc_starts, bfloat16)
    seconds = seconds_of_steps(sides, case, quick=quick)
    return {"case": case.name, "model": case.config.model, "error": error, "seconds": seconds}


def random_starts(case: Case) -> list[Tensor]:
    """Where documents begin in four segments, boolean ``[S, B]`` each: anywhere, alike in all streams."""
    S, B = case.config.segment_len, case.batch_size
    return [torch.rand(S, B) < 1 / (SEGMENTS_A_DOCUMENT * S) for _ in range(4)]


@torch.no_grad()
def error_without_documents(model: MemoryLM, batches: list[Tensor]) -> float:
    """The largest error of logits over segments with growing memories, of steps with starts in which no
    document begins. Raises ValueError beyond the tolerance."""
    plain = Trainer(model, batches)
    started = Trainer(model, batches, doc_starts=[torch.zeros_like(b, dtype=torch.bool) for b in batches])
    pairs = [(started.read(i)[0], plain.read(i)[0]) for i in range(len(batches))]
    errors = {f"logits of segment {i}": relative_error(*pair) for i, pair in enumerate(pairs)}
    return check_errors(errors, TOLERANCE, "a step with starts in which no document begins")


def measure_compressions(case: Case, *, quick: bool = False) -> Result:
    """Seconds of each step with each compression, and with those that learn nothing also without a loss. All
    start with the same weights in everything but the compressions."""
    sides = {}
    for name in get_args(CompressionName):
        for loss in ("attention", "none") if name in WITHOUT_PARAMETERS else ("attention",):
            torch.manual_seed(0)
            model = MemoryLM(replace(case.config, compression=name, compression_loss=loss))
            sides[f"{name}, {loss}"] = Trainer(model, random_batches(case))
    return {"case": case.name, "seconds": seconds_of_steps(sides, case, quick=quick)}


def seconds_of_steps(sides: Mapping[str, Trainer], case: Case, *, quick: bool) -> Result:
    """Of every side with full memories, by rounds, after steps that aren't timed."""
    for trainer in sides.values():
        trainer.fill(case.segments_to_fill)
        for _ in range(1 if quick else 3):
            trainer.step()
    return steps_in_turns(sides, 2 if quick else ROUNDS_A_STEP * case.steps, case, back_and_forth=True)
