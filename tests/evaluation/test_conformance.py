"""Each broken memory is found by the check that is for it; tests/models/test_contract.py has good ones."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memformers import CustomMemory, MemorySizes
from memformers.evaluation.conformance import conformance
from tests.models.test_custom import MINE
from tests.processes import run


class Sound(CustomMemory):
    @classmethod
    def memory_sizes(cls, config):
        return [MemorySizes(8, 2, 3)] * config.n_layers

    def grow(self, layer, slots, left, belongs):
        return 0.5 * slots + left.sum(0) * torch.tensor([0.1, 0.2])[:, None, None]


def forward(of_x=lambda x: x, of_memory=lambda memory: memory):
    """A forward pass that changes what it gets."""

    def run(self, x, memory=None, **kwargs):
        return Sound.forward(self, of_x(x), memory and of_memory(memory), **kwargs)

    return {"forward": run}


def grow(change):
    """A memory whose slots are changed."""
    return {"grow": lambda self, layer, *parts: change(Sound.grow(self, layer, *parts), parts)}


class Loses(Sound):
    """A tensor that is not saved with the model."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.scale = torch.rand(12, dtype=torch.float64)

    def forward(self, x, *args, **kwargs):
        return super().forward(x * self.scale, *args, **kwargs)


class Counts(Sound):
    """The calls, outside of the memory."""

    calls = 0

    def forward(self, x, *args, **kwargs):
        self.calls += 1
        return super().forward(x * self.calls, *args, **kwargs)


BROKEN = {
    "Looks ahead": (
        forward(lambda x: x + x.mean(0)), "causality",
        "output before token 1 of a segment changes when token 1 changes"),
    "Leaks a gradient, and no value": (
        forward(lambda x: x + x.mean(0) - x.mean(0).detach()), "causality", "position 0 .* position 5"),
    "Scales what it remembers": (
        forward(of_memory=lambda m: replace(m, mem=tuple(0.5 * x for x in m.mem))), "segments", "one pass"),
    "Mixes the streams": (grow(lambda slots, _: slots.flip(1)), "streams", "the stream alone"),
    "Shows slots of an earlier document": (
        {"visible_past_keys": lambda self, valid, M, C, rate: valid.clamp(0, M) + C},
        "documents",
        "doc_starts",
    ),
    "Loses": (Loses, "saving", "loaded"),
    "Counts": (Counts, "stepping", "token by token"),
}  # fmt: skip
"""What is changed, the check that finds it, and what this says."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_memory_is_found_with_one_sentence(name):
    change, check, sentence = BROKEN[name]
    model = change if isinstance(change, type) else type(name.split()[0], (Sound,), change)
    problem = next(problem for of, _, problem in conformance(model) if of == check)
    assert re.search(sentence, problem)
    assert "\n" not in problem


def test_a_sound_memory_passes_the_six_checks():
    assert [(name, problem) for name, _, problem in conformance(Sound)] == [
        (name, "") for name in ("segments", "documents", "streams", "causality", "stepping", "saving")
    ]


def test_the_command_says_what_each_check_asks_and_which_failed(here):
    shows = "def visible_past_keys(self, valid, M, C, rate): return valid.clamp(0, M) + C"
    Path("mine.py").write_text(f"{MINE}class Mine(Averages):\n    {shows}\n")
    ended = run("check", "mine.py:Mine", "--segment-len", 5, "--decay", 0.5)
    assert ended.says("mine.py:Mine fails 1 of the checks above.")
    assert "ok      causality  No output depends on a later token, nor has a gradient from it." in ended.out
    assert "FAILED  documents  A stream that was reset equals a fresh one" in ended.out
    assert "--decay FLOAT" in run("check", "mine.py:Mine", "--dekay", 2).err
    assert run("check").says("name the memory to check, as in: memformers check my_memory.py:Averages")
