"""Each broken memory is found by the check that is for it; tests/models/test_contract.py has good ones."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memformers import LayerMemory, MemoryRule, MemorySizes, MemoryStack
from memformers.evaluation.conformance import conformance
from memformers.models.memory import cut
from tests.models.test_custom import MINE
from tests.processes import run


class Sound(MemoryRule):
    @classmethod
    def sizes(cls, config):
        return [MemorySizes(8, 2, 3)] * config.n_layers

    def update(self, past, x, context):
        window = self.push(past, x, context)
        if not len(window.evicted):
            return LayerMemory(window.mem, past.slots), None
        written = window.evicted.sum(0) * torch.tensor([0.1, 0.2])[:, None, None]
        return LayerMemory(window.mem, 0.5 * window.slots + written), None


class KeepsDocuments(Sound):
    """Adds up positions wherever documents begin."""

    def update(self, past, x, context):
        n = max(past.mem_len + len(x) - self.mem_len, 0)
        slots = cut((past.mem, x), 0, n).sum(0).expand(2, -1, -1) if n else past.slots
        if past.n_slots and n:
            slots = slots + past.slots
        return LayerMemory(cut((past.mem, x), n), slots), None


class Mixes(Sound):
    """Slots are written into another stream."""

    def update(self, past, x, context):
        memory, _ = super().update(past, x, context)
        return replace(memory, slots=memory.slots.flip(1)), None


def read_by(forward):
    """A memory whose network reads in another way."""
    return type("Sound", (Sound,), {"stack": type("Stack", (MemoryStack,), {"forward": forward})})


def changed(of_x=lambda x: x, of_memory=lambda memory: memory):
    """A memory whose network gets something else than it is given."""

    def forward(self, x, memory=None, **kwargs):
        return MemoryStack.forward(self, of_x(x), memory and of_memory(memory), **kwargs)

    return read_by(forward)


def half_positions(memory):
    layers = tuple(replace(layer, mem=0.5 * layer.mem) for layer in memory.layers)
    return replace(memory, layers=layers)


class Loses(MemoryStack):
    """A tensor that is not saved with the model."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.scale = torch.rand(12, dtype=torch.float64)

    def forward(self, x, *args, **kwargs):
        return super().forward(x * self.scale, *args, **kwargs)


class Counts(MemoryStack):
    """The calls, outside of the memory."""

    calls = 0

    def forward(self, x, *args, **kwargs):
        self.calls += 1
        return super().forward(x * self.calls, *args, **kwargs)


# What is changed, the check that finds it, and what this says.
BROKEN = {
    "looks ahead": (
        changed(lambda x: x + x.mean(0)), "causality",
        "output before token 1 of a segment changes when token 1 changes"),
    "leaks a gradient, and no value": (
        changed(lambda x: x + x.mean(0) - x.mean(0).detach()), "causality", "position 0 .* position 5"),
    "scales what it remembers": (changed(of_memory=half_positions), "segments", "one pass"),
    "mixes the streams": (Mixes, "streams", "the stream alone"),
    "keeps an earlier document": (KeepsDocuments, "documents", "doc_starts"),
    "loses a tensor": (type("Lost", (Sound,), {"stack": Loses}), "saving", "loaded"),
    "counts its calls": (type("Counting", (Sound,), {"stack": Counts}), "stepping", "token by token"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_memory_is_found_with_one_sentence(name):
    model, check, sentence = BROKEN[name]
    problem = next(problem for of, _, problem in conformance(model) if of == check)
    assert re.search(sentence, problem)
    assert "\n" not in problem


def test_a_sound_memory_passes_the_six_checks():
    assert [(name, problem) for name, _, problem in conformance(Sound)] == [
        (name, "") for name in ("segments", "documents", "streams", "causality", "stepping", "saving")
    ]


def test_the_command_says_what_each_check_asks_and_which_failed(here):
    update = """
    def update(self, past, x, context):
        return super().update(past, x, replace(context, n_valid=None))
"""
    Path("mine.py").write_text(f"from dataclasses import replace{MINE}class Mine(Averages):{update}")
    ended = run("check", "mine.py:Mine", "--segment-len", 5, "--decay", 0.5)
    assert ended.says("mine.py:Mine fails 1 of the checks above.")
    assert "ok      causality  No output depends on a later token, nor has a gradient from it." in ended.out
    assert "FAILED  documents  A stream that was reset equals a fresh one" in ended.out
    assert "--decay FLOAT" in run("check", "mine.py:Mine", "--dekay", 2).err
    assert run("check").says("name the memory to check, as in: memformers check my_memory.py:Averages")
