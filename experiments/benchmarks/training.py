"""Whole training steps, a step being forward, backward, clip and AdamW: ours, ours in other modes, and
the peers', one step each in turn, after those that should agree were shown to agree; and the time of a step
by kind of operator.

Raw measurements come out, seconds a step; :mod:`experiments.benchmarks.report` makes sense of them.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from experiments.benchmarks import cases
from experiments.benchmarks.cases import CASES, MODELS, VOCABULARY, Case
from experiments.benchmarks.measuring import (
    MatrixMultiply,
    Result,
    check_errors,
    first_line,
    in_child,
    in_turns,
    relative_error,
)
from experiments.benchmarks.peers import (
    LABML,
    LUCIDRAINS,
    TOLERANCE,
    LabmlLM,
    LucidrainsLM,
    check_parity,
    lucidrains_is_installed,
    two_alike,
)
from experiments.scaling.counting import flops, over_layers
from memformers import MemoryLM
from memformers.common.machine import peak_memory
from memformers.training.config import TrainConfig

OURS, BFLOAT16, COMPILED = "ours", "ours, bfloat16", "ours, compiled"
LABML_FUSED = "labml-nn, fused AdamW"
BUILT = {OURS: MemoryLM, LABML: LabmlLM, LUCIDRAINS: LucidrainsLM}
BFLOAT16_TOLERANCE = 5e-2
"""The tolerance of logits under autocast: 8 bits a number, through several layers."""
KINDS = {
    "matrix products": {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "linear"},
    "softmax": {
        "softmax", "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
    },
    "layer norm": {"layer_norm", "native_layer_norm", "native_layer_norm_backward"},
    "fused attention": {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    },
    "copies": {
        "copy_", "cat", "fill_", "zero_", "clone", "contiguous", "constant_pad_nd", "flip", "empty",
        "empty_like", "empty_strided", "zeros", "zeros_like", "stack", "resize_", "slice_backward",
        "select_backward", "_to_copy",
    },
    "elementwise": {
        "add", "add_", "mul", "mul_", "sub", "sub_", "div", "div_", "relu", "threshold_backward", "sum",
        "where", "masked_fill", "masked_fill_", "neg", "pow", "triu_", "tril", "bitwise_not", "mse_loss",
        "mse_loss_backward", "mean", "embedding", "index_select", "embedding_dense_backward",
    },
}  # fmt: skip
"""Operators, without ``aten::``, of every kind except the last two."""
OPTIMIZER, OTHER = "clip and optimizer", "everything else"


@dataclass
class Trainer:
    """A model in training, with its own memory."""

    model: nn.Module
    batches: list[Tensor]
    doc_starts: list[Tensor] | None = None
    bfloat16: bool = False
    fused: bool = True
    memory: Any = None
    taken: int = 0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.fused)

    @torch.no_grad()
    def fill(self, segments: int) -> None:
        """Read without learning, until the memory is full."""
        for i in range(segments):
            self.read(i)

    def read(self, number: int) -> tuple[Tensor, Tensor]:
        """Read segment ``number``, and remember it; returns its logits ``[S, B, vocab_size]`` and its
        reconstruction loss."""
        tokens = self.batches[number % len(self.batches)]
        own = self.doc_starts or []
        given = {"doc_starts": own[number % len(own)]} if own else {}  # which the peers don't know
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


def first_steps(sides: dict[str, Trainer], absent: dict[str, str], warm_up: int) -> Result:
    """Let every side take steps that aren't timed, the first of them compared with ours. A compiler that
    fails drops its side out; ``absent`` then says why. Raises ValueError where a side differs."""
    found: Result = {"errors": {}}
    expected = sides[OURS].step()
    for name in list(sides)[1:]:
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
        if name != LUCIDRAINS:  # another architecture
            tolerance = BFLOAT16_TOLERANCE if name == BFLOAT16 else TOLERANCE
            errors = {"logits of the first step": relative_error(logits, expected)}
            found["errors"][name] = check_errors(errors, tolerance, name)
    for _ in range(warm_up - 1):
        for trainer in sides.values():
            trainer.step()
    return found


def build_sides(case: Case, *, compiled: bool) -> tuple[dict[str, Trainer], dict[str, str], float]:
    """The sides with full memories; those that aren't there, and why; and the error of the parity check."""
    batches, absent = random_batches(case), {}
    ours, theirs = two_alike(case.config)
    error = check_parity(ours, theirs, batches)
    twin = LabmlLM(case.config)
    twin.load_state_dict(theirs.state_dict())
    sides = {
        OURS: Trainer(ours, batches),
        LABML: Trainer(theirs, batches, fused=False),  # PyTorch's default on CPU
        LABML_FUSED: Trainer(twin, batches),
        BFLOAT16: Trainer(copy_of(ours), batches, bfloat16=True),
    }
    if case.name in cases.WITH_LUCIDRAINS and case.config.model == "compressive":
        if lucidrains_is_installed():
            sides[LUCIDRAINS] = Trainer(LucidrainsLM(case.config), batches)
        else:
            absent[LUCIDRAINS] = "not installed"
    if case.name not in cases.COMPILED or case.config.model != "transformer-xl":
        absent[COMPILED] = "compiled are the small Transformer-XLs alone"
    elif not compiled:
        absent[COMPILED] = "quick run"
    else:
        sides[COMPILED] = Trainer(copy_of(ours), batches)
    for trainer in sides.values():
        trainer.fill(case.segments_to_fill)
    if COMPILED in sides:
        sides[COMPILED].model.compile(fullgraph=True)
    return sides, absent, error


def steps_in_turns(sides: Mapping[str, Trainer], rounds: int, case: Case, **options: Any) -> Result:
    """Seconds of a step of each side in every round, with the ``options`` of in_turns."""
    steps = {name: trainer.step for name, trainer in sides.items()}
    return in_turns(steps, rounds, f"{case.name} {case.config.model}", **options)


def measure(case: Case, *, quick: bool = False) -> Result:
    """Seconds of every step of every side, the rate of ``torch.mm`` in between, memory, and a profile."""
    torch.manual_seed(0)
    sides, absent, error = build_sides(case, compiled=not quick)
    found = first_steps(sides, absent, warm_up=1 if quick else 3)
    matrix_multiply = MatrixMultiply()
    seconds = steps_in_turns(sides, 2 if quick else case.steps, case, between=matrix_multiply)
    return {
        "case": case.name,
        "model": case.config.model,
        "tokens": case.tokens,
        "flops": over_layers(flops, TrainConfig(case.config, batch_size=case.batch_size)).total(),
        "parity error": error,
        **found,
        "not run": absent,
        "seconds": seconds,
        "torch.mm, FLOP/s": matrix_multiply.rates,
        "profile": shares_of_time(sides[OURS].step),
        "peak memory": {
            name: in_child("training", "peak_memory_of", case.name, case.config.model, name)
            for name in BUILT
            if name in sides
        },
    }


def peak_memory_of(name: str, model: str, side: str) -> int | None:
    """Bytes that this process holds at most in two training steps with full memories."""
    torch.manual_seed(0)
    case = CASES[name].of(MODELS[MODELS.index(model)])
    trainer = Trainer(BUILT[side](case.config), random_batches(case), fused=side != LABML)
    trainer.fill(case.segments_to_fill)
    trainer.step()
    trainer.step()
    return peak_memory(torch.device("cpu"))


def kind_of(operator: str) -> str:
    """The kind of an operator by its name in a profile."""
    if operator.startswith(("aten::_fused_adam", "aten::_foreach", "Optimizer.")):
        return OPTIMIZER
    name = operator.removeprefix("aten::")
    return next((kind for kind, names in KINDS.items() if name in names), OTHER)


def shares_of_time(step: Callable[[], object], steps: int = 3) -> dict[str, float]:
    """The fraction of each kind in the operators' own time, over some steps."""
    with profile(activities=[ProfilerActivity.CPU]) as measured:
        for _ in range(steps):
            step()
    times = dict.fromkeys([*KINDS, OPTIMIZER, OTHER], 0.0)
    for event in measured.key_averages():
        times[kind_of(event.key)] += event.self_cpu_time_total
    total = sum(times.values())
    return {kind: time / total for kind, time in times.items()}
