"""A memory of one's own: named by its file, trained, compared and used like the others."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from memformers import CustomMemory, MemoryLM, MemorySizes, ModelConfig
from memformers.common.files import read_json, write_json
from memformers.comparison import experiment
from memformers.models import kinds
from memformers.models.memory import Memory
from tests.builders import SMALL_RUN
from tests.processes import run, train_first_beside
from tests.texts import EXACT, documents

AVERAGES = Path(__file__).parents[2] / "experiments" / "memories" / "averages.py"
TINY = {"vocab_size": 7, "d_model": 8, "heads": 2, "n_layers": 2, "d_ff": 8, "segment_len": 5}


@pytest.fixture(autouse=True)
def forget(monkeypatch, tmp_path):
    """What forgets which memories were named, as another process does; nothing is named in other tests."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(AVERAGES, "mine.py")

    def forget():
        monkeypatch.setattr(kinds, "_KINDS", {})
        monkeypatch.setattr(kinds, "_TOLD", {})

    forget()
    return forget


def test_a_memory_is_trained_and_used_by_its_name(forget):
    chosen = ("--model", "mine.py:Averages")
    assert "How much of the average stays" in " ".join(run("train", *chosen, "--help").out.split())
    assert run("train", *chosen, "--decay", "0.5", *SMALL_RUN, "--out", "r").code == 0
    settings = read_json(Path("r/config.json"))["model"]
    assert (settings["model"], settings["own"]) == ("mine.py:Averages", {"decay": 0.5})
    assert read_json(Path("r/run.json"))["code"].keys() == {"mine.py"}
    forget()
    without = run("generate", "--checkpoint", "r", "--tokens", 5)
    assert without.code == 2
    assert "'mine.py:Averages' is code that runs only if you name it; give --model mine.py:Ave" in without.err
    Path("text.txt").write_text("speak, speak " * 9)
    for command in (
        ("generate", "--tokens", 5),
        ("evaluate", "--text", "text.txt"),
        ("probe", "--positions", 5, "--tokens", 64),
    ):
        forget()
        place = ("r",) if command[0] == "probe" else ("--checkpoint", "r")
        assert run(*command, *place, *chosen).code == 0


@pytest.mark.usefixtures("quick_runs")
def test_arms_compare_it_and_measure_what_it_recalls_in_a_process_of_its_own(monkeypatch):
    mine = "mine: model=mine.py:Averages decay=0.5 mem_len=63"
    compared = run("compare", "--models", "transformer-xl", "--arms", mine, *SMALL_RUN, "--out", "c")
    assert compared.code == 0, compared.err
    assert read_json(Path("c/mine/config.json"))["model"]["own"] == {"decay": 0.5}
    monkeypatch.setattr(experiment, "run_modules", train_first_beside)
    assert run("recall", "--arms", mine, "--seeds", "1", "--out", "r").code == 0
    assert read_json(Path("r/mine/run.json"))["keys"] == 64
    wrong = run("recall", "--arms", "mine: model=mine.py:Averages dekay=1", "--out", "s")
    assert wrong.said("arm 'mine': there is no setting 'dekay'; did you mean 'decay'?")


def test_the_slot_is_what_its_formula_says_in_each_document():
    config = ModelConfig(model=f"{AVERAGES}:Averages", own={"decay": 0.75}, mem_len=3, **TINY)
    network, memory, read = MemoryLM(config).transformer, Memory(()), torch.randn(20, 2, 8)
    begins = documents(20, 2, (7, 1))
    for at in range(0, 20, 5):
        inputs = [read[at : at + 5]] * 2
        memory, _ = network.after_segment(memory, inputs, config, inputs[0], begins[at : at + 5])
    for stream, begin in ((0, 0), (1, 7)):
        average = torch.zeros(8)
        for x in read[begin:17, stream]:
            average = 0.75 * average + 0.25 * x
        torch.testing.assert_close(memory.c_mem[1][0, stream], average)
    assert torch.equal(memory.mem[0], read[17:])


def test_a_saved_model_is_loaded_with_the_class_alone(forget):
    @dataclass(frozen=True)
    class Settings:
        share: float = 0.5

    class Mean(CustomMemory):
        Config = Settings

        @classmethod
        def memory_sizes(cls, config):
            return [MemorySizes(4, 1, 8)] * config.n_layers

        def grow(self, layer, slots, left, belongs):
            return slots + self.settings.share * left.mean(0, keepdim=True)

    model, tokens = MemoryLM(ModelConfig(model=Mean, own=Settings(0.25), **TINY)).eval(), torch.arange(7)
    model.save_pretrained("saved")
    # As an earlier version wrote it, with checksums of the files that define the model.
    write_json(Path("saved/config.json"), read_json(Path("saved/config.json")) | {"code": {"mine.py": "0"}})
    forget()
    with pytest.raises(ValueError, match="code that runs only if you name it"):
        MemoryLM.from_pretrained("saved")
    loaded = MemoryLM.from_pretrained("saved", model=Mean)
    assert loaded.config.own == Settings(0.25)
    torch.testing.assert_close(loaded(tokens[:, None]).logits, model(tokens[:, None]).logits, **EXACT)


WRONG = '''
from dataclasses import dataclass
from memformers import MemorySizes, CustomMemory

class Nothing: ...
class Empty(CustomMemory): ...
class OfTwo(CustomMemory):
    @classmethod
    def memory_sizes(cls, config):
        return [MemorySizes(2, 2, 4)] * config.n_layers
class Grows(OfTwo):
    def grow(self, layer, slots, left, belongs):
        return slots.repeat(2, 1, 1)
class Narrow(Grows):
    def grow(self, layer, slots, left, belongs):
        return slots[..., :1]
class Fails(Grows):
    def grow(self, layer, slots, left, belongs):
        return slots + undefined
class Short(Grows):
    def forward(self, x, *args, **kwargs):
        output, inputs = super().forward(x, *args, **kwargs)
        return output[1:], inputs
class Open(Grows):
    @dataclass
    class Config:
        decay: float = 0.9
class Bare(Grows):
    @dataclass(frozen=True)
    class Config:
        decay: float
class Taken(Grows):
    @dataclass(frozen=True)
    class Config:
        heads: int = 2
class Other(Grows):
    uses = ("heads",)
'''  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.py:Mean", r"there is no file .*gone\.py; name the file with your class"),
        ("no_package.memory:Mean", "it can't be imported: ModuleNotFoundError: No module named 'no_package'"),
        ("broken.py:Mean", r"broken\.py, line 2: it can't be imported: SyntaxError"),
        ("fails.py:Mean", r"fails\.py, line 3: it can't be imported: ZeroDivisionError: division by zero"),
        ("wrong.py:Grow", r"wrong\.py has no class 'Grow'; did you mean 'Grows'\?"),
        ("wrong.py:dataclass", r"wrong\.py has a function and no class 'dataclass'"),
        ("wrong.py:Nothing", r"wrong\.py, line 5: Nothing is not a memory; derive it from memformers\.Own"),
        ("wrong.py:Empty", r"wrong\.py, line 6: Empty has no memory_sizes, which every memory must define"),
        ("wrong.py:OfTwo", r"wrong\.py, line 7: OfTwo has no grow or remember, which every"),
        ("wrong.py:Other", r"line 36: Other\.uses has 'heads'; expected some of c_mem_len, compression_rate"),
        ("wrong.py:Open", r"line 24: Open\.Config is not a frozen dataclass; write @dataclass\(frozen=True"),
        ("wrong.py:Bare", r"line 28: Bare\.Config: decay has no default; give it one"),
        ("wrong.py:Taken", r"line 32: Taken\.Config: heads is a setting of every model; choose another"),
        ("wrong.py:Grows", r"line 11: Grows\.remember: a compressed memory of 4 slots .* keeps 2 at most"),
        ("wrong.py:Narrow", r"Narrow\.remember: expected c_mem of layer 0 as .*\[·, 2, 8\], got \[2, 2, 1\]"),
        ("wrong.py:Fails", r"wrong\.py, line 19: NameError: name 'undefined' is not defined"),
        ("wrong.py:Short", r"Short\.forward returned \[4, 2, 8\], expected \[S, B, D\] = \[5, 2, 8\]"),
    ],
)
def test_what_is_no_memory_is_one_line_with_its_place(name, message):
    Path("wrong.py").write_text(WRONG)
    Path("broken.py").write_text("x = 1\nclass Mean(\n")
    Path("fails.py").write_text("x = 1\n\nx = 1 / 0\n")
    with pytest.raises(ValueError, match=message) as caught:
        MemoryLM(ModelConfig(model=name, **TINY))(torch.zeros(5, 2, dtype=torch.int64))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"own": {"decay": 2.0}}, "expected decay to be a number, .*1, got decay=2.0"),
        ({"own": {"dekay": 0.5}}, "the settings of mine.py:Averages: .*dekay"),
        ({"own": 3}, "expected own=3 to be a Settings, of model='mine.py:Averages'"),
        (
            {"same_length": True},
            "same_length=True is for model='transformer-xl', got model='mine.py:Averages'",
        ),
    ],
)
def test_settings_that_it_does_not_have_are_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(model="mine.py:Averages", **settings)
