"""A gate, a compression and a loss of one's own: trained, saved, loaded and resumed by their names."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from memformers import MemoryLM, ModelConfig
from memformers.common.files import read_json
from memformers.comparison import experiment
from memformers.evaluation.conformance import assert_conforms
from memformers.models import kinds
from memformers.models.reconstruction import layer_loss, own_loss
from tests.builders import SMALL_RUN
from tests.docs.test_code_blocks import own_parts
from tests.processes import run, train_first_beside
from tests.texts import EXACT

TINY = {
    "model": "compressive", "vocab_size": 7, "d_model": 8, "heads": 2, "n_layers": 2, "d_ff": 8,
    "segment_len": 4, "mem_len": 4, "c_mem_len": 4, "compression_rate": 2,
}  # fmt: skip
OWN = {"gate": "mine.py:Gate", "compression": "mine.py:Gated", "compression_loss": "mine.py:Loss"}
OPTIONS = [word for setting, place in OWN.items() for word in (f"--{setting.replace('_', '-')}", place)]


@pytest.fixture(autouse=True)
def forget(monkeypatch, tmp_path):
    """What forgets which classes were named, as another process does."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(own_parts())

    def forget():
        monkeypatch.setattr(kinds, "_KINDS", {})
        monkeypatch.setattr(kinds, "_TOLD", {})

    forget()
    return forget


def test_parts_are_trained_resumed_and_used_by_their_names(forget):
    train = ["train", "--model", "compressive", "--c-mem-len", 8, *OPTIONS, *SMALL_RUN]
    ended = run(*train, "--checkpoint-every", 2, "--out", "r")
    assert ended.code == 0, ended.err
    assert {name: read_json(Path("r/config.json"))["model"][name] for name in OWN} == OWN
    assert list(read_json(Path("r/run.json"))["code"]) == ["mine.py"]
    forget()
    without = run("generate", "--checkpoint", "r", "--tokens", 5)
    assert without.said("gate='mine.py:Gate' is code that runs only if you name it; give --gate mine.py:Gate")
    forget()
    assert run("generate", "--checkpoint", "r", "--tokens", 5, *OPTIONS).code == 0
    forget()
    assert run("train", "--resume", "r", "--model", "compressive", *OPTIONS).code == 0


@pytest.mark.usefixtures("quick_runs")
def test_an_arm_names_them_for_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(experiment, "run_modules", train_first_beside)
    arm = "mine: model=compressive " + " ".join(f"{name}={place}" for name, place in OWN.items())
    ended = run("recall", "--arms", arm, "--seeds", 1, "--out", "r")
    assert ended.code == 0, ended.err
    assert list(read_json(Path("r/mine/run.json"))["code"]) == ["mine.py"]


def test_a_model_with_them_keeps_what_every_memory_promises():
    assert_conforms("compressive", **OWN)


def parts_of(model):
    layer = model.transformer.layers[0]
    loss = model.transformer.own_losses[0]
    return {"gate": layer.gate_ff, "compression": layer.compress, "compression_loss": loss}


def test_a_saved_model_is_loaded_and_its_losses_train_what_they_should(forget):
    model = MemoryLM(ModelConfig(**TINY | OWN)).eval()
    model.save_pretrained("saved")
    forget()
    with pytest.raises(ValueError, match="in Python the class itself as gate"):
        MemoryLM.from_pretrained("saved")
    classes = {name: type(part) for name, part in parts_of(model).items()}
    forget()
    loaded, memory = MemoryLM.from_pretrained("saved", **classes), None
    for text in torch.randint(7, (6, 4, 2)):
        output = model(text, memory)
        torch.testing.assert_close(loaded(text, memory).logits, output.logits, **EXACT)
        memory = output.memory
    grads = torch.autograd.grad(output.auxiliary_loss, list(model.parameters()), allow_unused=True)
    trained = {
        name for (name, _), grad in zip(model.named_parameters(), grads, strict=True) if grad is not None
    }
    assert trained == {
        f"transformer.layers.{i}.compress.weigh.{part}" for i in (0, 1) for part in ("weight", "bias")
    }
    assert asdict(model.config) == asdict(loaded.config)


def test_documents_are_left_out_of_a_loss_of_ones_own_as_of_the_packages():
    class Error(torch.nn.Module):
        def forward(self, mem, c_mem, attend):
            return torch.nn.functional.mse_loss(attend(c_mem), attend(mem))

    layer = MemoryLM(ModelConfig(**TINY)).transformer.layers[0]
    h, mem, c_mem = (torch.randn(length, 4, 8) for length in (4, 6, 3))
    for left_out in (None, torch.tensor([0, 2, 0, 3]), torch.tensor([3, 3, 3, 3])):
        given = layer, h, mem, c_mem, left_out
        torch.testing.assert_close(own_loss(Error(), *given), layer_loss(*given))


WRONG = """
from torch import nn
def plain(*given): ...
class Bare: ...
class Silent(nn.Module): ...
class Two(nn.Module):
    def __init__(self, *sizes): super().__init__()
class Short(Two):
    def forward(self, x, *others): return x[1:]
class Nothing(Two):
    def forward(self, *given): ...
class Fails(Two):
    def forward(self, *given): return given[0] + undefined
class Asks(nn.Module):
    def __init__(self, one, two, three): ...
    def forward(self, x): ...
"""


def read_segments(settings):
    lm, memory = MemoryLM(ModelConfig(**settings)), None
    for _ in range(4):
        memory = lm(torch.zeros(4, 2, dtype=torch.int64), memory).memory


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gate": "grru"}, "expected gate to be one of 'residual', 'gru', got gate='grru'; the default is"),
        ({"compression": "gone.py:Gated"}, r"there is no file .*gone\.py; name the file with your class"),
        ({"gate": "wrong.py:plain"}, r"wrong\.py has a function and no class 'plain'"),
        ({"gate": "wrong.py:Bare"}, r"wrong\.py, line 4: Bare is not a gate; derive it from torch\.nn\.Mod"),
        ({"compression_loss": "wrong.py:Silent"}, "line 5: Silent has no forward, which every comp"),
        ({"compression": "wrong.py:Asks"}, r"wrong\.py: TypeError: .*missing 1 required positional"),
        ({"gate": "wrong.py:Short"}, r"line 8: Short\.forward returned \[3, 2, 8\], expected \[S, B, D\] = "),
        ({"gate": "wrong.py:Fails"}, r"wrong\.py, line 13: NameError: name 'undefined' is not defined"),
        ({"compression": "wrong.py:Short"}, r"Short\.forward returned \[3, 2, 8\], expected \[n, B, D\]"),
        ({"compression_loss": "wrong.py:Short"}, r"forward returned \[3, 2, 8\], expected a scalar = \[\]"),
        ({"compression_loss": "wrong.py:Nothing"}, r"line 10: Nothing\.forward returned NoneType, exp"),
        ({"gate": "wrong.py:Short", "norm": "post"}, "gate='wrong.py:Short' needs norm='pre'"),
        ({"model": "transformer-xl", "compression": "wrong.py:Short"}, "is for model='compressive', got"),
        ({"compression": "wrong.py:Short", "compression_start": "mean"}, "which draws its own weights"),
        ({"compression": "wrong.py:Short", "bptt": 1, "segment_len": 5}, "needs segments of whole slots"),
    ],
)  # fmt: skip
def test_what_is_no_such_part_is_one_line_with_its_place(settings, message):
    Path("wrong.py").write_text(WRONG)
    with pytest.raises(ValueError, match=message) as caught:
        read_segments({**({} if "model" in settings else TINY), **settings})
    assert "\n" not in str(caught.value)
