"""The original Transformer-XL's weights in our model, against the original written from its equations, in
double precision; and files that hold them, or worse.

Seven settings of two values each decide what the weights are. Of the 128 models, 16 are compared: each of the
16 vocabularies (the first four settings) with one layout of the other three, each of which is the parity of
three of those four. So every combination of values of any three settings occurs (a design of resolution IV),
and each pair of values four times. The cuts of distances are chosen in the same way, 8 of 16.
"""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from memformers import from_transfo_xl, load_weights
from memformers.generation.decoding import Decoder
from memformers.pretrained.transfo_xl import OURS_ALONE, converted
from tests.builders import Bomb
from tests.pretrained.transfo_xl_reference import Reference

BOTH = (False, True)
MODELS = [
    (((), (3, 7))[a], (1, 2)[b], (12, 8)[c], d, a ^ b ^ c, b ^ c ^ d, a ^ c ^ d)
    for a, b, c, d in itertools.product(BOTH, repeat=4)
]
CUTS = [((4, 100)[a], b, (8, 3)[c], a ^ b ^ c) for a, b, c in itertools.product(BOTH, repeat=3)]


def made(**changes):
    """A model with clusters of rare words whose vectors are narrower, and its state dict."""
    reference = Reference(**{"cutoffs": (3, 7), "div_val": 2} | changes)
    return reference, reference.named(reference.weights())


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("cutoffs", "div_val", "d_embed", "tied", "untie_r", "original", "pre_lnorm"), MODELS
)
def test_outputs_memories_and_gradients_agree_over_four_segments(
    cutoffs, div_val, d_embed, tied, untie_r, original, pre_lnorm
):
    reference = Reference(cutoffs, div_val, d_embed, tied, untie_r, original, pre_lnorm=pre_lnorm)
    weights = reference.weights()
    model = from_transfo_xl(reference.named(weights), reference.config)
    shared, maps = model.config.adaptive, div_val > 1 or d_embed != 12
    assert shared.tie_weights == tied
    assert shared.tie_projections == (tied and bool(cutoffs) and maps)
    mems, memory, their_loss, our_loss = [], None, 0.0, 0.0
    for S in (5, 5, 2, 7):
        tokens, targets = torch.randint(0, reference.V, (2, S, 3))
        wanted, mems = reference.forward(weights, tokens, mems)
        logits, memory, _ = model(tokens, memory)
        close(logits, wanted)
        close(list(memory.mem), mems)
        their_loss = their_loss - wanted.gather(-1, targets[..., None]).mean()
        our_loss = our_loss + F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    close(our_loss, their_loss)
    our_loss.backward()
    their_loss.backward()
    # Their gradients go through the same map as their weights.
    wanted, _ = converted(reference.named({name: t.grad for name, t in weights.items()}), reference.config)
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert set(ours) == set(wanted)
    for name, grad in ours.items():
        if name.endswith(OURS_ALONE):
            continue
        if name.endswith((".u", ".v")) and not untie_r:
            grad = sum(g for other, g in ours.items() if other.endswith(name[-len(".u") :]))
        close(grad, wanted[name])
        assert grad.abs().sum() > 0


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("clamp_len", "same_length", "mem_len", "pre_lnorm"), CUTS)
def test_distances_are_clamped_and_cut_as_the_config_says_by_segment_and_by_token(
    clamp_len, same_length, mem_len, pre_lnorm
):
    lengths = {"clamp_len": clamp_len, "same_length": same_length, "mem_len": mem_len}
    reference = Reference((3, 7), 2, tied=True, pre_lnorm=pre_lnorm, **lengths)
    weights = reference.weights()
    model = from_transfo_xl(reference.named(weights), reference.config)
    one_by_one, in_portions, mems, memory = Decoder(model, 2), Decoder(model, 2), [], None
    for _ in range(4):
        tokens = torch.randint(0, reference.V, (5, 2))
        wanted, mems = reference.forward(weights, tokens, mems)
        logits, memory, _ = model(tokens, memory)
        close(logits, wanted)
        close(list(memory.mem), mems)
        close(torch.stack([one_by_one.read(token[None]) for token in tokens]), wanted.detach())
        close(in_portions.read(tokens[:2]), wanted[1].detach())
        close(in_portions.read(tokens[2:]), wanted[4].detach())


@pytest.mark.parametrize("dropped", ["word_emb.emb_layers", "crit.out_layers", "nothing"])
@pytest.mark.parametrize("suffix", ["bin", "pt", "safetensors"])
@pytest.mark.parametrize("original", BOTH)
def test_files_in_single_precision_give_the_same_model_however_what_is_tied_was_saved(
    dropped, suffix, original, tmp_path
):
    reference = Reference((3, 7), 2, 8, tied=True, original=original)
    weights = {name: t.detach() for name, t in reference.weights().items()}
    kept = {
        name: tensor.clone()
        for name, tensor in reference.named(weights).items()
        if not (dropped in name and name.endswith(".weight"))
    }
    model = from_transfo_xl(load_weights(saved(kept, tmp_path / f"model.{suffix}")), reference.config)
    assert model.config.adaptive.tie_weights
    tokens = torch.randint(0, reference.V, (5, 2))
    logits = model(tokens).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference.forward(weights, tokens, [])[0])


def test_what_the_weights_do_not_show_is_the_configs_or_our_default_and_where_they_normalize_must_be_said():
    reference, state = made()
    config = from_transfo_xl(state, reference.config).config
    assert (config.mem_len, config.segment_len) == (8, 5)
    config = from_transfo_xl(state, {"pre_lnorm": False}).config
    assert (config.mem_len, config.segment_len, config.adaptive.cutoffs) == (64, 64, (3, 7))
    assert from_transfo_xl(state, {"pre_lnorm": True}).config.norm == "pre-without-final"
    assert from_transfo_xl(made(original=False)[1]).config.norm == "post"
    with pytest.warns(UserWarning, match=r"dropatt=0\.0 is not used: .* dropout=0\.1 applies to attention"):
        from_transfo_xl(state, reference.config | {"dropout": 0.1, "dropatt": 0.0})
    with warnings.catch_warnings(action="error"):
        from_transfo_xl(state, reference.config | {"dropout": 0.1, "dropatt": 0.1})


@pytest.mark.parametrize(
    ("change", "message"),
    [({"layers.1.dec_attn.o_net.weight": None}, r"missing: layers\.1\.dec_attn\.o_net\.weight\.$"),
     ({"layers.0.dec_attn.q_net.weight": torch.ones(2)}, r"unexpected: layers\.0\.dec_attn\.q_net"),
     ({"layers.1.pos_ff.CoreNet.0.bias": torch.ones(9)}, r"CoreNet\.0\.bias is \[9\], not \[16\]"),
     ({"word_emb.emb_layers.0.weight": torch.ones(3)}, r"0\.weight to have 2 dimensions, got \[3\]"),
     ({"r_w_bias": None}, r"the weights lack layers\.0\.dec_attn\.r_w_bias"),
     ({"r_w_bias": torch.ones(2, 4)}, r"n_head=2 times d_head=4 must equal d_model=12"),
     ({"crit.out_layers.1.bias": torch.ones(4, dtype=torch.int8)},
      r"crit\.out_layers\.1\.bias is torch\.int8, no floating-point tensor"),
     ({"crit.cluster_bias": torch.ones(1)}, r"have 1 clusters of rare words, and cutoffs=\[3, 7\] make 2")],
)  # fmt: skip
def test_weights_that_do_not_fit_are_named(change, message):
    changed = {name: t for name, t in (made()[1] | change).items() if t is not None}
    with pytest.raises(ValueError, match=message) as error:
        from_transfo_xl(changed, {"pre_lnorm": False})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [({"cutoffs": None}, r"have 2 clusters of rare words, and cutoffs=\[\] make 0; give those of the model"),
     ({"cutoffs": [3, 30]}, r"cutoffs=\(3, 30\)"),
     ({"cutoffs": 3}, "cutoffs=3"),
     ({"n_head": 4}, r"n_head=3, .* n_head=4"),
     ({"tie_projs": True}, "tie_projs=True"),
     ({"attn_type": 2}, r"attn_type=0, .* attn_type=2"),
     ({"mem_len": "long"}, "mem_len='long'"),
     ({"mem_len": -1}, "mem_len=-1"),
     ({"dropout": "0.1"}, "dropout='0.1'"),
     ({"pre_lnorm": None}, r"got pre_lnorm=None; give it, as in config=\{'pre_lnorm'"),
     ({"pre_lnorm": "no"}, "got pre_lnorm='no'")],
)  # fmt: skip
def test_a_config_of_another_model_is_an_error(config, message):
    """None stands for a setting that is left out."""
    config = {"pre_lnorm": False, "cutoffs": [3, 7]} | config
    with pytest.raises(ValueError, match=message):
        from_transfo_xl(made(div_val=1)[1], {name: v for name, v in config.items() if v is not None})


def test_a_state_dict_of_another_model_is_an_error():
    with pytest.raises(ValueError, match=r"expected .* Transformer-XL, .* weight, bias"):
        from_transfo_xl(torch.nn.Linear(2, 2).state_dict())


def saved(state, path):
    """The ``path`` where a file now has this ``state``, in the format of its suffix."""
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return path


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth"])
def test_a_pickle_that_would_run_code_is_refused_and_runs_none(suffix, tmp_path):
    path, exploded = tmp_path / f"model.{suffix}", tmp_path / "sprung"
    torch.save({"weight": torch.ones(2), "bomb": Bomb(exploded)}, path)
    with pytest.raises(ValueError, match=r"is refused: loading it would run code \(\w+\.mkdir\)") as error:
        load_weights(path)
    assert "\n" not in str(error.value)
    assert not exploded.exists()
    # Unsafe on purpose: this file was made above, and its code only makes a folder. Without this check, a
    # file whose code never runs would pass the test.
    torch.load(path, weights_only=False)
    assert exploded.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("none.bin", None, r"none\.bin .* is missing"),
     ("list.bin", [1, 2], "state dict of tensors, got a list"),
     ("numbers.bin", {3: torch.ones(2)}, "holds more than tensors: 3; save"),
     ("run.bin", {"state_dict": {}, "epoch": 3}, "holds more than tensors: state_dict, epoch; save"),
     ("text.bin", "no weights\n", r"text\.bin can't be read as"),
     ("text.safetensors", "no weights\n", r"text\.safetensors can't be read as")],
)  # fmt: skip
def test_files_without_weights_are_named(name, content, message, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_text(content) if isinstance(content, str) else torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        load_weights(path)


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_a_broken_file_is_an_error_or_the_tensors_and_nothing_else(suffix, tmp_path):
    path = saved({"a": torch.randn(7, 3), "b": torch.randn(5)}, tmp_path / f"model.{suffix}")
    whole, refused = path.read_bytes(), []
    generator = torch.Generator().manual_seed(0)
    broken = [whole[: len(whole) * part // 20] for part in range(20)]
    for at in torch.randint(0, len(whole), (200,), generator=generator).tolist():
        broken.append(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
    for content in broken:
        path.write_bytes(content)
        try:
            loaded = load_weights(path)
        except ValueError as error:
            loaded, refused = {}, [*refused, str(error)]
        assert all(isinstance(tensor, torch.Tensor) for tensor in loaded.values())
    assert len(refused) >= 20  # the truncated ones at least
    assert not [message for message in refused if "\n" in message]
