"""Random texts, where documents begin in them, and what a model computes from them."""

import torch

from tests.builders import SMALL

EXACT = {"rtol": 0, "atol": 1e-10}
BY_LAYER = {"mem_len": (6, 4), "c_mem_len": (4, 3), "compression_rate": (3, 2)}
"""Lengths of two layers."""


def tokens(T, B=2):
    return torch.randint(0, SMALL.vocab_size, (T, B))


def documents(T, B, *begins):
    """Starts ``[T, B]`` at these pairs of position and stream."""
    doc_starts = torch.zeros(T, B, dtype=torch.bool)
    for position, stream in begins:
        doc_starts[position, stream] = True
    return doc_starts


def read(lm, text, doc_starts=None, memory=None, begin=0):
    """The logits ``[T, B, 11]`` of a text read in segments, of which the first ends as if ``begin`` tokens of
    it were missing; each segment's auxiliary loss; and the last memory."""
    logits, losses, at = [], [], 0
    while at < len(text):
        end = at + lm.config.segment_len - (begin if at == 0 else 0)
        output = lm(text[at:end], memory, doc_starts=None if doc_starts is None else doc_starts[at:end])
        memory = output.memory
        logits.append(output.logits)
        losses.append(output.auxiliary_loss)
        at = end
    return torch.cat(logits), losses, memory


def read_on(reader, text, doc_starts=None, portion=1):
    """The logits ``[·, B, 11]`` that a reader gives after each ``portion`` of a text."""
    parts = text.split(portion)
    starts = [None] * len(parts) if doc_starts is None else doc_starts.split(portion)
    return torch.stack([reader.read(*part)[-1] for part in zip(parts, starts, strict=True)])


def after_whole_segments(lm, text, doc_starts=None, memory=None):
    """The memory after those of a text's segments that are whole."""
    whole = len(text) - len(text) % lm.config.segment_len
    return read(lm, text[:whole], doc_starts, memory)[2] if whole else memory


def gradients(lm, loss):
    """Of every parameter of a module, or of those in a list; 0 for what the loss doesn't reach."""
    learning = lm if isinstance(lm, list) else list(lm.parameters())
    return torch.autograd.grad(loss, learning, allow_unused=True, materialize_grads=True, retain_graph=True)


def same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def kept(memory):
    """All tensors ``[·, B, D]`` of a memory."""
    return [x for tensors in memory.parts.values() for x in tensors]
