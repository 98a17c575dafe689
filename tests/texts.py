"""Random texts, where documents begin in them, and what a model computes from them."""

import torch

from memformers import LayerMemory, Memory
from memformers.models.rules.base import UpdateContext
from tests.builders import SMALL

EXACT = {"rtol": 0, "atol": 1e-10}


def tokens(T, B=2):
    return torch.randint(0, SMALL.vocab_size, (T, B))


def documents(T, B, *begins):
    """Starts ``[T, B]`` at these pairs of position and stream."""
    doc_starts = torch.zeros(T, B, dtype=torch.bool)
    for position, stream in begins:
        doc_starts[position, stream] = True
    return doc_starts


def read(model, x, doc_starts=None, memory=None, *, lengths=None, through_memory=False):
    """The outputs ``[T, B, ·]`` for ``x [T, B, …]`` in segments, of these ``lengths`` or the model's; each
    segment's auxiliary loss; and the last memory."""
    lengths = lengths or model.config.segment_len
    outputs = []
    losses = []
    for part, starts in zip(x.split(lengths), split_starts(doc_starts, x, lengths), strict=True):
        output, memory, loss = model(part, memory, doc_starts=starts, through_memory=through_memory)
        outputs.append(output)
        losses.append(loss)
    return torch.cat(outputs), losses, memory


def split_starts(doc_starts, x, lengths):
    """The starts of each segment of ``x``; None for each if there are no starts."""
    segments = x.split(lengths)
    if doc_starts is None:
        return [None] * len(segments)
    return doc_starts[: len(x)].split(lengths)


def read_on(reader, text, portion=1):
    """The logits ``[·, B, 11]`` that a reader gives after each ``portion`` of a text."""
    return torch.stack([reader.read(part)[-1] for part in text.split(portion)])


def gradients(lm, loss):
    """Of every parameter of a module, or of those in a list; 0 for what the loss doesn't reach."""
    learning = lm if isinstance(lm, list) else list(lm.parameters())
    return torch.autograd.grad(loss, learning, allow_unused=True, materialize_grads=True, retain_graph=True)


def same(results, expected):
    """Assert that two lists of tensors are equal, to 1e-10."""
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, **EXACT)


def memory_of(mem, slots=None, n_valid=None, **parts):
    """A memory of layers with these ``mem [M, B, D]``, ``slots [C, B, D]`` and other ``parts``, one each."""
    layers = []
    for i, positions in enumerate(mem):
        named = {name: tensors[i] for name, tensors in parts.items()}
        layers.append(LayerMemory(positions, positions[:0] if slots is None else slots[i], **named))
    return Memory(tuple(layers), n_valid)


def updated(rules, memory, inputs, n_valid=None):
    """What ``rules`` that need no layer make of ``memory`` and each layer's ``inputs [S, B, D]``."""
    layers = memory.layers or [LayerMemory.nothing(x) for x in inputs]
    new_layers = []
    for rule, past, x in zip(rules, layers, inputs, strict=True):
        layer, _ = rule.update(past, x, UpdateContext(None, x, n_valid))
        new_layers.append(layer)
    return Memory(tuple(new_layers))


def kept(memory):
    """All tensors ``[·, B, D]`` of a memory."""
    return [x for layer in memory.layers for x in layer.tensors().values()]
