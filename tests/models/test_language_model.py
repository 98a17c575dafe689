import json
import pickle
from dataclasses import replace

import pytest
import torch

from memformers.models.language_model import MemoryLM
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


def test_the_transformer_forgets_between_segments():
    lm, text = small_lm("transformer"), tokens(14)
    memory = lm(text[:7]).memory
    torch.testing.assert_close(lm(text[7:], memory).logits, lm(text[7:]).logits)


def test_learned_positions_are_exactly_as_many_as_the_model_can_meet():
    stored = {
        m: small_lm(m, positions="learned").transformer.layers[0].self_attn.max_positions for m in MODELS
    }
    assert stored == {"transformer": 7, "transformer-xl": 5 + 7, "compressive": 4 + 5 + 7}
    lm, memory = small_lm("compressive", positions="learned", mem_len=1, compression_rate=4), None
    for _ in range(9):  # up to 3 positions wait for a slot, more than mem_len: they count too
        memory = lm(tokens(7), memory).memory


def test_the_same_seed_gives_all_models_the_same_shared_weights():
    states = {}
    for model in MODELS:
        lm = MemoryLM(replace(SMALL, model=model))
        torch.manual_seed(3)
        lm.reset_parameters()
        states[model] = lm.state_dict()
    shared = set(states["transformer"])
    assert set(states["transformer-xl"]) == shared
    assert {n for n in set(states["compressive"]) - shared if ".compress." not in n} == set()
    for name in shared:
        for model in MODELS[1:]:
            assert torch.equal(states["transformer"][name], states[model][name]), (model, name)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_saved_model_comes_back_the_same(model, dtype, tmp_path):
    lm = small_lm(model).eval().to(dtype)
    lm.save_pretrained(tmp_path / "model")
    again = MemoryLM.from_pretrained(tmp_path / "model")
    assert again.config == lm.config
    assert not again.training
    text = tokens(7)
    assert torch.equal(again(text).logits, lm(text).logits)
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


NO_WEIGHTS = "doesn't contain the weights of this config"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", None, r"config\.json"),
        ("config.json", {"mem_lem": 3}, "unknown key 'mem_lem'; did you mean 'mem_len'"),
        ("config.json", {"mem_len": "long"}, "mem_len"),
        ("config.json", b"{", "can't be read as JSON"),
        ("config.json", {"n_layers": 1}, NO_WEIGHTS),
        ("model.safetensors", b"\x88\x13", NO_WEIGHTS),
        ("model.safetensors", pickle.dumps({"weight": 0}), NO_WEIGHTS),
        ("model.safetensors", None, r"expected .*model\.safetensors beside config\.json"),
    ],
)
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


def test_a_save_that_fails_leaves_the_old_model(tmp_path, monkeypatch):
    lm = small_lm("transformer")
    lm.save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def disk_full(_, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memformers.pretrained.own.save_file", disk_full)
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
