"""What every memory must satisfy: ours does, and each broken one is found by the check that is for it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memformers import CustomMemory, MemorySizes
from memformers.evaluation.conformance import assert_conforms, conformance
from tests.builders import MODELS
from tests.processes import run

MEMORIES = Path(__file__).parents[2] / "experiments" / "memories"


OWN = ("averages.py:Averages", "infini.py:InfiniAttention", "memory_tokens.py:MemoryTokens")


@pytest.mark.parametrize("model", [*MODELS, *(f"{MEMORIES}/{name}" for name in OWN)])
def test_a_memory_that_keeps_its_promises_passes(model):
    assert_conforms(model)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("transformer-xl", {"same_length": True, "positions": "learned"}),
        ("transformer-xl", {"mem_len": (0, 7), "norm": "post"}),
        ("compressive", {"compression": "dilated", "gate": "gru"}),
        ("compressive", {"compression": "most-used", "compression_rate": 3}),
        ("compressive", {"compression_loss": "auto-encoding", "c_mem_len": (0, 6)}),
        ("compressive", {"compression_loss": "none", "bptt": 2, "dropout": 0.5}),
        (f"{MEMORIES}/averages.py:Averages", {"own": {"decay": 0.5}, "segment_len": 5, "mem_len": 3}),
        (
            f"{MEMORIES}/memory_tokens.py:MemoryTokens",
            {"own": {"tokens_of_memory": 3}, "positions": "learned"},
        ),
    ],
)
def test_it_passes_with_other_settings_too(model, settings):
    assert_conforms(model, **settings)


class Sound(CustomMemory):
    @classmethod
    def memory_sizes(cls, config):
        return [MemorySizes(8, 2, 3)] * config.n_layers

    def grow(self, layer, slots, left, belongs):
        return 0.5 * slots + left.sum(0) * torch.tensor([0.1, 0.2])[:, None, None]


class Looks(Sound):
    """Ahead."""

    def forward(self, x, *args, **kwargs):
        return super().forward(x + x.mean(0), *args, **kwargs)


class Leaks(Sound):
    """A gradient from later tokens, and no value."""

    def forward(self, x, *args, **kwargs):
        return super().forward(x + x.mean(0) - x.mean(0).detach(), *args, **kwargs)


class Reads(Sound):
    """More keys than it declares."""

    def forward(self, x, memory=None, **kwargs):
        memory = memory and replace(memory, c_mem=tuple(torch.cat([one, one]) for one in memory.c_mem))
        return super().forward(x, memory, **kwargs)


class Works(Sound):
    """More than it declares."""

    def grow(self, layer, slots, left, belongs):
        return super().grow(layer, slots, left @ torch.eye(12, dtype=left.dtype), belongs)


class Scales(Sound):
    """What it remembers."""

    def forward(self, x, memory=None, **kwargs):
        memory = memory and replace(memory, mem=tuple(0.5 * one for one in memory.mem))
        return super().forward(x, memory, **kwargs)


class Mixes(Sound):
    """The streams of a batch."""

    def grow(self, layer, slots, left, belongs):
        return super().grow(layer, slots, left, belongs).flip(1)


class Shows(Sound):
    """Slots of an earlier document, which are zeros."""

    def keys_seen(self, valid, mem_len, c_mem_len, rate):
        return valid.clamp(0, mem_len) + c_mem_len


class Hides(Sound):
    """The slots that it keeps."""

    def forward(self, x, memory=None, **kwargs):
        return super().forward(x, memory and replace(memory, c_mem=()), **kwargs)


class Forgets(Sound):
    """More than it declares."""

    def update_memory(self, memory, inputs, sizes, doc_starts):
        return super().update_memory(memory, inputs, [MemorySizes(7, 2, 3)] * 2, doc_starts)


class Grows(Sound):
    def grow(self, layer, slots, left, belongs):
        return torch.cat([slots, left])


class Loses(Sound):
    """A tensor that is not saved with the model."""

    def __init__(self, config, parts):
        super().__init__(config, parts)
        self.scale = torch.rand(12, dtype=torch.float64)

    def forward(self, x, *args, **kwargs):
        return super().forward(x * self.scale, *args, **kwargs)


class Counts(Sound):
    """The calls, outside of the memory."""

    calls = 0

    def forward(self, x, *args, **kwargs):
        self.calls += 1
        return super().forward(x * self.calls, *args, **kwargs)


class Idles(Sound):
    """A parameter that nothing uses."""

    def __init__(self, config, parts):
        super().__init__(config, parts)
        self.rate = torch.nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("model", "check", "sentence"),
    [
        (Looks, "causality", "the output before token 1 of a segment, when that token is another one,"),
        (
            Leaks,
            "causality",
            "the output at position 0 of a segment has a gradient from the input at position 5",
        ),
        (Reads, "cost", "attention gets 6 queries and 18 keys, 6 queries and 18 keys, declared are 6"),
        (Works, "cost", "beside attention, a token takes 576 operations to read and write the memory"),
        (Scales, "segments", "a text read in segments differs from the same text in one pass by up to"),
        (Mixes, "streams", "a stream in a batch differs from the stream alone by up to"),
        (Shows, "documents", "a stream after doc_starts differs from a fresh stream by up to"),
        (Hides, "keys", "slot 0 of layer 0 changes no output of the next segment."),
        (Forgets, "keys", "layer 0 remembers 7 positions and 2 slots, but memory_sizes declares 8 and 2."),
        (Grows, "size", "Grows.grow returned [6, 2, 12], expected a tensor [2, 2, 12]."),
        (Loses, "saving", "a model that was loaded differs from the saved one by up to"),
        (Counts, "stepping", "a text read token by token differs from the same text in segments by up to"),
        (Idles, "gradients", "transformer.rate [3] gets no gradient from any loss."),
    ],
)
def test_a_broken_memory_is_found_with_one_sentence(model, check, sentence):
    said = next(said for name, _, said in conformance(model) if name == check)
    assert sentence in said
    assert "\n" not in said


def test_the_command_says_what_each_check_asks_and_which_failed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from memformers import MemorySizes, CustomMemory\n"
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Settings:\n"
        "    start: float = 0.5\n"
        "class Mine(CustomMemory):\n"
        "    Config = Settings\n"
        "    @classmethod\n"
        "    def memory_sizes(cls, config): return [MemorySizes(4, 1, 2)] * config.n_layers\n"
        "    def update_memory(self, memory, inputs, sizes, doc_starts):\n"
        "        return super().update_memory(memory, inputs, sizes, None)\n"
        "    def grow(self, layer, slots, left, belongs): return self.settings.start * slots + left.sum(0)\n"
    )
    ended = run("check", "mine.py:Mine", "--segment-len", 5, "--start", 2)
    assert ended.said("mine.py:Mine fails 1 of the checks above.")
    assert "ok      causality  No output depends on a later token, nor has a gradient from it." in ended.out
    assert "FAILED  documents  A stream that was reset equals a fresh one" in ended.out
    assert "--start FLOAT" in run("check", "mine.py:Mine", "--stort", 2).err
    assert run("check").said("name the memory to check, as in: memformers check my_memory.py:Averages")
