import hashlib
import json
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from memformers import AdaptiveConfig, CoreConfig, Memory, MemoryCore, MemoryLM, ModelConfig
from tests.builders import SMALL, small_lm
from tests.models.test_contract import CONFIGS, lm_of
from tests.texts import kept, read, tokens


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("name", CONFIGS)
def test_layer_inputs_and_memory_have_the_dtype_of_the_weights(name, autocast, dtype):
    lm = lm_of(name).train().to(dtype)
    dtypes = set()
    for layer in lm.transformer.layers:
        layer.register_forward_pre_hook(lambda _, inputs: dtypes.add(inputs[0].dtype))
    memory = Memory.empty(lm.config, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for _ in range(3):
            memory = lm(tokens(6), memory).memory
    dtypes |= {part.dtype for part in kept(memory)}
    assert dtypes == {dtype}


FIRST_WEIGHTS = {
    "5ff438559c56": {"model": "transformer-xl", "positions": "learned"},
    "0cb608117df9": {"model": "transformer-xl", "gate": "gru", "norm": "pre-without-final"},
    "228692458e93": {"model": "compressive", "compression": "dilated", "compression_rate": (3, 2)},
    "ae02fe86e87a": {"model": "compressive", "compression_start": "mean", "embedding": "adaptive",
                     "adaptive": AdaptiveConfig((3, 6), 2, None, True, True)},
}  # fmt: skip


# What parameters were called when these digests were made.
RENAMED = (
    (r"rules\.(\d+)\.f_c\.", r"layers.\1.compress."), (r"\.U_g\.", ".of_reset."), (r"\.U\.", ".of_input."),
    (r"\.W\.", ".of_output."), (r"\.gate_bias$", ".shut"),
)  # fmt: skip


def first_name(name):
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


@pytest.mark.parametrize("wanted", FIRST_WEIGHTS)
def test_first_weights_of_a_seed_are_those_of_earlier_versions(wanted):
    lm = MemoryLM(replace(SMALL, **FIRST_WEIGHTS[wanted]))
    digest = hashlib.sha256()
    for _, weight in sorted(lm.state_dict().items(), key=lambda item: first_name(item[0])):
        digest.update(weight.contiguous().numpy().tobytes())
    assert digest.hexdigest().startswith(wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_is_loaded_as_it_was(tied, tmp_path):
    """Weights that are tied are written once, and stay tied."""
    lm = small_lm("transformer-xl").eval().bfloat16()
    if tied:
        lm.head.weight = lm.embed.weight
    lm.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "manifest.json", "model.safetensors"}
    loaded = MemoryLM.from_pretrained(tmp_path)
    assert loaded.config == lm.config
    assert not loaded.training
    assert (loaded.head.weight is loaded.embed.weight) is tied
    text = tokens(40)
    assert torch.equal(read(loaded, text)[0], read(lm, text)[0])
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == lm.state_dict().keys() - ({"head.weight"} if tied else set())
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt", "head.weight": "embed.words"})
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"head\.weight") if tied else nullcontext():
        MemoryLM.from_pretrained(tmp_path)


NO_WEIGHTS = "weights of this config"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [("config.json", None, r"config\.json"),
     ("config.json", {"mem_lem": 3}, "mem_len"),
     ("config.json", {"mem_len": "long"}, "mem_len"),
     ("config.json", b"{", "JSON"),
     ("config.json", {"n_layers": 1}, NO_WEIGHTS),
     ("model.safetensors", b"\x88\x13", NO_WEIGHTS),
     ("model.safetensors", None, "missing")],
)  # fmt: skip
def test_broken_files_are_named(name, change, message, tmp_path):
    """Also of a folder without a manifest, as another program may have written it."""
    small_lm("transformer-xl").save_pretrained(tmp_path)
    (tmp_path / "manifest.json").unlink()
    path = tmp_path / name
    if isinstance(change, dict):
        change = json.dumps(json.loads(path.read_text()) | change).encode()
    path.unlink()
    if change is not None:
        path.write_bytes(change)
    with pytest.raises(ValueError, match=message):
        MemoryLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_only_a_models_files_are_overwritten(name, tmp_path, here):
    """Neither another file, nor what is in the current folder."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / name).write_text('{"mine": 1}')
    for folder, message in (("other", name), ("", "current folder")):
        with pytest.raises(ValueError, match=message):
            small_lm("transformer").save_pretrained(folder)
    assert [path.read_text() for path in tmp_path.rglob("*.*")] == ['{"mine": 1}']


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_in_which_a_byte_has_changed_is_refused(name, tmp_path):
    small_lm("compressive").save_pretrained(tmp_path)
    raw = bytearray((tmp_path / name).read_bytes())
    raw[-1] ^= 1
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=rf"{name} has changed since it was written"):
        MemoryLM.from_pretrained(tmp_path)


def test_a_core_is_saved_and_loaded(tmp_path):
    core = MemoryCore(CoreConfig("compressive", d_input=3, d_model=12, n_heads=3, gate="gru")).eval()
    core.save_pretrained(tmp_path)
    loaded = MemoryCore.from_pretrained(tmp_path)
    x = torch.randn(5, 2, 3)
    assert loaded.config == core.config
    assert torch.equal(loaded(x).output, core(x).output)
    with pytest.raises(ValueError, match="d_input"):
        MemoryLM.from_pretrained(tmp_path)


def test_a_core_has_the_network_of_a_language_model():
    core = MemoryCore(CoreConfig("compressive", d_input=3, d_model=12, n_heads=3, gate="gru"))
    lm = MemoryLM(ModelConfig("compressive", d_model=12, n_heads=3, gate="gru"))
    assert core.transformer.state_dict().keys() == lm.transformer.state_dict().keys()


@pytest.mark.parametrize("bptt", [0, 1])
def test_compressions_learn_from_a_loss_that_is_not_returned(bptt):
    lengths = {"segment_len": 8, "mem_len": 4, "c_mem_len": 4, "compression_rate": 2}
    core = MemoryCore(3, 8, model="compressive", n_layers=2, n_heads=2, bptt=bptt, **lengths)
    segments = torch.randn(24, 2, 3).split(8)

    # The same numbers and gradients as with the loss added by hand.
    gradients = []
    outputs = []
    for return_loss in (True, False):
        core.zero_grad()
        memory = None
        total = torch.zeros(())
        for x in segments:
            if return_loss:
                output, memory, auxiliary_loss = core(x, memory)
                total = total + auxiliary_loss
            else:
                output, memory = core(x, memory, return_loss=False)
            total = total + output.square().sum()
        total.backward()
        outputs.append(output)
        gradients.append({name: p.grad.clone() for name, p in core.named_parameters()})
    assert torch.equal(*outputs)
    assert any(".f_c." in name and g.any() for name, g in gradients[0].items())
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
    with torch.no_grad():
        assert len(core(segments[0], return_loss=False)) == 2
