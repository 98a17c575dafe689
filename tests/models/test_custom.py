"""A user's memory, named by class, file or module."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from memformers import CompressiveRule, LayerMemory, Memory, MemoryLM, MemoryRule, ModelConfig, Stepper
from memformers.models import registry
from memformers.models.config import applies_to
from memformers.models.registry import import_path, register_memory, register_model
from tests.builders import SMALL
from tests.texts import documents, read, tokens

MINE = """
from dataclasses import dataclass
from torch import nn
from memformers import CompressiveRule, LayerMemory, MemoryRule
@dataclass(frozen=True)
class Settings:
    decay: float = 0.9
class Averages(MemoryRule):
    Config = Settings
    n_slots = 1
    def update(self, past, x, context):
        window = self.push(past, x, context)
        slot = window.slots
        for evicted in window.evicted:
            slot = self.settings.decay * slot + (1 - self.settings.decay) * evicted
        return LayerMemory(window.mem, slot), None
class Adds(Averages):
    def __init__(self, size, settings):
        super().__init__(size, settings)
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
def test_a_memory_is_loaded_only_once_it_is_named(place, forget):
    kind = registry.load_class("mine.py:Averages")
    config = config_of(model=kind if place == "class" else place, memory_config={"decay": 0.5}, mem_len=3)
    lm = MemoryLM(config).eval()
    text = tokens(30)
    assert config.model == ("mine.py:Averages" if place == "class" else place)
    assert import_path(registry.MODELS[config.model]).endswith(":Averages")
    lm.save_pretrained("saved")
    forget()
    with pytest.raises(ValueError, match="only if you name it"):
        MemoryLM.from_pretrained("saved")
    loaded = MemoryLM.from_pretrained("saved", model=type(lm.transformer.rules[0]))
    assert loaded.config == config
    assert torch.equal(read(loaded, text)[0], read(lm, text)[0])
    forget()
    if place != "class":
        assert MemoryLM.from_pretrained("saved", model=place).config.memory_config.decay == 0.5


def test_the_slot_is_what_its_formula_says_in_each_document():
    config = config_of(model="mine.py:Averages", memory_config={"decay": 0.75}, mem_len=3, segment_len=5)
    network = MemoryLM(config).transformer
    memory = Memory()
    x = torch.randn(20, 2, 12)
    begins = documents(20, 2, (7, 1))
    for part, starts in zip(x.split(5), begins.split(5), strict=True):
        memory = network.remember(memory.reset(starts[0]), [part] * 2, starts, 5)
    for stream, begin in ((0, 0), (1, 7)):
        average = torch.zeros(12)
        for one in x[begin:17, stream]:
            average = 0.75 * average + 0.25 * one
        torch.testing.assert_close(memory.layers[1].slots[0, stream], average)
    assert torch.equal(memory.layers[0].mem, x[17:])
    config = replace(config, mem_len=30, compression_rate=40)  # nothing leaves
    empty = Memory.empty(config, 2)
    assert empty.mem_len == 30
    assert MemoryLM(config)(tokens(5), empty).memory.mem_len == 30
    assert MemoryLM(config)(tokens(5)).memory.n_slots == 0


def test_what_a_memory_sets_in_its_constructor_stays():
    lm = MemoryLM(config_of(model="mine.py:Adds"))
    for _ in range(2):
        assert all((rule.map.bias == -3).all() for rule in lm.transformer.rules)
        lm.reset_parameters()


WRONG = '''
import torch
from dataclasses import replace
from memformers import CompressiveRule, LayerMemory, MemoryRule, MemorySizes, MemoryStack

class Nothing: ...
class Empty(MemoryRule): ...
class Few(MemoryRule):
    @classmethod
    def sizes(cls, config): return [3]
class Grows(MemoryRule):
    def update(self, past, x, context): return LayerMemory(torch.cat((past.mem, x)), x[:0]), None
class Slots(MemoryRule):
    def update(self, past, x, context): return LayerMemory(x[:0], torch.cat((past.slots, x))), None
class Fails(MemoryRule):
    def update(self, past, x, context): return past + undefined, None
class Bare(MemoryRule):
    def update(self, past, x, context): return past, 0.5
class Silent(MemoryRule):
    def update(self, past, x, context): ...
class Gone(MemoryRule):
    def update(self, past, x, context): return LayerMemory(None, x[:0]), None
class Listed(MemoryRule):
    def update(self, past, x, context): return LayerMemory(x[:0], x[:0], state=[x]), None
class Plain(MemoryRule):
    def update(self, past, x, context): return x, None
class Closed(MemoryRule):
    def __init__(self): super().__init__()
'''  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "word"),
    [*(({"model": f"wrong.py:{name}"}, word) for name, word in {
        "torch": "does not name a class", "Nothing": "Nothing", "Few": "Few.sizes to return 2 MemorySizes",
        "Grows": r"mem from Grows.update has length \d+, where this model keeps at most 5",
        "Slots": "slots from Slots.update has length 7, where this model keeps at most 4",
        "Gone": "expected mem from Gone.update as a torch.Tensor, got None",
        "Listed": "the state from Listed.update as a dict of tensors, got list",
        "Bare": "Bare.update returned 0.5", "Plain": "a LayerMemory from Plain.update, got a Tensor",
        "Silent": "Silent.update to return a LayerMemory and a loss or None, got NoneType",
        "Closed": r"Closed.__init__ must take \(size, settings\)", "Empty": "Empty must define update",
        "": "expected a memory as FILE.py:Class"}.items()),
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


def test_a_rule_gets_all_slots_also_of_a_memory_that_has_fewer():
    class Counts(MemoryRule):
        def update(self, past, x, context):
            window = self.push(past, x, context)
            return LayerMemory(window.mem, window.slots + 1), None

    stack = MemoryLM(config_of(model=Counts, mem_len=2, c_mem_len=4)).transformer
    x = torch.randn(4, 2, 12)
    memory = stack(x)[1]
    layers = tuple(replace(layer, slots=layer.slots[-2:]) for layer in memory.layers)
    slots = stack(x, Memory(layers))[1].layers[0].slots
    assert slots[:, 0, 0].tolist() == [1, 1, 2, 2]


def test_lengths_that_change_nothing_are_refused_by_the_command():
    """Whether a memory uses them is seen from its sizes."""
    assert applies_to("mem_len", register_model("mine.py:Averages"))
    assert not applies_to("c_mem_len", register_model("mine.py:Averages"))
    assert not applies_to("memory_warmup", register_model("mine.py:Averages"))


class Appends(MemoryRule):
    """Keeps what left the newest, after slots that ``push`` fills up with zeros."""

    append_only = True

    def update(self, past, x, context):
        window = self.push(past, x, context)
        slots = torch.cat((window.slots, window.evicted)) if len(window.evicted) else past.slots
        return LayerMemory(window.mem, slots[max(len(slots) - self.c_mem_len, 0) :]), None


class AppendsPositions(Appends):
    """The same, which says that each slot is one position."""

    @classmethod
    def sizes(cls, config):
        return [replace(size, slot_positions=1) for size in super().sizes(config)]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rule", [Appends, AppendsPositions])
@pytest.mark.parametrize("c_mem_len", [4, 12, 16])
def test_an_append_only_rule_is_stepped_as_it_is_read(rule, c_mem_len):
    """Also with more slots than a segment makes, where documents begin."""
    lm = MemoryLM(config_of(model=rule, c_mem_len=c_mem_len)).eval()
    text = tokens(42)
    starts = torch.rand(42, 2) < 0.1
    wanted = read(lm, text, starts)[0]
    stepper = Stepper(lm, 2)
    steps = [stepper.step(token, start) for token, start in zip(text, starts, strict=True)]
    torch.testing.assert_close(torch.stack(steps), wanted, rtol=0, atol=1e-10)


def test_a_rules_own_state_is_cleared_where_a_document_starts():
    class Sums(MemoryRule):
        n_slots = 0

        def update(self, past, x, context):
            window = self.push(past, x, context)
            total = window.state.get("sum", x.new_zeros(1, *x.shape[1:]))
            return LayerMemory(window.mem, window.slots, state={"sum": total + 1}), None

    stack = MemoryLM(config_of(model=Sums)).transformer
    memory = None
    for starts in (None, documents(7, 2, (3, 0)), None, documents(7, 2, (0, 1))):
        memory = stack(torch.randn(7, 2, 12), memory, doc_starts=starts)[1]
    assert memory.layers[1].state["sum"][0, :, 0].tolist() == [3, 1]


def frozen(name, **default):
    return dataclass(frozen=True)(type("C", (), {"__annotations__": {name: object}, **default}))


@pytest.mark.parametrize(
    ("settings", "word"),
    [(type("Config", (), {"decay": 0.9}), "frozen"), (frozen("dtype", dtype=torch.float32), "dtype"),
     (frozen("n_heads", n_heads=2), "n_heads"), (frozen("decay"), "default")],
)  # fmt: skip
def test_settings_that_a_memory_cant_have_are_refused(settings, word):
    with pytest.raises(ValueError, match=f"Mine.*{word}"):
        type("Mine", (MemoryRule,), {"Config": settings})


def test_two_classes_of_one_name_are_told_apart():
    Path("other").mkdir()
    Path("other/mine.py").write_text(MINE)
    assert (
        register_model("mine.py:Averages")
        == register_model(f"{Path.cwd()}/mine.py:Averages")
        == "mine.py:Averages"
    )
    with pytest.raises(ValueError, match="the same name"):
        register_model("other/mine.py:Averages")
    with pytest.raises(ValueError, match="MemoryRule"):
        register_memory(nn.Linear)
    assert ModelConfig(model=CompressiveRule, bptt=1) == ModelConfig(model="compressive", bptt=1)
    assert ModelConfig(model=register_memory(registry.load_class("package.module:Averages"))).mem_len == 64
