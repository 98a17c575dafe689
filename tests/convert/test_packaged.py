"""The trained models that come with the package, and the program that makes them."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from experiments import pretrained
from memformers import MemoryLM
from memformers.common.files import check_manifest, read_json
from memformers.data.builtin import write_play
from memformers.evaluation.evaluate import evaluate
from memformers.models.io import PACKAGED, RECIPE, WEIGHTS, packaged_names
from memformers.runs.load import load_checkpoint, load_pretrained
from tests.builders import small_lm, small_training
from tests.processes import run

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# The beginning of Tiny Shakespeare, which the models were trained on.
SCENE = """First Citizen:
Before we proceed any further, hear me speak.

All:
Speak, speak.
"""


@pytest.fixture(params=packaged_names())
def name(request):
    return request.param


def test_a_packaged_model_is_small_and_loads_in_float32(name):
    assert packaged_names() == ["compressive-shakespeare", "transformer-xl-shakespeare"]
    check_manifest(PACKAGED / name)
    assert sum(path.stat().st_size for path in (PACKAGED / name).iterdir()) <= 2_000_000
    model = MemoryLM.from_pretrained(name)
    weights = load_file(PACKAGED / name / WEIGHTS)
    assert not model.training
    state = model.state_dict()
    assert state.keys() == weights.keys()
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    for key, weight in weights.items():
        assert torch.equal(state[key], weight.float())


def test_a_packaged_model_has_learned_what_its_recipe_names(name):
    recipe = read_json(PACKAGED / name / RECIPE)
    model, tokenizer = load_pretrained(name, CPU)
    assert recipe["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert recipe["training"]["model"]["model"] == name.removesuffix("-shakespeare")
    assert recipe["corpus"]["name"] == "Tiny Shakespeare"
    assert 1.0 < recipe["held_out"]["loss_nats"] < 1.5
    assert evaluate(model, tokenizer.encode(SCENE), 1).loss < math.log(tokenizer.vocab_size) / 2


def test_guide_and_card_have_the_numbers_of_the_recipe(name):
    recipe = read_json(PACKAGED / name / RECIPE)
    page = (ROOT / "docs/how-to/generate.md").read_text(encoding="utf-8")
    [row] = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    assert f"| {recipe['parameters']:,} |" in row
    assert f"| {recipe['held_out']['loss_nats']:.4f} nats per token |" in row
    text = (PACKAGED / name / pretrained.CARD).read_text(encoding="utf-8")
    assert text == pretrained.model_card(name, recipe)
    assert f"{recipe['held_out']['loss_nats']:.4f} nats" in text
    assert yaml.safe_load(text.split("---")[1])["license"] == "mit"


def test_a_folder_comes_before_a_name(here):
    lm = small_lm("transformer")
    lm.save_pretrained("compressive-shakespeare")
    assert MemoryLM.from_pretrained("compressive-shakespeare").config == lm.config


def test_an_unknown_model_is_refused(here):
    with pytest.raises(ValueError, match=r"'hamlet'; use one of compressive"):
        MemoryLM.from_pretrained("hamlet")
    with pytest.raises(ValueError, match=r"config\.json, but it is missing"):
        MemoryLM.from_pretrained("./models/hamlet")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--pretrained", "hamlet"], "no pretrained model is called 'hamlet'; use one of compressive-sh"),
     ([], "name one model: --checkpoint with the folder of a run, or --pretrained with one of compress"),
     (["--pretrained", "compressive-shakespeare", "--checkpoint", "runs"], "name one model")],
)  # fmt: skip
def test_one_model_must_be_named_and_be_there(arguments, message):
    assert run("generate", *arguments).says(message)


@pytest.mark.usefixtures("quick_runs")
def test_the_program_packages_weights_in_bfloat16(tmp_path, monkeypatch):
    small = replace(small_training().model, vocab_size=None)
    monkeypatch.setattr(pretrained, "MODELS", {"small": small})
    out = tmp_path / "out"
    runs = tmp_path / "runs"
    pretrained.Pretraining(data="builtin", tokens=5_000, runs=runs, out=out).run()
    check_manifest(out / "small")
    trained, tokenizer = load_checkpoint(runs / "small", CPU)
    packaged, _ = load_checkpoint(out / "small", CPU)
    weights = packaged.state_dict()
    for name, weight in trained.state_dict().items():
        assert torch.equal(weights[name], weight.bfloat16())
    recipe = read_json(out / "small" / RECIPE)
    held_out = write_play(30_000)[27_000:]
    loss = evaluate(packaged.float(), tokenizer.encode(held_out), 16).loss
    assert recipe["held_out"]["loss_nats"] == pytest.approx(loss, abs=1e-6)
    with pytest.raises(ValueError, match=r"take [\d,]+ bytes in bfloat16; use at most 1,000"):
        pretrained.package_model(runs / "small", out / "large", max_bytes=1_000)


def test_the_program_trains_on_no_stand_in_for_the_text(tmp_path):
    with pytest.raises(ValueError, match="name its file with --data"):
        pretrained.Pretraining(data="stand-in", runs=tmp_path / "runs", out=tmp_path / "out").run()
    assert not list(tmp_path.iterdir())
