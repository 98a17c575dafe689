import json
import pickle
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch
from safetensors.torch import load_file, save_file

from memformers.models.compression import CompressionName
from memformers.models.config import AdaptiveConfig, ModelConfig
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from tests.builders import MODELS, SMALL, small_lm
from tests.texts import EXACT, read, tokens


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_shapes_and_memory_bounds_over_many_segments(model, positions):
    lm, memory = small_lm(model, positions=positions), None
    for S in (7, 7, 1, 3, 7, 7, 7):
        logits, memory, auxiliary_loss = lm(tokens(S), memory)
        assert logits.shape == (S, 2, 11)
        assert auxiliary_loss.shape == ()
    lengths = {"transformer": (0, 0), "transformer-xl": (5, 0), "compressive": (3, 4)}
    assert (memory.mem_len, memory.c_mem_len) == lengths[model]
    assert (model == "compressive") == (auxiliary_loss.item() > 0)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("segment_len", [1, 7, 64])
@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_segments_with_unlimited_memory_equal_one_pass(model, segment_len, norm, positions):
    lm = small_lm(model, segment_len=segment_len, mem_len=1000, norm=norm, positions=positions)
    text = tokens(100)
    torch.testing.assert_close(read(lm, text)[0], lm(text).logits, **EXACT)


CHOICES = [
    {"embedding": "adaptive", "adaptive": AdaptiveConfig((3,), div_val=2)},
    {"embedding": "adaptive", "adaptive": AdaptiveConfig(d_embed=8, tie_weights=True, tie_projections=True)},
    {"compression_loss": "auto-encoding"},
    {"bptt": 1},
    *(
        {name: value}
        for name in ("norm", "positions", "kernel", "compression_start")
        for value in get_args(get_type_hints(ModelConfig)[name])
        if value != "fused"
    ),
    *({"compression": value} for value in get_args(CompressionName)),
]


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("settings", CHOICES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_layer_inputs_and_memory_have_the_dtype_of_the_weights(model, settings, autocast, dtype):
    lm = small_lm(model, **settings).to(dtype)
    seen, memory = set(), Memory.empty(lm.config, 2, dtype=dtype)
    for layer in lm.transformer.layers:
        layer.register_forward_pre_hook(lambda _, __, given: seen.add(given["x"].dtype), with_kwargs=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for _ in range(3):
            memory = lm(tokens(7), memory).memory
    assert seen | {part.dtype for parts in memory.parts.values() for part in parts} == {dtype}


def test_learned_positions_are_exactly_as_many_as_the_model_can_meet():
    stored = {
        m: small_lm(m, positions="learned").transformer.layers[0].self_attn.max_positions for m in MODELS
    }
    assert stored == {"transformer": 7, "transformer-xl": 5 + 7, "compressive": 4 + 5 + 7}
    lm, memory = small_lm("compressive", positions="learned", mem_len=1, compression_rate=4), None
    for _ in range(9):  # up to 3 positions wait for a slot, more than mem_len: they count too
        memory = lm(tokens(7), memory).memory


@pytest.mark.parametrize(
    "way",
    [*({"model": model} for model in MODELS[:2]),
     {"compression": "mean"},
     {"compression_start": "mean"},
     {"compression_loss": "auto-encoding"}],
    ids=str,
)  # fmt: skip
def test_the_same_seed_gives_all_models_the_same_shared_weights_however_they_compress(way):
    """A decoder beside a compression changes nothing of that either."""
    states = []
    for changes in ({}, way):
        lm = MemoryLM(replace(SMALL, **({"model": "compressive"} | changes)))
        torch.manual_seed(3)
        lm.reset_parameters()
        states.append({name.replace(".encode", ""): weight for name, weight in lm.state_dict().items()})
    conv, found = states
    own = ".decoder." if "compression_loss" in way else ".compress."
    for name in {name for name in conv | found if own not in name}:
        assert torch.equal(conv[name], found[name]), name


@pytest.mark.parametrize(
    ("model", "settings", "dtype"),
    [*((model, {}, dtype) for model in MODELS for dtype in (torch.float32, torch.float64, torch.bfloat16)),
     *(("compressive", settings, torch.float32) for settings in CHOICES)],
)  # fmt: skip
def test_a_saved_model_comes_back_the_same(model, settings, dtype, tmp_path):
    lm = small_lm(model, **settings).eval().to(dtype)
    lm.save_pretrained(tmp_path / "model")
    again = MemoryLM.from_pretrained(tmp_path / "model")
    assert again.config == lm.config
    assert not again.training
    text = tokens(40)
    assert torch.equal(read(again, text)[0], read(lm, text)[0])
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_tied_weights_are_written_once_and_are_tied_again(tmp_path):
    lm = small_lm("transformer-xl").eval()
    lm.head.weight = lm.embed.weight
    lm.save_pretrained(tmp_path)
    again = MemoryLM.from_pretrained(tmp_path)
    assert again.head.weight is again.embed.weight
    text = tokens(40)
    assert torch.equal(read(again, text)[0], read(lm, text)[0])
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == lm.state_dict().keys() - {"head.weight"}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt", "head.weight": "embed.words"})
    with pytest.raises(ValueError, match=r"head\.weight"):
        MemoryLM.from_pretrained(tmp_path)


NO_WEIGHTS = "doesn't contain the weights of this config"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [("config.json", None, r"config\.json"),
     ("config.json", {"mem_lem": 3}, "unknown key 'mem_lem'; did you mean 'mem_len'"),
     ("config.json", {"mem_len": "long"}, "mem_len"),
     ("config.json", b"{", "can't be read as JSON"),
     ("config.json", {"n_layers": 1}, NO_WEIGHTS),
     ("model.safetensors", b"\x88\x13", NO_WEIGHTS),
     ("model.safetensors", pickle.dumps({"weight": 0}), NO_WEIGHTS),
     ("model.safetensors", None, r"expected .*model\.safetensors beside config\.json")],
)  # fmt: skip
def test_broken_files_are_named_and_nothing_is_unpickled(name, change, message, tmp_path):
    small_lm("transformer-xl").save_pretrained(tmp_path)
    path = tmp_path / name
    if isinstance(change, dict):
        change = json.dumps(json.loads(path.read_text()) | change).encode()
    path.unlink()
    if change is not None:
        path.write_bytes(change)
    with pytest.raises(ValueError, match=message):
        MemoryLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_no_model_wrote_and_the_current_folder_are_not_overwritten(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / name).write_text('{"mine": 1}')
    for folder, message in (("other", name), ("", "folder='' is the current folder")):
        with pytest.raises(ValueError, match=message):
            small_lm("transformer").save_pretrained(folder)
    assert [path.read_text() for path in tmp_path.rglob("*.*")] == ['{"mine": 1}']


def test_a_save_that_fails_leaves_the_old_model(tmp_path, monkeypatch):
    lm = small_lm("transformer")
    lm.save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def disk_full(_, path, ties):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memformers.models.io.save_file", disk_full)
    with pytest.raises(OSError, match="No space left"):
        small_lm("transformer").save_pretrained(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_memory_of_another_kind_of_model_is_an_error():
    with_both, with_mem = (
        small_lm("compressive")(tokens(14)).memory,
        small_lm("transformer-xl")(tokens(7)).memory,
    )
    with pytest.raises(ValueError, match=r"memory of 5 positions .* model='transformer'"):
        small_lm("transformer")(tokens(7), with_mem)
    with pytest.raises(ValueError, match=r"compressed memory of \d slots .* model='transformer-xl'"):
        small_lm("transformer-xl")(tokens(7), with_both)
