"""A user's memory, named by class, file or module."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from memformers import CompressiveTransformer, CustomMemory, Memory, MemoryLM, MemorySizes, ModelConfig
from memformers.models import registry
from memformers.models.registry import import_path, name_of, register_memory
from tests.builders import SMALL
from tests.texts import documents, read, tokens

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
    def grow(self, layer, slots, evicted, belongs):
        assert len(evicted)
        for x in evicted:
            slots = self.settings.decay * slots + (1 - self.settings.decay) * x
        return slots
class Adds(Averages):
    def __init__(self, config, self_attn, feed_forward):
        super().__init__(config, self_attn, feed_forward)
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
    built_in = {name: kind for name, kind in registry.MODELS.items() if ":" not in name}

    def forget():
        monkeypatch.setattr(registry, "MODELS", dict(built_in))

    forget()
    yield forget
    for name in ("package", "package.module"):
        sys.modules.pop(name, None)


def config_of(**settings):
    return replace(SMALL, **({"model": "compressive"} | settings))


@pytest.mark.parametrize("place", ["mine.py:Averages", "package.module:Averages", "class"])
def test_a_memory_is_named_by_file_module_or_class_saved_and_only_loaded_once_it_is_named(place, forget):
    kind = registry.load_class("mine.py:Averages")
    config = config_of(model=kind if place == "class" else place, memory_config={"decay": 0.5}, mem_len=3)
    lm, text = MemoryLM(config).eval(), tokens(30)
    assert config.model == ("mine.py:Averages" if place == "class" else place)
    assert import_path(registry.MODELS[config.model]).endswith(":Averages")
    lm.save_pretrained("saved")
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
    config = config_of(model="mine.py:Averages", memory_config={"decay": 0.75}, mem_len=3, segment_len=5)
    network, memory, x = MemoryLM(config).transformer, Memory(), torch.randn(20, 2, 12)
    begins = documents(20, 2, (7, 1))
    for part, starts in zip(x.split(5), begins.split(5), strict=True):
        memory, _ = network.remember(memory, [part] * 2, starts, 5)
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


def test_what_a_memory_sets_in_its_constructor_stays():
    lm = MemoryLM(config_of(model="mine.py:Adds"))
    for _ in range(2):
        assert (lm.transformer.map.bias == -3).all()
        lm.reset_parameters()


WRONG = '''
import torch
from dataclasses import dataclass
from memformers import MemorySizes, CustomMemory

class Nothing: ...
class Empty(CustomMemory): ...
class Sized(CustomMemory):
    @classmethod
    def memory_sizes(cls, config): return [MemorySizes(2, 2, 4)] * config.n_layers
class Few(Sized):
    @classmethod
    def memory_sizes(cls, config): return [3]
class Grows(Sized):
    def grow(self, layer, slots, evicted, belongs): return slots.repeat(2, 1, 1)
class Fails(Sized):
    def grow(self, layer, slots, evicted, belongs): return slots + undefined
class Bare(Sized):
    def update_memory(self, memory, inputs, doc_starts): return memory, 0.5
class Silent(Sized):
    def update_memory(self, memory, inputs, doc_starts): ...
class Closed(Sized):
    def __init__(self): super().__init__()
class Longer(Sized):
    def update_memory(self, memory, inputs, doc_starts):
        return type(memory)(tuple(inputs)), inputs[0].new_zeros(())
class Short(Sized):
    def grow(self, layer, slots, evicted, belongs): return slots
    def read(self, x, *args, **kwargs):
        output, inputs = super().read(x, *args, **kwargs)
        return output[1:], inputs
class Swapped(Sized):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.layers[0].shift = None
'''  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "word"),
    [*(({"model": f"wrong.py:{name}"}, word) for name, word in {
        "torch": "does not name a class", "Nothing": "Nothing", "Few": "Few.memory_sizes",
        "Grows": "Grows.grow", "Bare": "Bare.update_memory", "Longer": "Longer.update_memory",
        "Silent": "Silent.update_memory to return a memory and a loss, got NoneType",
        "Closed": "Closed.__init__ must take config", "Empty": "Empty must define memory_sizes",
        "Sized": "defines neither grow", "": "expected a memory as FILE.py:Class",
        "Short": "Short.read"}.items()),
     ({"model": "wrong.py:Swapped", "token_shift": True}, "Swapped.__init__ replaces the layers"),
     ({"model": "gone.py:Mean"}, "gone.py"), ({"model": "no_package.memory:Mean"}, "no_package"),
     ({"model": "broken.py:Mean"}, "SyntaxError"),
     ({"model": "mine.py:Averages", "memory_config": {"dekay": 0.5}}, "dekay"),
     ({"model": "mine.py:Averages", "memory_config": {"decay": "no"}}, "decay"),
     ({"model": "mine.py:Averages", "memory_config": 3}, "Settings"),
     ({"model": "mine.py:Averages", "same_length": True}, "same_length")],
)  # fmt: skip
def test_what_is_no_memory_is_an_error_of_one_line_that_names_it(settings, word):
    Path("wrong.py").write_text(WRONG)
    Path("broken.py").write_text("x = 1\nclass Mean(\n")
    with pytest.raises(ValueError, match=word) as caught:
        read(MemoryLM(config_of(**settings)), tokens(28))
    assert "\n" not in str(caught.value)


def test_what_fails_in_the_users_code_goes_through():
    Path("wrong.py").write_text(WRONG)
    with pytest.raises(NameError):
        read(MemoryLM(config_of(model="wrong.py:Fails")), tokens(28))


def test_grow_gets_all_slots_also_after_a_growing_memory_has_cut_them():
    class Counts(CustomMemory):
        @classmethod
        def memory_sizes(cls, config):
            return [MemorySizes(2, 4, 8)] * config.n_layers

        def grow(self, layer, slots, evicted, belongs):
            return slots + 1

    stack, x = MemoryLM(config_of(model=Counts)).transformer, torch.randn(4, 2, 12)
    memory = stack(x)[1]
    short = replace(memory, c_mem=tuple(slots[-2:] for slots in memory.c_mem))
    assert stack(x, short)[1].c_mem[0][:, 0, 0].tolist() == [1, 1, 2, 2]


def frozen(name, **default):
    return dataclass(frozen=True)(type("C", (), {"__annotations__": {name: object}, **default}))


@pytest.mark.parametrize(
    ("body", "word"),
    [({"uses": ("heads",)}, "heads"), ({"Config": type("Config", (), {"decay": 0.9})}, "frozen"),
     ({"Config": frozen("dtype", dtype=torch.float32)}, "dtype"),
     ({"Config": frozen("heads", heads=2)}, "heads"), ({"Config": frozen("decay")}, "default"),
     ({"memory_sizes": lambda self, config: []}, "class method")],
)  # fmt: skip
def test_settings_that_a_memory_can_not_have_are_refused_when_it_is_defined(body, word):
    with pytest.raises(ValueError, match=f"Mine.*{word}"):
        type("Mine", (CustomMemory,), body)


def test_two_classes_of_one_name_are_told_apart():
    Path("other").mkdir()
    Path("other/mine.py").write_text(MINE)
    assert name_of("mine.py:Averages") == name_of(f"{Path.cwd()}/mine.py:Averages") == "mine.py:Averages"
    with pytest.raises(ValueError, match="the same name"):
        name_of("other/mine.py:Averages")
    with pytest.raises(ValueError, match="CustomMemory"):
        register_memory(nn.Linear)
    assert ModelConfig(model=CompressiveTransformer, bptt=1) == ModelConfig(model="compressive", bptt=1)
    assert ModelConfig(model=register_memory(registry.load_class("package.module:Averages"))).mem_len == 64
