"""The attention of one word of a passage, drawn over its text."""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from docs.building.pictures import WIDTH, legend, picture, words
from memformers.convert.load import load_packaged
from memformers.models.base import keys_by_head
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory

MODEL = "compressive-shakespeare"
# Shakespeare, Romeo and Juliet, act 1, scene 5.
PASSAGE = """For saints have hands that pilgrims' hands do touch,
And palm to palm is holy palmers' kiss.

ROMEO:
Have not saints lips, and holy palmers too?

JULIET:
Ay, pilgrim, lips that they must use in prayer.

ROMEO:
O, then, dear saint, let lips"""
WORD = "lips"
"""The last word of the passage, whose attention is drawn."""
SEGMENT = 12
"""The number of characters of the segment that the word ends."""


@torch.no_grad()
def attention_of_the_word() -> list[tuple[int, int, str, float]]:
    """For each key of the word's last layer: the first of its characters, the one after its last, where they
    are, and the mean attention of the heads and of the word's characters."""
    model, tokenizer = load_packaged(MODEL, torch.device("cpu"))
    tokens = torch.as_tensor(tokenizer.encode(PASSAGE))[:, None]
    before, config = len(tokens) - SEGMENT, model.config
    memory, inputs = Memory(()), list[Tensor]()
    lengths = [before % config.segment_len, *[config.segment_len] * (before // config.segment_len), SEGMENT]
    for part in tokens.split(lengths):
        if inputs:
            memory, _ = model.transformer.remember(memory, inputs, config.memory_sizes)
        _, inputs = model.transformer(model.embed(part), memory, sizes=config.memory_sizes)
    *_, (C, M, attention) = attention_of_layers(model, inputs, memory)
    weights = attention[0, :, -len(WORD) :].mean((0, 1)).tolist()
    places = ["slots"] * C + ["memory"] * M + ["segment"] * SEGMENT
    rate = config.memory_sizes[-1].compression_rate
    widths = [rate if place == "slots" else 1 for place in places]
    ends = [*accumulate(widths, initial=len(tokens) - sum(widths))]
    return [
        (first, end, place, weight)
        for (first, end), place, weight in zip(pairwise(ends), places, weights, strict=True)
    ]


def attention_of_layers(
    model: MemoryLM, inputs: list[Tensor], memory: Memory
) -> Iterator[tuple[int, int, Tensor]]:
    """C, M and the attention ``[B, H, S, K]`` of each layer to a segment, whose layers have these ``inputs
    [S, B, D]``, and to the ``memory`` before it."""
    sizes, S = model.config.memory_sizes, len(inputs[0])
    key_start = model.transformer.first_seen(inputs[0], memory, None, sizes)
    reads, lengths = keys_by_head(memory, sizes, len(inputs)), memory.lengths(len(inputs))
    for i, layer in enumerate(model.transformer.memory_layers):
        M, C = lengths[i]
        past = [of_layers[i] for of_layers in (memory.c_mem, memory.mem) if of_layers]
        context = layer.attention_input(torch.cat((*past, inputs[i])))  # [K, B, D]
        bounds: dict[str, Any] = {"key_start": key_start[i], "reads": reads[i]}
        yield C, M, layer.self_attn.probabilities(query=context[-S:], key=context, **bounds)


def attention_map() -> str:
    """The passage; behind each character is the colour of its place, and the stronger, the more attention."""
    keys = attention_of_the_word()
    left, top, pitch, line = 24, 62, 8.4, 25
    place_of, row, column = [], 0, 0
    for character in PASSAGE:
        place_of.append((left + pitch * column, top + line * row))
        row, column = (row + 1, 0) if character == "\n" else (row, column + 1)
    most = max(weight for *_, weight in keys)
    drawn = [words(16, 30, f"What the last word, \u201c{WORD}\u201d, looks at", "ink large")]
    drawn.append(words(WIDTH - 16, 30, "the stronger, the more attention", "faint end"))
    for first, end, kind, weight in keys:
        for x, y in (place_of[i] for i in range(max(first, 0), end) if PASSAGE[i] != "\n"):
            shade = 0.08 + 0.72 * (weight / most) ** 0.5
            drawn.append(
                f'<rect x="{x:.1f}" y="{y - 16:g}" width="{pitch:g}" height="21" class="{kind}" '
                f'opacity="{shade:.2f}"/>'
            )
    for number, text in enumerate(PASSAGE.split("\n")):
        if text:
            said = words(left, top + line * number, text, "mono ink")
            drawn.append(said.replace(" class", f' textLength="{pitch * len(text):.1f}" class', 1))
    x, y = place_of[len(PASSAGE) - len(WORD)]
    drawn.append(
        f'<rect x="{x:.1f}" y="{y - 16:g}" width="{pitch * len(WORD):.1f}" height="21" rx="2" class="line"/>'
    )
    y = top + line * (row + 1)
    shares = {kind: sum(w for *_, k, w in keys if k == kind) for kind in ("segment", "memory", "slots")}
    meaning = [
        (16, "segment", f"segment, read now: {100 * shares['segment']:.0f} %"),
        (222, "memory", f"positions, kept exactly: {100 * shares['memory']:.0f} %"),
        (462, "slots", f"slots of {keys[0][1] - keys[0][0]} characters: {100 * shares['slots']:.0f} %"),
    ]
    drawn += legend(y, meaning)
    said = f"Mean of the heads of the last layer of {MODEL}. What has no colour is forgotten."
    drawn.append(words(16, y + 40, said, "faint small"))
    about = "Its attention: " + "; ".join(said for *_, said in meaning) + "."
    css = ".mono{font:14px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre}"
    return picture(int(y + 56), f"The attention of the word {WORD}", about, drawn, css)
