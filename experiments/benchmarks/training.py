"""Whole training steps, a step being forward, backward, clip and AdamW: ours, ours in other modes, and
the peers', one step each in turn, after those that should agree were shown to agree.

Raw measurements come out, seconds a step; :mod:`experiments.benchmarks.report` makes sense of them.
"""

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from experiments.benchmarks.cases import VOCABULARY, Case
from experiments.benchmarks.machine import MatrixMultiply, first_line, measure_in_child, relative_error
from experiments.benchmarks.parity import TOLERANCE, check_parity, two_alike
from experiments.benchmarks.peers import LABML, LUCIDRAINS, LabmlLM, LucidrainsLM, lucidrains_is_installed
from experiments.benchmarks.profiling import shares_of_time
from experiments.scaling.counting import flops, over_layers
from memformers import MemoryLM
from memformers.training.config import TrainConfig

OURS, BFLOAT16, COMPILED = "ours", "ours, bfloat16", "ours, compiled"
LABML_FUSED = "labml-nn, fused AdamW"
BFLOAT16_TOLERANCE = 5e-2
"""The same for logits under autocast: 8 bits a number, through several layers."""


class Trainer:
    """A model in training, with its own memory."""

    def __init__(
        self,
        model: nn.Module,
        batches: list[Tensor],
        *,
        doc_starts: list[Tensor] | None = None,
        bfloat16: bool = False,
        fused: bool = True,
    ):
        self.model = model
        self.batches = batches
        self.doc_starts = doc_starts
        self.bfloat16 = bfloat16
        self.memory: Any = None
        self.taken = 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    @torch.no_grad()
    def fill(self, segments: int) -> None:
        """Read without learning, until the memory is full."""
        for i in range(segments):
            self.read(i)

    def read(self, number: int) -> tuple[Tensor, Tensor]:
        """Read segment ``number``, and remember it; returns its logits ``[S, B, vocab_size]`` and its
        reconstruction loss."""
        tokens = self.batches[number % len(self.batches)]
        # The peers know no starts.
        own = self.doc_starts
        given = {} if own is None else {"doc_starts": own[number % len(own)]}
        logits, self.memory, reconstruction_loss = self.model(tokens, self.memory, **given)
        return logits, reconstruction_loss

    def step(self) -> Tensor:
        """Take the next training step; returns its logits."""
        tokens = self.batches[self.taken % len(self.batches)]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            logits, reconstruction_loss = self.read(self.taken)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + reconstruction_loss
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.taken += 1
        return logits.detach()


def random_batches(case: Case) -> list[Tensor]:
    """Four segments that follow each other, ``[S, B]`` each."""
    return [torch.randint(VOCABULARY, (case.config.segment_len, case.batch_size)) for _ in range(4)]


def copy_of(ours: MemoryLM) -> MemoryLM:
    """A model of its own with the same weights."""
    twin = MemoryLM(ours.config)
    twin.load_state_dict(ours.state_dict())
    return twin


def first_steps(sides: dict[str, Trainer], absent: dict[str, str], warm_up: int) -> dict[str, Any]:
    """Let every side take steps that aren't timed, the first of them compared with ours. A compiler that
    fails drops its side out; ``absent`` then says why. Raises ValueError where a side differs."""
    found: dict[str, Any] = {}
    expected = sides[OURS].step()
    for name in [name for name in sides if name != OURS]:
        start = time.perf_counter()
        try:
            logits = sides[name].step()
        except Exception as failure:
            if name != COMPILED:
                raise
            absent[name] = f"torch.compile failed: {first_line(failure)}"
            del sides[name]
            continue
        if name == COMPILED:
            found["seconds to compile"] = time.perf_counter() - start
        if name == LUCIDRAINS:
            continue  # another architecture
        found.setdefault("errors", {})[name] = error = relative_error(logits, expected)
        tolerance = BFLOAT16_TOLERANCE if name == BFLOAT16 else TOLERANCE
        if not error <= tolerance:
            raise ValueError(f"{name} differs from {OURS} by {error:.1e} in the logits of its first step.")
    for _ in range(warm_up - 1):
        for trainer in sides.values():
            trainer.step()
    return found


def build_sides(case: Case, *, compiled: bool) -> tuple[dict[str, Trainer], dict[str, str], float]:
    """The sides with full memories; those that aren't there, and why; and the error of the parity check."""
    batches, absent = random_batches(case), {}
    ours, theirs = two_alike(case)
    error = check_parity(ours, theirs, batches)
    twin = LabmlLM(case.config)
    twin.load_state_dict(theirs.state_dict())
    sides = {
        OURS: Trainer(ours, batches),
        LABML: Trainer(theirs, batches, fused=False),  # PyTorch's default on CPU
        LABML_FUSED: Trainer(twin, batches),
    }
    if case.lucidrains and case.config.model == "compressive":
        if lucidrains_is_installed():
            sides[LUCIDRAINS] = Trainer(LucidrainsLM(case.config), batches)
        else:
            absent[LUCIDRAINS] = "not installed"
    for name in sides:
        if name != LABML_FUSED:
            sides[name].fill(case.segments_to_fill)
    sides[LABML_FUSED].memory = sides[LABML].memory
    sides[BFLOAT16] = Trainer(copy_of(ours), batches, bfloat16=True)
    if not case.compiled or case.config.model != "transformer-xl":
        absent[COMPILED] = "compiled are the small Transformer-XLs alone"
    elif not compiled:
        absent[COMPILED] = "quick run"
    else:
        sides[COMPILED] = Trainer(copy_of(ours), batches)
        sides[COMPILED].model.compile(fullgraph=True)
    for name in (BFLOAT16, COMPILED):
        if name in sides:
            sides[name].memory = sides[OURS].memory
    return sides, absent, error


def measure(case: Case, *, quick: bool = False, children: bool = True) -> dict[str, Any]:
    """Seconds of every step of every side, the rate of ``torch.mm`` in between, memory, and a profile."""
    torch.manual_seed(0)
    sides, absent, error = build_sides(case, compiled=not quick)
    found = first_steps(sides, absent, warm_up=1 if quick else 3)
    matrix_multiply = MatrixMultiply()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    rates = []
    rounds = 2 if quick else case.steps
    for _ in tqdm(range(rounds), desc=f"{case.name} {case.config.model}", leave=False):
        for name, trainer in sides.items():
            start = time.perf_counter()
            trainer.step()
            seconds[name].append(time.perf_counter() - start)
            rates.append(matrix_multiply.rate())
    peers = [name for name in sides if name in (OURS, LABML, LUCIDRAINS)]
    return {
        "case": case.name,
        "model": case.config.model,
        "tokens": case.tokens,
        "flops": over_layers(flops, TrainConfig(case.config, batch_size=case.batch_size)).total(),
        "parity error": error,
        **found,
        "not run": absent,
        "seconds": seconds,
        "torch.mm, FLOP/s": rates,
        "profile": shares_of_time(sides[OURS].step),
        "peak memory": {name: peak_memory_of(case, name) for name in peers} if children else {},
    }


def peak_memory_of(case: Case, side: str) -> int | None:
    """Bytes that a process of its own holds at most in two training steps with full memories."""
    return measure_in_child("training", case.name, case.config.model, side)


def train_a_little(case: Case, side: str) -> None:
    """What such a process does."""
    models = {OURS: MemoryLM, LABML: LabmlLM, LUCIDRAINS: LucidrainsLM}
    trainer = Trainer(models[side](case.config), random_batches(case), fused=side != LABML)
    trainer.fill(case.segments_to_fill)
    trainer.step()
    trainer.step()
