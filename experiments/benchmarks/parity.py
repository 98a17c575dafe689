"""Checks that our models and labml-nn's compute the same before they are timed."""

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.benchmarks.cases import Case
from experiments.benchmarks.machine import relative_error
from experiments.benchmarks.peers import LabmlLM
from memformers import MemoryLM, from_labml

TOLERANCE = 1e-4
"""The largest RMS error of a whole model in float32 relative to the RMS value, in logits, reconstruction loss
and gradient: the kernels' 1e-5, and more for several layers."""


def two_alike(case: Case) -> tuple[MemoryLM, LabmlLM]:
    """Our model and labml-nn's with the same weights, none of them zero."""
    theirs, ours = LabmlLM(case.config), MemoryLM(case.config)
    ours.load_state_dict(from_labml(theirs.state_dict(), max_positions=case.config.longest_attention))
    return ours, theirs


def check_parity(ours: MemoryLM, theirs: LabmlLM, batches: list[Tensor]) -> float:
    """The largest error of logits and reconstruction loss over segments with growing memories, until
    some of them were compressed, and then of the gradient. Raises ValueError above the tolerance."""
    errors = {}
    our_memory, their_memory = None, None
    segments = ours.config.layer_lengths[0].mem_len // ours.config.segment_len + 3
    for i in range(segments):
        learn = i == segments - 1
        with torch.set_grad_enabled(learn):
            tokens = batches[i % len(batches)]
            logits, our_memory, loss = ours(tokens, our_memory)
            their_logits, their_memory, their_loss = theirs(tokens, their_memory)
        errors[f"logits of segment {i}"] = relative_error(logits, their_logits)
        errors[f"reconstruction loss of segment {i}"] = relative_error(loss, their_loss)
        if learn:
            (F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + loss).backward()
            (F.cross_entropy(their_logits.flatten(0, 1), tokens.flatten()) + their_loss).backward()
            errors["gradient"] = relative_error(*two_gradients(ours, theirs))
    where = max(errors, key=errors.__getitem__)
    if not errors[where] <= TOLERANCE:
        raise ValueError(f"ours and labml-nn differ by {errors[where]:.1e} in the {where}.")
    for model in (ours, theirs):
        model.zero_grad()
    return errors[where]


def two_gradients(ours: MemoryLM, theirs: LabmlLM) -> tuple[Tensor, Tensor]:
    """Our whole gradient in one vector, and theirs, converted in the same way as their weights."""
    mapped = from_labml(
        {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in theirs.named_parameters()},
        max_positions=ours.config.longest_attention,
    )
    pairs = [
        (torch.zeros_like(p) if p.grad is None else p.grad, mapped[name])
        for name, p in ours.named_parameters()
    ]
    return torch.cat([a.flatten() for a, _ in pairs]), torch.cat([b.flatten() for _, b in pairs])
