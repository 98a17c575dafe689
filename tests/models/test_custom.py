"""Memories and parts of one's own, named by class, file or module, and their weights."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from memformers import CompressiveTransformer, CustomMemory, Memory, MemoryLM, ModelConfig
from memformers.common.files import read_json, write_json
from memformers.evaluation.conformance import assert_conforms
from memformers.models import registry
from memformers.models.registry import name_of, places, register_memory
from tests.builders import SMALL
from tests.texts import documents, read, tokens

OWN = {"gate": "mine.py:Gate", "compression": "mine.py:Gated", "compression_loss": "mine.py:Loss"}
MINE = """
from dataclasses import dataclass
import torch
from torch import nn
from memformers import CustomMemory, MemorySizes
@dataclass(frozen=True)
class Settings:
    decay: float = 0.9
class Averages(CustomMemory):
    Config = Settings
    @classmethod
    def memory_sizes(cls, config):
        return [MemorySizes(M, 1, 40) for M in config.per_layer("mem_len")]
    def grow(self, layer, slots, left, belongs):
        assert len(left)
        for x in left:
            slots = self.settings.decay * slots + (1 - self.settings.decay) * x
        return slots
class Gate(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.map = nn.Linear(2 * d_model, d_model)
        nn.init.constant_(self.map.bias, -3.0)
    def forward(self, x, y):
        return x + self.map(torch.cat([x, y], -1)).sigmoid() * y
class Last(Gate):
    def reset_parameters(self):
        nn.init.constant_(self.map.bias, -5.0)
class Gated(nn.Module):
    def __init__(self, rate, d_model):
        super().__init__()
        self.rate, self.weigh = rate, nn.Linear(d_model, 1)
        nn.init.constant_(self.weigh.bias, -3.0)
    def forward(self, mem):
        positions = mem.unflatten(0, (-1, self.rate))
        return (self.weigh(positions).softmax(1) * positions).sum(1)
class Loss(nn.Module):
    def __init__(self, rate, d_model):
        super().__init__()
        self.map = nn.Linear(d_model, d_model)
        nn.init.constant_(self.map.bias, -3.0)
    def forward(self, mem, c_mem, attend):
        return (self.map(attend(c_mem).mean() + c_mem).mean() - attend(mem).mean()).square()
class Adds(Averages):
    def __init__(self, config, parts):
        super().__init__(config, parts)
        self.map = nn.Linear(12, 12)
        nn.init.constant_(self.map.bias, -3.0)
"""


@pytest.fixture(autouse=True)
def forget(monkeypatch, tmp_path):
    """What forgets which classes were named, as another process does; nothing is named in other tests."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    Path("package").mkdir()
    Path("package/module.py").write_text(MINE)
    built_in = {key: kind for key, kind in registry.REGISTRY.items() if ":" not in key[1]}

    def forget():
        monkeypatch.setattr(registry, "REGISTRY", dict(built_in))

    forget()
    yield forget
    for name in ("package", "package.module"):
        sys.modules.pop(name, None)


def config_of(**settings):
    return replace(SMALL, **({"model": "compressive"} | settings))


@pytest.mark.parametrize("place", ["mine.py:Averages", "package.module:Averages", "class"])
def test_a_memory_is_named_by_file_module_or_class_saved_and_only_loaded_once_it_is_named(place, forget):
    kind = registry.load_class("mine.py:Averages")
    config = config_of(model=kind if place == "class" else place, own={"decay": 0.5}, mem_len=3)
    lm, text = MemoryLM(config).eval(), tokens(30)
    assert config.model == ("mine.py:Averages" if place == "class" else place)
    assert places({"model": config.model, "gate": "gru"})[0].startswith("model=")
    lm.save_pretrained("saved")
    # As an earlier version wrote it, with checksums of the files that define the model.
    write_json(Path("saved/config.json"), read_json(Path("saved/config.json")) | {"code": {"mine.py": "0"}})
    forget()
    with pytest.raises(ValueError, match="only if you name it"):
        MemoryLM.from_pretrained("saved")
    loaded = MemoryLM.from_pretrained("saved", model=type(lm.transformer))
    assert loaded.config == config
    assert torch.equal(read(loaded, text)[0], read(lm, text)[0])
    forget()
    if place != "class":
        assert MemoryLM.from_pretrained("saved", model=place).config.memory_config.decay == 0.5


def test_the_slot_is_what_its_formula_says_in_each_document():
    config = config_of(model="mine.py:Averages", own={"decay": 0.75}, mem_len=3, segment_len=5)
    network, memory, x = MemoryLM(config).transformer, None, torch.randn(20, 2, 12)
    begins = documents(20, 2, (7, 1))
    for part, starts in zip(x.split(5), begins.split(5), strict=True):
        memory, _ = network.remember(memory, [part] * 2, config.memory_sizes, starts)
    for stream, begin in ((0, 0), (1, 7)):
        average = torch.zeros(12)
        for one in x[begin:17, stream]:
            average = 0.75 * average + 0.25 * one
        torch.testing.assert_close(memory.c_mem[1][0, stream], average)
    assert torch.equal(memory.mem[0], x[17:])
    empty = Memory.empty(replace(config, mem_len=30), 2)  # less than the rate of 40; nothing leaves
    assert empty.mem_len == 30
    assert MemoryLM(replace(config, mem_len=30))(tokens(5), empty).memory.mem_len == 30
    assert MemoryLM(replace(config, mem_len=30))(tokens(5)).memory.c_mem == ()


def test_a_model_with_parts_of_ones_own_keeps_what_every_memory_promises(forget):
    assert_conforms("compressive", **OWN)
    lm = MemoryLM(config_of(**OWN)).eval()
    lm.save_pretrained("saved")
    layer, loss = lm.transformer.layers[0], lm.transformer.own_losses[0]
    kinds = {"gate": type(layer.gate_ff), "compression": type(layer.compress), "compression_loss": type(loss)}
    forget()
    for named in ({}, {"gate": kinds["gate"]}):
        with pytest.raises(ValueError, match="only if you name it"):
            MemoryLM.from_pretrained("saved", **named)
    text = tokens(35)
    for named in (kinds, OWN):
        forget()
        assert torch.equal(read(MemoryLM.from_pretrained("saved", **named), text)[0], read(lm, text)[0])
    forget()
    assert config_of(**kinds) == lm.config


def test_what_a_part_or_memory_of_ones_own_sets_in_its_constructor_stays_in_every_layer():
    lm = MemoryLM(config_of(**OWN))
    for _ in range(2):
        biases = [p for n, p in lm.transformer.named_parameters() if ".map.bias" in n or "weigh.bias" in n]
        assert len(biases) == 2 * (2 + 1 + 1)  # two gates, a compression and a loss a layer
        assert all((bias == -3).all() for bias in biases)
        assert (MemoryLM(config_of(model="mine.py:Adds")).transformer.map.bias == -3).all()
        first, second = (layer.gate_ff.map.weight for layer in lm.transformer.layers)
        assert not torch.equal(first, second)
        lm.reset_parameters()
    lm = MemoryLM(config_of(gate="mine.py:Last"))
    assert all((p == -5).all() for n, p in lm.named_parameters() if "map.bias" in n)


WRONG = '''
import torch
from dataclasses import dataclass
from torch import nn
from memformers import MemorySizes, CustomMemory

def plain(*given): ...
class Nothing: ...
class Empty(CustomMemory): ...
class Sized(CustomMemory):
    @classmethod
    def memory_sizes(cls, config): return [MemorySizes(2, 2, 4)] * config.n_layers
class Negative(Sized):
    @classmethod
    def memory_sizes(cls, config): return [MemorySizes(-2)] * config.n_layers
class Few(Sized):
    @classmethod
    def memory_sizes(cls, config): return [3]
class Grows(Sized):
    def grow(self, layer, slots, left, belongs): return slots.repeat(2, 1, 1)
class Fails(Sized):
    def grow(self, layer, slots, left, belongs): return slots + undefined
class Bare(Sized):
    def update_memory(self, memory, inputs, sizes, doc_starts): return memory, 0.5
class Longer(Sized):
    def update_memory(self, memory, inputs, sizes, doc_starts):
        return type(memory)(tuple(inputs)), inputs[0].new_zeros(())
class Short(Sized):
    def forward(self, x, *args, **kwargs):
        output, inputs = super().forward(x, *args, **kwargs)
        return output[1:], inputs
class NoInit(Sized):
    def __init__(self, config, parts): ...
class Two(nn.Module):
    def __init__(self, *sizes): super().__init__()
    def forward(self, x, *others): return x[1:]
'''  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "word"),
    [*(({"model": f"wrong.py:{name}"}, word) for name, word in {
        "plain": "is no class", "Nothing": "Nothing", "Negative": "mem_len=-2",
        "Few": "Few.memory_sizes", "Grows": "Grows.grow",
        "Bare": "Bare.update_memory", "Longer": "Longer.update_memory", "Short": "Short.forward",
        "NoInit": "NoInit.__init__"}.items()),
     ({"model": "gone.py:Mean"}, "gone.py"), ({"model": "no_package.memory:Mean"}, "no_package"),
     ({"model": "broken.py:Mean"}, "SyntaxError"), ({"gate": "gone.py:Gate"}, "gone.py"),
     ({"gate": "grru"}, "grru"), ({"gate": "wrong.py:Two"}, "Two.forward"),
     ({"gate": "wrong.py:Two", "norm": "post"}, "norm"),
     ({"compression": "wrong.py:Two"}, "Two.forward"),
     ({"compression_loss": "wrong.py:Two"}, "Two.forward"),
     ({"model": "transformer-xl", "compression": "wrong.py:Two"}, "compressive"),
     ({"compression": "wrong.py:Two", "compression_start": "mean"}, "own weights"),
     ({"compression": "wrong.py:Two", "bptt": 1, "segment_len": 5}, "whole slots"),
     ({"model": "mine.py:Averages", "own": {"dekay": 0.5}}, "dekay"),
     ({"model": "mine.py:Averages", "own": {"decay": "no"}}, "decay"),
     ({"model": "mine.py:Averages", "own": 3}, "Settings"),
     ({"model": "mine.py:Averages", "same_length": True}, "same_length")],
)  # fmt: skip
def test_what_is_no_memory_or_part_is_an_error_of_one_line_that_names_it(settings, word):
    Path("wrong.py").write_text(WRONG)
    Path("broken.py").write_text("x = 1\nclass Mean(\n")
    with pytest.raises(ValueError, match=word) as caught:
        read(MemoryLM(config_of(**settings)), tokens(28))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Empty", "Sized", "Fails"])
def test_what_is_not_defined_or_fails_in_the_users_code_goes_through(name):
    Path("wrong.py").write_text(WRONG)
    with pytest.raises((NotImplementedError, NameError)):
        read(MemoryLM(config_of(model=f"wrong.py:{name}")), tokens(28))


def frozen(name, **default):
    return dataclass(frozen=True)(type("C", (), {"__annotations__": {name: object}, **default}))


@pytest.mark.parametrize(
    ("body", "word"),
    [({"uses": ("heads",)}, "heads"), ({"Config": type("Config", (), {"decay": 0.9})}, "frozen"),
     ({"Config": frozen("dtype", dtype=torch.float32)}, "dtype"),
     ({"Config": frozen("heads", heads=2)}, "heads"), ({"Config": frozen("decay")}, "default")],
)  # fmt: skip
def test_settings_that_a_memory_can_not_have_are_refused_when_it_is_defined(body, word):
    with pytest.raises(ValueError, match=f"Mine.*{word}"):
        type("Mine", (CustomMemory,), body)


def test_two_classes_of_one_name_are_told_apart():
    Path("other").mkdir()
    Path("other/mine.py").write_text(MINE)
    assert name_of("mine.py:Averages") == name_of(f"{Path.cwd()}/mine.py:Averages") == "mine.py:Averages"
    with pytest.raises(ValueError, match="one name"):
        name_of("other/mine.py:Averages")
    with pytest.raises(ValueError, match="CustomMemory"):
        register_memory(nn.Linear)
    assert registry.lookup("compressive") is CompressiveTransformer
    assert ModelConfig(model=register_memory(registry.load_class("package.module:Averages"))).mem_len == 64
