"""Models on Hugging Face's hub, by a hub in this process."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load, save

from memformers import ByteTokenizer, CoreConfig, MemoryCore, MemoryLM, ModelConfig, TrainConfig, train
from memformers.data.tokenizers import load_tokenizer
from memformers.integrations.hub import push_to_hub, save_for_hub
from memformers.runs.load import load_pretrained
from memformers.training.initial_weights import load_initial
from tests.hub import running_hub
from tests.processes import run

NAME = "somebody/novels"
SIZES = {"d_model": 16, "n_heads": 2, "n_layers": 1, "d_ff": 16, "segment_len": 8, "mem_len": 8}
CPU = torch.device("cpu")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(tmp_path)
    with running_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def language_model(**settings):
    torch.manual_seed(0)
    return MemoryLM(ModelConfig(**{"model": "compressive", "vocab_size": 256, **SIZES, **settings})).eval()


def card_of(hub, name=NAME):
    """The metadata and the text of a model card."""
    _, metadata, text = hub.files[name]["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_a_model_comes_back_as_it_was_pushed(hub):
    model = language_model()
    address = push_to_hub(model, NAME, ByteTokenizer())
    assert address.startswith(f"{hub.address}/{NAME}/commit/")
    loaded = MemoryLM.from_pretrained(NAME)
    assert loaded.config == model.config
    assert not loaded.training
    tokens = torch.arange(24)[:, None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_the_tokenizer_comes_back_with_the_model(hub):
    push_to_hub(language_model(), NAME, ByteTokenizer())
    for _, tokenizer in (load_pretrained(NAME, CPU), load_initial(NAME)):
        assert tokenizer.to_json() == {"tokenizer": "byte"}


def test_the_command_generates_with_a_model_of_the_hub(hub):
    push_to_hub(language_model(), NAME, ByteTokenizer())
    ended = run("generate", "--pretrained", NAME, "--prompt", "It was", "--tokens", "5", "--seed", "0")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("It was")


def test_a_core_comes_back_without_a_tokenizer(hub):
    core = MemoryCore(CoreConfig(d_input=3, **SIZES))
    push_to_hub(core, NAME)
    assert set(hub.files[NAME]) == {"config.json", "model.safetensors", "manifest.json", "README.md"}
    loaded = MemoryCore.from_pretrained(NAME)
    assert all(map(torch.equal, loaded.parameters(), core.parameters()))
    assert "pipeline_tag" not in card_of(hub)[0]


@pytest.mark.usefixtures("quick_runs")
def test_a_run_is_pushed_with_its_tokenizer_and_metrics(hub, tmp_path):
    network = ModelConfig(**SIZES)
    config = TrainConfig(model=network, data="builtin", max_tokens=600, batch_size=4)
    trained = train(config, "runs/novels", dashboard="off")
    push_to_hub("runs/novels", NAME)
    metadata, text = card_of(hub)
    assert metadata["tags"][:2] == ["memformers", "transformer-xl"]
    assert f"| loss on the held-out text, nats per token | {trained.result['loss']:.4f} |" in text
    assert str(tmp_path) not in text
    assert load_pretrained(NAME, CPU)[1].to_json() == trained.tokenizer.to_json()


def test_a_model_card_has_the_metrics_that_are_passed(hub):
    push_to_hub(language_model(), NAME, metrics={"bits per byte": 1.23456, "text": "my novels"})
    _, text = card_of(hub)
    assert "| bits per byte | 1.2346 |\n| text | my novels |\n" in text


def test_a_changed_model_card_stays(hub):
    push_to_hub(language_model(), NAME)
    hub.files[NAME]["README.md"] = b"# Mine"
    push_to_hub(language_model(n_layers=2), NAME)
    assert hub.files[NAME]["README.md"] == b"# Mine"
    assert MemoryLM.from_pretrained(NAME).config.n_layers == 2


def test_a_new_repository_is_private_if_asked(hub):
    push_to_hub(language_model(), NAME, private=True)
    assert hub.private == {NAME}


def test_a_missing_weight_is_an_error(hub):
    """PyTorchModelHubMixin leaves it random, silently."""
    push_to_hub(language_model(), NAME)
    files = hub.files[NAME]
    weights = load(files["model.safetensors"])
    del weights["embed.weight"]
    files["model.safetensors"] = save(weights)
    with pytest.raises(ValueError, match=r"has changed since it was written"):
        MemoryLM.from_pretrained(NAME)
    del files["manifest.json"]
    with pytest.raises(ValueError, match=r"Missing key\(s\) in state_dict: \"embed\.weight\"") as error:
        MemoryLM.from_pretrained(NAME)
    assert "\n" not in str(error.value)


def test_a_revision_that_is_missing_is_an_error(hub):
    push_to_hub(language_model(), NAME)
    commit = hub.commit_of(NAME)
    assert MemoryLM.from_pretrained(NAME, revision=commit).config.n_layers == 1
    with pytest.raises(ValueError, match="there is no folder somebody/novels, and the hub's model can't be"):
        MemoryLM.from_pretrained(NAME, revision="v2")


def test_a_name_that_the_hub_lacks_is_an_error_in_one_line(hub):
    with pytest.raises(ValueError, match=r"hub's model can't be downloaded: .*hf auth login") as error:
        MemoryLM.from_pretrained("somebody/nothing")
    assert "\n" not in str(error.value)
    ended = run("generate", "--pretrained", "somebody/nothing")
    assert ended.code == 2
    assert ended.err.count("\n") == 1


def test_a_model_without_tokenizer_can_t_generate(hub):
    push_to_hub(language_model(), NAME)
    ended = run("generate", "--pretrained", NAME)
    assert ended.code == 2
    assert "tokenizer.json" in ended.err


def test_a_folder_comes_before_the_hub(hub, tmp_path):
    language_model(n_layers=2).save_pretrained(tmp_path / NAME)
    push_to_hub(language_model(), NAME)
    assert MemoryLM.from_pretrained(NAME).config.n_layers == 2


MISSING = r"expected a file somebody/novels/config\.json, but it is missing"


def test_a_path_in_a_folder_is_no_name_on_the_hub(hub, tmp_path):
    (tmp_path / "somebody").mkdir()
    with pytest.raises(ValueError, match=MISSING):
        MemoryLM.from_pretrained(NAME)


@pytest.mark.parametrize("path", [Path(NAME), f"./{NAME}"])
def test_a_path_is_no_name_on_the_hub(hub, path):
    with pytest.raises(ValueError, match=MISSING):
        MemoryLM.from_pretrained(path)


@pytest.mark.parametrize("name", ["novels", "a/b/c", "../novels", "/somebody/novels", ""])
def test_a_name_without_owner_is_refused(hub, name):
    message = f"expected a name on the hub, as OWNER/NAME, got {name!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        push_to_hub(language_model(), name)


def test_a_tokenizer_of_another_size_is_refused(hub):
    with pytest.raises(ValueError, match="a model of 65 tokens and a tokenizer of 256"):
        push_to_hub(language_model(vocab_size=65), NAME, ByteTokenizer())
    assert hub.files == {}


def test_a_core_with_a_tokenizer_is_refused(hub):
    with pytest.raises(ValueError, match="a MemoryCore reads features, not text"):
        push_to_hub(MemoryCore(CoreConfig(d_input=3, **SIZES)), NAME, ByteTokenizer())


def test_a_revision_of_a_folder_is_refused(tmp_path):
    language_model().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="revision is for a model on the hub"):
        MemoryLM.from_pretrained(tmp_path / "model", revision="v1")


def test_the_folder_of_a_push_loads_like_any_other(tmp_path):
    save_for_hub(language_model(), tmp_path, NAME, ByteTokenizer())
    assert MemoryLM.from_pretrained(tmp_path).config.vocab_size == 256
    assert load_tokenizer(tmp_path).to_json() == {"tokenizer": "byte"}
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert set(manifest["files"]) == {"config.json", "model.safetensors", "tokenizer.json"}


def test_transformers_gets_a_model_by_its_name_on_the_hub(hub):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from memformers.integrations import huggingface

    push_to_hub(language_model(), NAME, ByteTokenizer())
    model, tokenizer = huggingface.load(NAME)
    ids = tokenizer("It was", return_tensors="pt").input_ids
    expected = language_model()(ids.T).logits[:, 0]
    assert torch.allclose(model(ids).logits[0], expected, atol=1e-5)
